"""What a rank must hold to train under DDP and under each ZeRO stage, counted from shapes alone.

Source: Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054, section 3 for the model states; what travels is
counted as it is held here, and for stage 3 as torch's ``fully_shard`` holds it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_distkit.core.reuse import best_fit
from lightning_distkit.core.zero.reduction import IN_FLIGHT

STAGES = (0, 1, 2, 3)  # 0 is plain DDP
WORLD_SIZES = tuple(2**n for n in range(11))  # that `what_fits` tries
PRECISIONS: dict[str, torch.dtype | None] = {  # Lightning's words; what the parameters are cast to
    "32-true": None,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": None,
    "16-mixed": None,
}
_KEPT = {  # by how many tensors of the parameter's size each keeps of it
    0: ("sgd", "adafactor"),  # adafactor a row and a column in place of a matrix: see `_state_numel`
    1: ("sgd_momentum", "adagrad", "rmsprop", "asgd", "lion", "muon"),
    2: ("adam", "adamw", "nadam", "radam", "adamax", "lamb", "adadelta", "rprop"),
}
OPTIMIZERS = {name: n_kept for n_kept, names in _KEPT.items() for name in names}
_MORE = {  # options that cost one more each
    "sgd": ("momentum",),
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
    "rmsprop": ("momentum", "centered"),
}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, at the peak of a step; without activations and what the optimizer needs while it steps."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    master_weights: int
    reduced_gradients: int  # stage 1: this rank's shard of the mean, beside the whole gradients
    in_flight: int  # DDP's buckets; stages 1 and 2: memory for what travels, and gradients that are not yet shards
    unsharded: int  # stage 3: what is whole at the peak, less the gradient shards that are not there yet
    autocast: int  # copies of weights in half precision that wait for the backward, beyond the gradients that follow

    @property
    def model_state(self) -> int:
        """What the paper counts."""
        return self.parameters + self.gradients + self.optimizer_state + self.master_weights

    @property
    def total(self) -> int:
        others = self.buffers + self.reduced_gradients + self.in_flight + self.unsharded + self.autocast
        return self.model_state + others


def estimate_memory(
    module_or_numel: nn.Module | float,
    stage: int,
    world_size: int,
    optimizer: str | type[Optimizer] | Optimizer = "adam",
    precision: str = "32-true",
    *,
    master_weights: bool = False,
    bucket_cap_mb: float = 25.0,
    gradient_as_bucket_view: bool = False,
    n_blocks: int = 32,
) -> MemoryEstimate:
    """What one rank holds at the peak of a step.

    Activations are not counted: they depend on the batch. Gradients are taken to be set to None before each backward,
    as ``zero_grad`` does. On one rank nothing is sharded and nothing travels, whatever the stage.

    Args:
        module_or_numel: a module, on the meta device or any other: shapes and dtypes are its own, a tied parameter
            counts once, a frozen one has neither gradient nor state. Or a number of parameters, all trained, none
            larger than a bucket.
        stage: 0 for plain DDP, or ZeRO's 1 (optimizer state sharded), 2 (also gradients), 3 (also parameters).
        world_size: the ranks that share.
        optimizer: one of `OPTIMIZERS`, or an optimizer's class, or an instance, whose options then count.
        precision: one of `PRECISIONS`. With "bf16-mixed" and "16-mixed" parameters, gradients and state stay as they
            are, float32; autocast adds copies of the weights. The "-true" ones cast all, "32-true" nothing.
        master_weights: the optimizer keeps and updates a float32 copy of half-precision parameters, its state in
            float32 too, both sharded alike.
        bucket_cap_mb: what travels together in stages 1 and 2, in 2**20 bytes; a larger parameter is its own bucket.
        gradient_as_bucket_view: of DDP: the gradients are its buckets, not a copy of them.
        n_blocks: of a number of parameters only: into how many equal blocks stage 3 divides it.

    Raises:
        ValueError: an argument is none of these, or the parameters have no shapes yet.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be 0 (DDP), 1, 2 or 3, got {stage!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be more than 0, got {bucket_cap_mb}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if isinstance(module_or_numel, nn.Module):
        model = _of_module(module_or_numel, precision)
    else:
        model = _of_numel(module_or_numel, precision, n_blocks)
        if _name_of(optimizer) == "adafactor":
            raise ValueError("adafactor's state depends on shapes, which a number has not; give a module")
    trained = [weight for weight in model.weights if weight.trained]
    halves = [weight for weight in trained if weight.dtype in _HALF] if master_weights else []
    if master_weights and not halves:
        raise ValueError(
            "master_weights=True needs trained parameters in half precision, and there are none; "
            'use precision="bf16-true" or "16-true", or leave master_weights out'
        )
    parameters, gradients = _nbytes(model.weights), _nbytes(trained)
    master = sum(4 * weight.numel for weight in halves)
    state = sum(
        _state_numel(optimizer, weight.shape) * (4 if master_weights and weight.dtype in _HALF else weight.itemsize)
        for weight in trained
    )
    casts = sum(weight.cast_nbytes for weight in model.weights)
    reduced = in_flight = unsharded = 0
    if world_size == 1:
        pass
    elif stage == 0:
        in_flight = 0 if gradient_as_bucket_view else gradients
    else:
        state, master = _share(state, world_size), _share(master, world_size)
        whole = isinstance(module_or_numel, nn.Module)
        buckets = list(_buckets(trained, int(bucket_cap_mb * 2**20), may_cut=not whole))
        if stage == 1:
            reduced = _share(gradients, world_size)
            in_flight = _most_in_flight(buckets, world_size, frees_whole=False)
        elif stage == 2:
            gradients = _share(gradients, world_size)
            in_flight = _most_in_flight(buckets, world_size, frees_whole=True)
        else:
            unsharded = _most_unsharded(model, world_size, with_casts=False)
            casts_too = _most_unsharded(model, world_size, with_casts=True) - unsharded
            parameters, gradients = _share(parameters, world_size), _share(gradients, world_size)
    # A backward frees the copies one by one as gradients come, so there is first the one and then the other.
    autocast = casts_too if stage == 3 and world_size > 1 else max(0, casts - gradients - reduced)
    return MemoryEstimate(
        parameters=parameters,
        buffers=model.buffers,
        gradients=gradients,
        optimizer_state=state,
        master_weights=master,
        reduced_gradients=reduced,
        in_flight=in_flight,
        unsharded=unsharded,
        autocast=autocast,
    )


def what_fits(
    nbytes: float,
    module_or_numel: nn.Module | float,
    optimizer: str | type[Optimizer] | Optimizer = "adam",
    precision: str = "32-true",
    *,
    master_weights: bool = False,
    bucket_cap_mb: float = 25.0,
    gradient_as_bucket_view: bool = False,
    n_blocks: int = 32,
) -> dict[int, int | None]:
    """For each stage the smallest of `WORLD_SIZES` whose total is at most `nbytes` a rank, None if there is none.

    The other arguments are those of `estimate_memory`.
    """

    def total(stage: int, world_size: int) -> int:
        return estimate_memory(
            module_or_numel,
            stage,
            world_size,
            optimizer,
            precision,
            master_weights=master_weights,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            n_blocks=n_blocks,
        ).total

    return {stage: next((each for each in WORLD_SIZES if total(stage, each) <= nbytes), None) for stage in STAGES}


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """What stage 3 makes whole one after the other: the children of the largest list or sequence in which a class
    repeats, or else the direct children. What is in none of them belongs to the root and stays whole in a step.
    """

    def repeats(children: Iterable[nn.Module]) -> bool:
        counts = Counter(type(child) for child in children if _has_parameters(child))
        return any(count > 1 for count in counts.values())

    lists = (each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential))
    lists = (each for each in lists if repeats(each.children()))
    largest = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=module)
    return [child for child in _called(largest) if _has_parameters(child)]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The children, in place of a list of modules its own: it has no forward that would make it whole."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        else:
            yield child


@dataclass(frozen=True)
class _Weight:
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    trained: bool
    cast_nbytes: int  # of the copy that autocast makes

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class _Model:
    """Weights in the order of the forward."""

    before: list[_Weight]  # the root's, such as an embedding
    blocks: list[list[_Weight]]
    after: list[_Weight]  # the root's too, such as a head: their gradients are there before those of the blocks
    buffers: int

    @property
    def weights(self) -> list[_Weight]:
        return [*self.before, *(weight for block in self.blocks for weight in block), *self.after]


def _of_numel(numel: float, precision: str, n_blocks: int) -> _Model:
    if numel < 0 or numel != int(numel):
        raise ValueError(f"a number of parameters must be whole and at least 0, got {numel}")
    if n_blocks < 1:
        raise ValueError(f"n_blocks must be at least 1, got {n_blocks}")
    each, more = divmod(int(numel), n_blocks)
    sizes = [each + (n < more) for n in range(n_blocks)]
    dtype = PRECISIONS[precision] or torch.float32
    cast = 2 if precision.endswith("-mixed") else 0
    return _Model([], [[_Weight((size,), size, dtype, True, cast * size)] for size in sizes], [], 0)


def _of_module(module: nn.Module, precision: str) -> _Model:
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"parameters must have shapes, but {', '.join(lazy)} are lazy; call the module once before")
    blocks = blocks_of(module)
    block_of: dict[nn.Module, int] = {}
    for number, block in enumerate(blocks):
        for each in block.modules():
            block_of.setdefault(each, number)
    places: dict[nn.Parameter, int | None] = {}  # its block; None is the root's
    late: set[nn.Parameter] = set()  # the root's that (also) follow a block
    multiplied: set[nn.Parameter] = set()  # and not only looked up
    seen_block = False
    for owner in module.modules():
        place = block_of.get(owner)
        for parameter in owner.parameters(recurse=False):
            seen_block |= place is not None
            if places.get(parameter) is None:
                places[parameter] = place
            if seen_block and place is None:
                late.add(parameter)
            if not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
                multiplied.add(parameter)
    model = _Model(
        [],
        [[] for _ in blocks],
        [],
        sum(buffer.numel() * _cast(buffer.dtype, precision).itemsize for buffer in module.buffers()),
    )
    for parameter, place in places.items():
        cast = precision.endswith("-mixed") and parameter.ndim > 1 and parameter in multiplied
        cast = cast and parameter.dtype == torch.float32
        weight = _Weight(
            tuple(parameter.shape),
            parameter.numel(),
            _cast(parameter.dtype, precision),
            parameter.requires_grad,
            2 * parameter.numel() if cast else 0,
        )
        root = model.after if parameter in late else model.before
        (root if place is None else model.blocks[place]).append(weight)
    return model


def _buckets(trained: Sequence[_Weight], cap: int, *, may_cut: bool) -> Iterator[int]:
    """Bytes of each bucket, as ZeroOptimizer makes them of parameters in the order of the module: last ones first.

    Args:
        may_cut: of a number of parameters, whose weights are not real ones: equal buckets, wherever that cuts.
    """
    if may_cut:
        left = _nbytes(trained)
        while left > 0:
            yield min(cap, left)
            left -= cap
        return
    open_ones: dict[torch.dtype, int] = {}
    for weight in reversed(trained):
        so_far = open_ones.get(weight.dtype, 0)
        if so_far and so_far + weight.nbytes > cap:
            yield so_far
            so_far = 0
        open_ones[weight.dtype] = so_far + weight.nbytes
    yield from open_ones.values()


def _most_in_flight(buckets: Sequence[int], world_size: int, *, frees_whole: bool) -> int:
    """Bytes of the blocks that reductions lend and keep, and in stage 2 of what is whole beside the shards so far.

    A bucket under way is there as it was packed, and so is what is received for it.

    Args:
        frees_whole: stage 2, where the whole gradients of a bucket are there until it is packed, and the shards of
            those under way are not yet.
    """
    free: list[int] = []
    under_way: deque[tuple[list[int], int]] = deque()  # blocks lent for a bucket, and its bytes
    shards = most = 0
    for n, bucket in enumerate([*buckets, *buckets]):  # a second time with the blocks of the first
        if n == len(buckets):
            free += [block for blocks, _ in under_way for block in blocks]
            under_way.clear()
            shards = most = 0
        if len(under_way) == IN_FLIGHT:
            blocks, before = under_way.popleft()
            free += blocks
            shards += _share(before, world_size)
        under_way.append(([_lent(free, nbytes) for nbytes in (bucket, bucket - _share(bucket, world_size))], bucket))
        most = max(most, shards + bucket)
    lent = sum(free) + sum(sum(blocks) for blocks, _ in under_way)
    return lent + (max(0, most - sum(_share(each, world_size) for each in buckets)) if frees_whole else 0)


def _lent(free: list[int], nbytes: int) -> int:
    """The block that `Buffers` would lend, in bytes; it is taken away from the free ones."""
    fits = best_fit(free, nbytes)
    if fits is not None:
        return free.pop(fits)
    if free:
        free.remove(max(free))
    return nbytes


def _most_unsharded(model: _Model, world_size: int, *, with_casts: bool) -> int:
    """The most bytes that a step under ``fully_shard`` holds beside its shards, counting all of these as there.

    In the forward a block is there twice, gathered and copied out into its parameters, while the one before still is
    as it was gathered. In the backward there are its parameters, its gradients, the next block as it was gathered
    ahead, and the input of the reduce-scatter before. The root's parameters stay from the first to the last moment.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``wait_for_unshard`` and ``post_backward``.
    """
    root = _nbytes([*model.before, *model.after])
    root_gradients, late_gradients = _trained_nbytes([*model.before, *model.after]), _trained_nbytes(model.after)
    sizes = [_nbytes(block) for block in model.blocks]
    gradients = [_trained_nbytes(block) for block in model.blocks]
    casts = [sum(weight.cast_nbytes for weight in block) if with_casts else 0 for block in model.blocks]
    no_gradients = _share(root_gradients + sum(gradients), world_size)
    moments = [2 * root - no_gradients]
    moments.append(root + root_gradients + (gradients[0] if sizes else 0) - _share(root_gradients, world_size))
    for n, (waiting, casts_left) in enumerate(zip(accumulate(gradients), accumulate(casts), strict=True)):
        before = sizes[n - 1] if n > 0 else root
        moments.append(root + before + 2 * sizes[n] + casts_left - no_gradients)
        ahead = sizes[n - 1] if n > 0 else 0
        leaving = gradients[n + 1] if n + 1 < len(sizes) else 0
        block = sizes[n] + max(sizes[n], ahead + gradients[n])
        not_yet = _share(root_gradients + waiting, world_size)
        moments.append(root + late_gradients + block + leaving + casts_left - not_yet)
    return max(0, *moments)


def _state_numel(optimizer: str | type[Optimizer] | Optimizer, shape: tuple[int, ...]) -> int:
    """Elements that the optimizer keeps of a parameter; steps, a number each, are not counted."""
    name, numel = _name_of(optimizer), 1
    for size in shape:
        numel *= size
    if name == "adafactor":
        return numel // shape[-1] + numel // shape[-2] if len(shape) > 1 and numel else numel
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    more = max((sum(bool(group.get(option)) for option in _MORE.get(name, ())) for group in groups), default=0)
    return (OPTIMIZERS[name] + more) * numel


def _name_of(optimizer: str | type[Optimizer] | Optimizer) -> str:
    if isinstance(optimizer, str):
        names = [optimizer.lower()]
    else:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        names = [each.__name__.lower() for each in kind.__mro__]
    for name in names:
        if name in OPTIMIZERS:
            return name
    raise ValueError(
        f"optimizer must be one of {', '.join(OPTIMIZERS)}, or such a class or instance, got {optimizer!r:.200}; "
        "name one that keeps as many tensors a parameter"
    )


def _cast(dtype: torch.dtype, precision: str) -> torch.dtype:
    return (PRECISIONS[precision] or dtype) if dtype.is_floating_point else dtype


def _share(nbytes: int, world_size: int) -> int:
    return -(-nbytes // world_size)


def _nbytes(weights: Iterable[_Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


def _trained_nbytes(weights: Iterable[_Weight]) -> int:
    return _nbytes(weight for weight in weights if weight.trained)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None

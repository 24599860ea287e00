"""What PowerSGD is told and what it remembers.

Source: Vogels et al., 2019, https://arxiv.org/abs/1905.13727; arguments, defaults and log lines are those of
``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState``. Unlike there, what is remembered belongs to
parameters, not to buckets: DDP may rebuild its buckets, or a resumed run have others, and nothing is mixed up.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.compression.hook import CommState
from lightning_distkit.core.compression.mersenne import SeedSequence
from lightning_distkit.core.compression.orthogonalize import orthogonalize_
from lightning_distkit.core.compression.remainder import Remainder

logger = logging.getLogger(__name__)

_ARGUMENTS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


class PowerSGDState(CommState):
    """Hyperparameters and memory of `powerSGD_hook` and `batched_powerSGD_hook`; one for each DDP model.

    Args:
        process_group: the processes whose gradients are averaged; None for all.
        matrix_approximation_rank: columns ``r`` of the two factors. Start with 1 and double it until the quality
            suffices; 1 to 4 is usual, up to 32 for language models.
        start_powerSGD_iter: iterations (synchronised backwards) of plain all-reduce before compression starts. Begin
            with 10 % of all steps, and not less than the learning rate's warm-up.
        min_compression_rate: an (n, m) gradient is compressed where ``(n + m) * r * min_compression_rate < n * m``;
            the others, vectors among them, travel whole.
        use_error_feedback: add what compression left out to the next gradient. Costs one copy of the compressed
            gradients, in single precision or better.
        warm_start: start from the last step's factor; otherwise from a new random one at every step.
        orthogonalization_epsilon: added to the norm that a factor's column is divided by. 0 is exact, and safe here.
        random_seed: of the first factors; the same on every rank.
        compression_stats_logging_frequency: iterations between two log lines of `compression_stats`.
        batch_tensors_with_same_shape: multiply matrices of one shape in one batched product, where they lie at equal
            distances in memory; nothing is copied for it.

    Raises:
        ValueError: an argument is out of range, or compression with error feedback or warm start is to begin before
            iteration 2, in which DDP rebuilds its buckets.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        super().__init__(process_group)
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise TypeError(f"process_group must be a process group, or None for all, got {process_group!r}")
        _at_least(1, "matrix_approximation_rank", matrix_approximation_rank, "start with 1 and double it")
        _at_least(0, "start_powerSGD_iter", start_powerSGD_iter, "10 % of all steps is a good begin")
        _at_least(0, "compression_stats_logging_frequency", compression_stats_logging_frequency, "10_000 is usual")
        _at_least(0, "random_seed", random_seed, "any number will do, the same on every rank")
        if not _is_number(min_compression_rate) or not min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be a number above 0, got {min_compression_rate!r}; 2 is usual")
        if not _is_number(orthogonalization_epsilon) or not 0 <= orthogonalization_epsilon < float("inf"):
            raise ValueError(
                f"orthogonalization_epsilon must be a number of at least 0, got {orthogonalization_epsilon!r}; use 0"
            )
        for name, value in (
            ("use_error_feedback", use_error_feedback),
            ("warm_start", warm_start),
            ("batch_tensors_with_same_shape", batch_tensors_with_same_shape),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if (use_error_feedback or warm_start) and start_powerSGD_iter < 2:
            raise ValueError(
                f"start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start, as DDP rebuilds its "
                f"buckets in iteration 1; got {start_powerSGD_iter}"
            )
        logger.info(
            "PowerSGD config: matrix_approximation_rank = %s; start_powerSGD_iter = %s; "
            "min_compression_rate = %s; orthogonalization_epsilon = %s; use_error_feedback = %s; warm_start = %s; "
            "random_seed = %s; compression_stats_logging_frequency = %s; batch_tensors_with_same_shape = %s",
            matrix_approximation_rank,
            start_powerSGD_iter,
            min_compression_rate,
            orthogonalization_epsilon,
            use_error_feedback,
            warm_start,
            random_seed,
            compression_stats_logging_frequency,
            batch_tensors_with_same_shape,
        )
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape

        self._errors: dict[Tensor, Remainder] = {}  # of a parameter, (n, m); of this rank alone
        self._errors_of_buckets: dict[tuple[Tensor, ...], Remainder] = {}  # of the batched hook; of this rank alone
        self.q_memory_dict: dict[Tensor, Tensor] = {}  # of a parameter, (r, m), the same on every rank
        # All that follows is the same on every rank.
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._seeds = SeedSequence(random_seed)
        self._generator: torch.Generator | None = None  # of this iteration
        self._draws: list[tuple[Sequence[Tensor], int, int, torch.dtype]] = []  # of a step without warm start, in order
        self._gradient_scale = 1.0
        self._order: list[Tensor] = []  # all parameters in the module's order, once seen
        self._module: weakref.ref[nn.Module] | None = None
        self._seen: list[list[Tensor]] = []
        self._orphans: dict[str, Any] = {}  # a loaded state whose parameters have not been seen yet

    def claim(self, module: nn.Module) -> None:
        """Be registered with a model: again with the same one, but not with two."""
        other = self._module() if self._module is not None else None
        if other is not None and other is not module:
            raise RuntimeError(
                f"this PowerSGDState is registered with another model, {type(other).__name__}; make one for each model"
            )
        self._module = weakref.ref(module)

    # What is asked of it

    def compression_stats(self) -> tuple[float, int, int]:
        """The rate, and the numbers of elements before and after compression, since compression started."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    @property
    def error_dict(self) -> dict[Tensor, Tensor]:
        """What was left out of each parameter's gradient so far, of this rank alone; copies.

        (n, m) each; the batched hook's are flat, and the last one of a bucket has its padding.
        """
        errors = {parameter: error.value() for parameter, error in self._errors.items()}
        for bucket, error in self._errors_of_buckets.items():
            errors.update(_parts(error.value(), bucket))
        return errors

    @property
    def gradient_scale(self) -> float:
        """What the loss was multiplied by before backward; set it where a ``GradScaler`` changes the scale.

        The errors are remembered in the gradients' units, so they are rescaled with it.
        """
        return self._gradient_scale

    @gradient_scale.setter
    def gradient_scale(self, scale: float) -> None:
        if not _is_number(scale) or not 0 < scale < float("inf"):
            raise ValueError(f"gradient_scale must be a finite number above 0, got {scale!r}; 1 is without a scaler")
        if scale != self._gradient_scale:
            for error in (*self._errors.values(), *self._errors_of_buckets.values()):
                error.settle_().mul_(scale / self._gradient_scale)
            self._gradient_scale = scale

    # What the hooks do with it

    @property
    def is_compressing(self) -> bool:
        """Whether the warm-up with plain all-reduce is over."""
        return self.iter >= self.start_powerSGD_iter

    def should_compress(self, n: int, m: int, r: int) -> bool:
        return (n + m) * r * self.min_compression_rate < n * m

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the iteration, if this is its last bucket."""
        if not bucket.is_last():
            return
        self.iter += 1
        self._generator = None
        if not self.warm_start:
            self.q_memory_dict.clear()
        if self.iter == self.start_powerSGD_iter:
            logger.info("Start to apply PowerSGD after %s iterations.", self.iter)

    def count(self, bucket: GradBucket, before: int, after: int) -> None:
        """Count the elements of one bucket, and log at the last one every so many iterations."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and self.iter >= self.next_stats_report:
            rate, total_before, total_after = self.compression_stats()
            logger.info(
                "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
                self.iter,
                total_before,
                total_after,
                rate,
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def error_of(self, parameter: Tensor, n: int, m: int, dtype: torch.dtype) -> Remainder | None:
        """What was left out of this parameter's gradient so far, (n, m); None without error feedback."""
        if not self.use_error_feedback:
            return None
        if parameter not in self._errors:
            self._release([parameter])
        error = self._errors.get(parameter)
        if error is None:
            logger.info("A zero tensor of length %s that represents local error is created.", n * m)
            error = Remainder(torch.zeros(n, m, device=parameter.device, dtype=dtype))
        elif error.whole.shape != (n, m) or error.whole.dtype != dtype:  # the batched hook's, or sent otherwise before
            error = Remainder(error.settle_().flatten()[: n * m].to(dtype, copy=True).view(n, m))
        self._errors[parameter] = error
        return error

    def error_of_bucket(self, parameters: Sequence[Tensor], side: int, dtype: torch.dtype) -> Remainder | None:
        """What was left out of a whole bucket so far, (side, side); None without error feedback.

        A bucket of other parameters than before is put together from what is remembered of each.
        """
        if not self.use_error_feedback:
            return None
        if tuple(parameters) not in self._errors_of_buckets:
            self._release(parameters)
            logger.info("A zero tensor of length %s that represents local error is created.", side * side)
            square = torch.zeros(side, side, device=parameters[0].device, dtype=dtype)
            for parameter, part in _parts(square, parameters):
                if parameter in self._errors:
                    known = self._errors.pop(parameter).settle_().flatten()[: part.numel()]
                    part[: known.numel()] = known
            self._errors_of_buckets[tuple(parameters)] = Remainder(square)
        return self._errors_of_buckets[tuple(parameters)]

    def _release(self, parameters: Sequence[Tensor]) -> None:
        """Take the buckets with any of these parameters apart, and remember each parameter's error by itself."""
        for bucket in [each for each in self._errors_of_buckets if not set(each).isdisjoint(parameters)]:
            square = self._errors_of_buckets.pop(bucket).settle_()
            self._errors.update((parameter, Remainder(part)) for parameter, part in _parts(square, bucket))

    def factors(self, items: Sequence[LowRank]) -> list[Tensor]:
        """The factors to start from: for each item (r, m), its rows orthonormal, the same on every rank."""
        if self._draws and self._generator is None:
            # Not bucket by bucket but in the order of the first time, so that the numbers do not depend on buckets.
            for parameters, r, m, dtype in self._draws:
                self._draw(parameters, r, m, dtype)
        missing: dict[object, list[LowRank]] = {}
        for item in items:
            q = self.q_memory_dict.get(item.parameter)
            if q is None or q.shape != (item.r, item.m):
                together = item.matrix.shape if self.batch_tensors_with_same_shape else item.parameter
                missing.setdefault(together, []).append(item)
        for alike in missing.values():
            parameters = [item.parameter for item in alike]
            r, m, dtype = alike[0].r, alike[0].m, factor_dtype(alike[0].matrix.dtype)
            learned = [self.q_memory_dict.get(parameter) for parameter in parameters]
            self._draw(parameters, r, m, dtype)
            for parameter, q in zip(parameters, learned, strict=True):
                if q is not None and q.shape[1] == m:  # another r than before: keep what is learned
                    keep = min(r, q.shape[0])
                    self.q_memory_dict[parameter][:keep] = q[:keep]
            if not self.warm_start:
                self._draws.append((parameters, r, m, dtype))
        # Copies: made orthonormal twice, after a step that was skipped, they would not be the same to the last bit.
        qs = [self.q_memory_dict[item.parameter].clone() for item in items]
        orthogonalize_(qs, self.orthogonalization_epsilon)
        return qs

    def _draw(self, parameters: Sequence[Tensor], r: int, m: int, dtype: torch.dtype) -> None:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seeds.draw())
        # On the CPU: every rank draws the same numbers, whatever its device.
        batch = torch.randn(len(parameters), m, r, generator=self._generator, dtype=dtype)
        for parameter, q in zip(parameters, batch, strict=True):
            self.q_memory_dict[parameter] = q.mT.contiguous().to(parameter.device)

    # Saving and loading

    def observe(self, bucket: GradBucket) -> bool:
        if not self._order:
            if bucket.index() == 0:
                self._seen = []
            self._seen.append(bucket.parameters())
            if bucket.is_last():
                # DDP makes its first buckets of the module's parameters in order, and hands out the last one first.
                self._order = [parameter for parameters in reversed(self._seen) for parameter in parameters]
                self._seen = []
                if self._orphans:
                    orphans, self._orphans = self._orphans, {}
                    self._adopt(orphans, dict(enumerate(self._order)))
        return not self._orphans

    def state_dict(self, names: Mapping[Tensor, str] | None = None) -> dict[str, Any]:
        """All that training needs to continue: ``shared``, the same on every rank, and ``error``, of this rank alone.

        Args:
            names: names of the parameters, by which to save; by default it is their number in the module's order.

        Returns:
            Numbers, strings and tensors only, so that ``torch.load(weights_only=True)`` reads it. The tensors are not
            copies.
        """
        if self._orphans:
            return self._orphans
        key: Mapping[Tensor, str | int]
        key = names if names is not None else {parameter: i for i, parameter in enumerate(self._order)}
        nameless = [tuple(parameter.shape) for parameter in self.error_dict if parameter not in key]
        if nameless:
            raise ValueError(
                f"parameters of shape {', '.join(map(str, nameless))} are compressed, but have no name: "
                + ("give the names of all" if names is not None else "a state is for one model; make one for each")
            )
        wholes = {parameter: error.whole for parameter, error in self._errors.items()}
        return {
            "shared": {
                **{name: getattr(self, name) for name in _COUNTERS},
                "n_drawn": self._seeds.n_drawn,
                "n_parameters": len(self._order),
                "gradient_scale": self._gradient_scale,
                "q": {key[parameter]: q for parameter, q in self.q_memory_dict.items()},
                # As they are, not subtracted from the errors: the last bit must not depend on whether one saves.
                "factors": {key[parameter]: (error.p, error.q) for parameter, error in self._errors.items()},
                "draws": [([key[p] for p in parameters], r, m, dtype) for parameters, r, m, dtype in self._draws],
            },
            "error": {key[parameter]: error for parameter, error in {**self.error_dict, **wholes}.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[Tensor, str] | None = None) -> None:
        """Continue from what `state_dict` returned, with the same names if it was called with names.

        Raises:
            ValueError: it was saved with names and is loaded without, or the other way round, or for another model.
        """
        if not {"shared", "error"} <= state.keys():
            raise ValueError(f"this is not what state_dict() returned: it has the keys {list(state)}")
        shared = state["shared"]
        named = any(isinstance(key, str) for key in (*shared["q"], *state["error"]))
        numbered = any(isinstance(key, int) for key in (*shared["q"], *state["error"]))
        if (named and names is None) or (numbered and names is not None):
            raise ValueError(
                f"this state was saved {'with' if named else 'without'} the parameters' names and must be loaded "
                f"{'with' if named else 'without'} them; got names={'a mapping' if names else names}"
            )
        for name in _COUNTERS:
            setattr(self, name, shared[name])
        self._seeds = SeedSequence(self.random_seed, shared["n_drawn"])
        self._gradient_scale = shared["gradient_scale"]
        self._errors, self._errors_of_buckets, self.q_memory_dict, self._draws = {}, {}, {}, []
        if names is not None:
            self._adopt(state, {name: parameter for parameter, name in names.items()})
        elif self._order:
            self._adopt(state, dict(enumerate(self._order)))
        else:
            self._orphans = dict(state)

    def _adopt(self, state: Mapping[str, Any], parameters: Mapping[Any, Tensor]) -> None:
        """Give each loaded tensor to its parameter."""
        n_saved = state["shared"]["n_parameters"]
        if n_saved and self._order and n_saved != len(self._order):
            raise ValueError(
                f"the loaded compression state is of a model with {n_saved} trainable parameters, this one has "
                f"{len(self._order)}; load the checkpoint of this model"
            )

        def of(key: Any) -> Tensor:
            if key not in parameters:
                raise ValueError(f"the loaded compression state has the parameter {key!r}, the model has not")
            return parameters[key]

        for key, q in state["shared"]["q"].items():
            self.q_memory_dict[of(key)] = q.to(of(key).device, copy=True)
        for key, error in state["error"].items():
            # A flat one is the batched hook's, with the padding of its square.
            if error.numel() != of(key).numel() and (error.dim() > 1 or error.numel() < of(key).numel()):
                raise ValueError(
                    f"the loaded error of the parameter {key!r} has shape {tuple(error.shape)}, the parameter "
                    f"{tuple(of(key).shape)}; load the checkpoint of this model"
                )
            factors = state["shared"]["factors"].get(key, (None, None))
            self._errors[of(key)] = Remainder(error, *factors).to(of(key).device)
        for keys, r, m, dtype in state["shared"]["draws"]:
            self._draws.append(([of(key) for key in keys], r, m, dtype))

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return {"arguments": {name: getattr(self, name) for name in _ARGUMENTS}, "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). "
            "If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.__init__(None, **saved["arguments"])  # type: ignore[misc]
        self.load_state_dict(saved["state"])


@dataclass(eq=False)
class LowRank:
    """A gradient that travels as two factors."""

    parameter: Tensor  # under which its factor is remembered
    matrix: Tensor  # (n, m), a view of the bucket
    r: int  # columns of its factors
    error: Remainder | None  # (n, m), of this rank alone; None without error feedback

    @property
    def n(self) -> int:
        return self.matrix.shape[0]

    @property
    def m(self) -> int:
        return self.matrix.shape[1]


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Halves are factorised, and their errors remembered, in single precision: there is no QR for them."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def gathered(error: Mapping[Any, Tensor], group: Group) -> list[dict[Any, Tensor]] | None:
    """The ``error`` of every rank's `PowerSGDState.state_dict`, on the CPU of rank 0; None on the others.

    Every rank must call it. One parameter at a time is gathered, so the device never holds more than that.
    """
    by_key = [(key, group.gather(error[key])) for key in sorted(error)]
    if group.rank != 0:
        return None
    return [{key: each[rank].cpu() for key, each in by_key if each is not None} for rank in range(group.world_size)]


def redistributed(shared: Mapping[str, Any], errors: Sequence[Mapping[Any, Tensor]], world_size: int) -> dict[str, Any]:
    """What each rank of a world of another size is to load, so that the sum of all errors stays what it was.

    Args:
        shared: of a rank's `PowerSGDState.state_dict`, the same on every rank.
        errors: the ``error`` of each rank.
        world_size: the ranks that there are now.
    """
    sums = {}
    for key in errors[0]:
        factors = shared["factors"].get(key, (None, None))
        sums[key] = torch.stack([Remainder(each[key], *factors).value() for each in errors]).sum(0)
    return {"shared": {**shared, "factors": {}}, "error": {key: total / world_size for key, total in sums.items()}}


def _parts(square: Tensor, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of a bucket and its part of the bucket's square, a flat view; the last has the padding as well."""
    numels = [parameter.numel() for parameter in parameters]
    numels[-1] += square.numel() - sum(numels)
    return list(zip(parameters, square.view(-1).split(numels), strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(least: int, name: str, value: object, advice: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}; {advice}")

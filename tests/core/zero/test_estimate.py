"""The memory estimate: against the seed's table, sums done by hand, and torch's own optimizers and modules."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_distkit.core.zero.estimate import STAGES, MemoryEstimate, estimate_memory, what_fits
from lightning_distkit.core.zero.kept import OPTIMIZERS
from lightning_distkit.core.zero.outline import PRECISIONS

MB = 2**20


class Net(nn.Module):
    """An embedding, `n` blocks and a head, as language models are."""

    def __init__(self, n: int = 3, width: int = 8, vocabulary: int = 10, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def numel_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "state", "total"),
    [
        (0, 28e9, 28e9, 56e9, 112e9),
        (1, 28e9, 28e9, 7e9, 63e9),
        (2, 28e9, 3.5e9, 7e9, 38.5e9),
        (3, 3.5e9, 3.5e9, 7e9, 14e9),
    ],
)
def test_the_seeds_table_to_the_byte(
    stage: int, parameters: float, gradients: float, state: float, total: float
) -> None:
    estimate = estimate_memory(7e9, stage, 8)
    assert (estimate.parameters, estimate.gradients, estimate.optimizer_state) == (parameters, gradients, state)
    assert estimate.model_state == total


def test_the_papers_mixed_precision_is_sixteen_bytes_a_parameter() -> None:
    estimate = estimate_memory(1000, 0, 1, precision="16-true", master_weights=True)
    assert estimate.model_state == (2 + 2 + 12) * 1000  # section 3.1 of the paper, K = 12


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_weights_are_sharded_as_the_state_is(stage: int) -> None:
    estimate = estimate_memory(1000, stage, 4, precision="bf16-true", master_weights=True)
    assert (estimate.master_weights, estimate.optimizer_state) == (1000, 2000)


def test_of_half_precision_without_master_weights_all_is_half() -> None:
    estimate = estimate_memory(1000, 0, 1, precision="bf16-true")
    assert estimate == MemoryEstimate(2000, 0, 2000, 4000, 0, 0, 0, 0, 0)


def test_what_is_in_flight_by_hand() -> None:
    # 100 MB of gradients, buckets of 10 MB, 4 ranks: two travel, and of each 3/4 come in; in stage 2 the last bucket is
    # whole before it is packed, when the shards of the two before, and its own, are not yet there.
    numel, arguments = 25 * MB, {"optimizer": "sgd", "bucket_cap_mb": 10}
    ddp, first, second = (estimate_memory(numel, stage, 4, **arguments) for stage in (0, 1, 2))  # type: ignore[arg-type]
    assert (ddp.in_flight, ddp.total) == (100 * MB, 300 * MB)
    assert (first.in_flight, first.reduced_gradients, first.total) == (35 * MB, 25 * MB, 260 * MB)
    assert (second.in_flight, second.reduced_gradients, second.total) == (40 * MB, 0, 165 * MB)


def test_ddps_gradients_can_be_its_buckets() -> None:
    assert estimate_memory(1000, 0, 2, gradient_as_bucket_view=True).in_flight == 0


def test_buckets_are_those_that_the_optimizer_makes() -> None:
    module = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 1024, bias=False))  # 1 MB, 2 MB
    # Memory for both to travel.
    assert estimate_memory(module, 1, 2, bucket_cap_mb=0.5).in_flight == 3 * MB + 3 * MB // 2
    # It stays from step to step, so it is there when the larger one is whole, and no shard is.
    assert estimate_memory(module, 2, 2, bucket_cap_mb=0.5).in_flight == 3 * MB + 3 * MB // 2 + 2 * MB - 3 * MB // 2
    # Together: packed and received; in stage 2 also whole, but not yet copied out.
    assert estimate_memory(module, 1, 2, bucket_cap_mb=100).in_flight == 3 * MB + 3 * MB // 2
    assert estimate_memory(module, 2, 2, bucket_cap_mb=100).in_flight == 3 * MB + 3 * MB


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_holds_all_and_sends_nothing(stage: int) -> None:
    module = Net()
    estimate = estimate_memory(module, stage, 1)
    assert estimate.total == estimate.model_state == 16 * numel_of(module)


def test_stage_3_holds_two_blocks_and_two_blocks_gradients() -> None:
    # The peak is in the backward of the first one of three blocks of 400 bytes, the last to come: its parameters and
    # gradients, the memory that blocks are gathered into, and the gradients that leave. Its own shard is not there yet.
    estimate = estimate_memory(300, 3, 10, n_blocks=3)
    assert estimate.unsharded == 4 * 400 - 40
    assert estimate.total == 120 + 120 + 240 + estimate.unsharded


def test_stage_3_holds_what_is_outside_of_blocks_for_the_whole_step() -> None:
    # 3 blocks of 256 bytes; embedding and head are 320 each, gathered together, and the head's gradients come first.
    estimate = estimate_memory(Net(), 3, 2)
    assert estimate.unsharded == 640 + 640 + 320 + 3 * 256 - (640 + 256) // 2
    # A tied one is there once, and its gradients as soon as the head's are.
    tied = estimate_memory(Net(tied=True), 3, 2)
    assert tied.unsharded == 320 + 320 + 320 + 3 * 256 - (320 + 256) // 2


def test_stage_3_in_the_forward_holds_a_block_twice_and_the_one_before() -> None:
    module = Net(n=3)
    module.requires_grad_(False)
    assert estimate_memory(module, 3, 2).unsharded == 640 + max(640 + 2 * 256, 3 * 256)


def test_a_tied_parameter_counts_once() -> None:
    module = Net(tied=True)
    assert estimate_memory(module, 0, 1).parameters == 4 * (10 * 8 + 3 * 64)


def test_a_frozen_parameter_has_neither_gradient_nor_state() -> None:
    module = Net()
    module.embedding.requires_grad_(False)
    estimate = estimate_memory(module, 0, 1)
    assert estimate.parameters == 4 * (80 + 192 + 80)
    assert (estimate.gradients, estimate.optimizer_state) == (4 * (192 + 80), 8 * (192 + 80))


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_trained_is_no_error(stage: int) -> None:
    module = Net().requires_grad_(False)
    estimate = estimate_memory(module, stage, 2)
    assert (estimate.gradients, estimate.optimizer_state, estimate.in_flight) == (0, 0, 0)


def test_buffers_stay_whole() -> None:
    module = nn.BatchNorm1d(6)  # mean and variance of 6, and one int64
    assert [estimate_memory(module, stage, 2).buffers for stage in STAGES] == [56] * 4
    assert estimate_memory(module, 0, 2, precision="bf16-true").buffers == 32


def test_dtypes_are_the_modules_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.bfloat16))
    assert estimate_memory(module, 0, 1).parameters == 20 * (8 + 2)
    assert estimate_memory(module, 0, 1, precision="16-true").parameters == 40 * 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_lightnings(precision: str) -> None:
    from lightning.fabric.plugins import precision as plugins

    plugin: Any = {
        "32-true": plugins.Precision,
        "64-true": plugins.DoublePrecision,
        "bf16-true": lambda: plugins.HalfPrecision("bf16-true"),
        "16-true": lambda: plugins.HalfPrecision("16-true"),
        "bf16-mixed": lambda: plugins.MixedPrecision("bf16-mixed", "cpu"),
        "16-mixed": plugins.Precision,  # Lightning would need a GPU; it does not convert the module either
    }[precision]()
    module = nn.BatchNorm1d(6)
    before = estimate_memory(module, 0, 1, precision=precision)
    plugin.convert_module(module)
    assert before.parameters == sum(parameter.nbytes for parameter in module.parameters())
    assert before.buffers == sum(buffer.nbytes for buffer in module.buffers())


def test_autocast_copies_only_what_is_multiplied() -> None:
    # On many ranks stage 2's gradients are small, so the copies, 2 bytes each, decide: of the blocks and the head.
    estimate = estimate_memory(Net(), 2, 352, precision="bf16-mixed")
    assert estimate.autocast == 2 * (192 + 80) - estimate.gradients
    assert estimate.gradients == 4


def test_autocast_adds_nothing_where_whole_gradients_follow() -> None:
    assert [estimate_memory(1000, stage, 8, precision="16-mixed").autocast for stage in (0, 1)] == [0, 0]


def kept(optimizer: torch.optim.Optimizer) -> int:
    """Elements that torch's own holds after a step, without the scalars."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)


MAKE: list[tuple[str | None, Callable[[Any], torch.optim.Optimizer]]] = [
    ("sgd", torch.optim.SGD),
    ("sgd_momentum", lambda params: torch.optim.SGD(params, momentum=0.9)),
    ("adam", torch.optim.Adam),
    (None, lambda params: torch.optim.Adam(params, amsgrad=True)),
    ("adamw", torch.optim.AdamW),
    (None, lambda params: torch.optim.AdamW(params, amsgrad=True)),
    ("nadam", torch.optim.NAdam),
    ("radam", torch.optim.RAdam),
    ("adamax", torch.optim.Adamax),
    ("adagrad", torch.optim.Adagrad),
    ("adadelta", torch.optim.Adadelta),
    ("rmsprop", torch.optim.RMSprop),
    (None, lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True)),
    ("rprop", torch.optim.Rprop),
    ("asgd", torch.optim.ASGD),
    ("adafactor", torch.optim.Adafactor),
    ("muon", torch.optim.Muon),
]


@pytest.mark.parametrize(("name", "make"), MAKE)
def test_the_state_is_as_torchs_own(name: str | None, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    module = nn.Linear(5, 3, bias=False)
    optimizer = make(module.parameters())
    want = 4 * kept(optimizer)
    assert estimate_memory(module, 0, 1, optimizer).optimizer_state == want
    if name is not None:
        assert estimate_memory(module, 0, 1, name).optimizer_state == want
    if name not in (None, "sgd_momentum"):
        assert estimate_memory(module, 0, 1, type(optimizer)).optimizer_state == want


def test_a_subclass_is_known_by_its_base() -> None:
    class Mine(torch.optim.Adagrad):
        pass

    assert estimate_memory(100, 0, 1, Mine).optimizer_state == 400


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(
    st.integers(0, 10**12),
    st.integers(1, 2000),
    st.sampled_from(sorted(set(OPTIMIZERS) - {"adafactor"})),
    st.sampled_from(sorted(PRECISIONS)),
)
def test_a_higher_stage_never_holds_more_model_state(
    numel: int, world_size: int, optimizer: str, precision: str
) -> None:
    states = [estimate_memory(numel, stage, world_size, optimizer, precision).model_state for stage in STAGES]
    assert states == sorted(states, reverse=True)


@given(st.integers(0, 10**12), st.integers(1, 1000), st.integers(1, 1000), st.sampled_from(STAGES))
def test_more_ranks_never_hold_more_model_state(numel: int, world_size: int, more: int, stage: int) -> None:
    few, many = (estimate_memory(numel, stage, each) for each in (world_size, world_size + more))
    assert many.model_state <= few.model_state


@given(st.integers(10**9, 10**12), st.integers(2, 8), st.sampled_from([1, 2, 3]))
def test_doubling_the_ranks_takes_less_memory(numel: int, world_size: int, stage: int) -> None:
    assert estimate_memory(numel, stage, 2 * world_size).total < estimate_memory(numel, stage, world_size).total


@given(SIZES, st.integers(1, 16), st.sampled_from(STAGES), st.sampled_from(sorted(PRECISIONS)))
def test_a_module_has_the_model_state_of_its_number(
    sizes: list[int], world_size: int, stage: int, precision: str
) -> None:
    module = nn.Sequential(*(nn.Linear(size, 3) for size in sizes))
    got = estimate_memory(module, stage, world_size, precision=precision)
    want = estimate_memory(numel_of(module), stage, world_size, precision=precision)
    assert got.model_state == want.model_state


@given(SIZES, st.integers(1, 16), st.sampled_from(STAGES))
def test_on_the_meta_device_it_is_the_same(sizes: list[int], world_size: int, stage: int) -> None:
    module = nn.Sequential(*(nn.Linear(size, 3) for size in sizes))
    with torch.device("meta"):
        meta = nn.Sequential(*(nn.Linear(size, 3) for size in sizes))
    assert estimate_memory(module, stage, world_size) == estimate_memory(meta, stage, world_size)


def test_seventy_billion_parameters_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        module = Net(n=80, width=29600, vocabulary=32000)
    estimate = estimate_memory(module, 3, 64)
    assert numel_of(module) > 70e9
    assert estimate.model_state == 16 * numel_of(module) // 64
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB; it would be 280 million


class TwoLists(nn.Module):
    """Two lists of layers, as an encoder and a decoder are, and a weight that is in a layer of each."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(n)) for n in (2, 4))
        if tied:
            self.decoder[3].weight = self.encoder[0].weight


LAYER = 4 * 8 * 8  # bytes


@pytest.mark.parametrize(
    ("policy", "tied", "wanted"),
    [
        ("auto", False, 4 * LAYER - LAYER // 2),  # every layer is a block: see above
        (nn.Linear, False, 4 * LAYER - LAYER // 2),
        (None, False, 3 * 6 * LAYER - 6 * LAYER // 2),  # all is gathered at once, and has its gradients at once
        # Two blocks with one weight are none: it is the root's, and whole until the end.
        ("auto", True, LAYER + 4 * LAYER + LAYER - (LAYER + LAYER) // 2),
    ],
)
def test_blocks_are_those_that_stage_3_makes(policy: Any, tied: bool, wanted: int) -> None:
    assert estimate_memory(TwoLists(tied), 3, 2, policy=policy).unsharded == wanted


def test_a_policy_that_matches_nothing_is_an_error_of_the_estimate_too() -> None:
    with pytest.raises(ValueError, match="the policy must match at least one module"):
        estimate_memory(TwoLists(), 3, 2, policy=nn.Conv2d)


def test_what_fits_is_the_smallest_world_that_does() -> None:
    answers = what_fits(24e9, 7e9)
    assert answers == {0: None, 1: None, 2: None, 3: 8}
    assert estimate_memory(7e9, 3, 8).total <= 24e9 < estimate_memory(7e9, 3, 4).total
    assert what_fits(40e9, 7e9)[2] == 8
    assert set(what_fits(112e9, 7e9).values()) == {1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((100, 4, 2), "stage must be 0 .DDP., 1, 2 or 3, got 4"),
        ((100, 1, 0), "world_size must be at least 1, got 0"),
        ((1.5, 1, 2), "a number of parameters must be whole and at least 0, got 1.5"),
        ((-1, 1, 2), "a number of parameters must be whole and at least 0, got -1"),
        ((100, 1, 2, "newton"), "optimizer must be one of sgd, .* got 'newton'"),
        ((100, 1, 2, "adafactor"), "give a module"),
        ((100, 1, 2, "adam", "bf16"), "precision must be one of 32-true, .* got 'bf16'"),
    ],
)
def test_what_cannot_be_counted_is_said(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        estimate_memory(*arguments)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be more than 0, got 0"),
        ({"n_blocks": 0}, "n_blocks must be at least 1, got 0"),
        ({"master_weights": True}, "needs trained parameters in half precision"),
    ],
)
def test_what_options_cannot_be_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        estimate_memory(100, 1, 2, **options)


def test_a_lazy_module_must_have_been_called() -> None:
    with pytest.raises(ValueError, match=r"weight, bias are lazy; call the module once before"):
        estimate_memory(nn.LazyLinear(3), 0, 1)

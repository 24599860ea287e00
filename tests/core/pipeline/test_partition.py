"""Which layers make which stage: against all cuts that there are, and what each layer costs."""

from __future__ import annotations

import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_distkit.core.pipeline.layer_costs import layer_nbytes, layer_seconds
from lightning_distkit.core.pipeline.microbatch import NoChunk
from lightning_distkit.core.pipeline.partition import balance_by_size, balance_by_time, cut, resolve_balance
from lightning_distkit.core.pipeline.skip import pop, skippable, stash

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def all_cuts(n_layers: int, n_stages: int) -> list[list[int]]:
    return [
        [end - begin for begin, end in pairwise((0, *ends, n_layers))]
        for ends in combinations(range(1, n_layers), n_stages - 1)
    ]


def worth(costs: list[int], counts: list[int]) -> tuple[int, int, int, list[int]]:
    """The less the better: as `cut` says."""
    sums, begin = [], 0
    for count in counts:
        sums.append(sum(costs[begin : begin + count]))
        begin += count
    return max(sums), sum(each**2 for each in sums), sum(count**2 for count in counts), [-each for each in counts[::-1]]


@given(COSTS, st.data())
def test_no_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    n_stages = data.draw(st.integers(1, len(costs)))
    counts = cut(costs, n_stages)
    cuts = all_cuts(len(costs), n_stages)
    assert counts in cuts
    assert worth(costs, counts)[:3] == min(worth(costs, each)[:3] for each in cuts)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_smaller_largest_stage(costs: list[float], data: st.DataObject) -> None:
    n_stages = data.draw(st.integers(1, len(costs)))
    counts = cut(costs, n_stages)
    assert counts in all_cuts(len(costs), n_stages)
    least = min(worth(costs, each)[0] for each in all_cuts(len(costs), n_stages))  # type: ignore[arg-type]
    assert worth(costs, counts)[0] == pytest.approx(least)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "n_stages", "counts"),
    [
        ([1] * 6, 3, [2, 2, 2]),
        ([1] * 7, 3, [3, 2, 2]),
        ([5, 1, 1, 1, 1], 3, [1, 2, 2]),  # not [1, 3, 1], whose largest is no larger
        ([4, 0, 4, 0], 2, [2, 2]),
        ([0, 0, 0, 0], 2, [2, 2]),
        ([1, 9], 2, [1, 1]),
    ],
)
def test_equally_good_cuts_are_decided_by_evenness_then_by_layers_then_for_the_front(
    costs: list[int], n_stages: int, counts: list[int]
) -> None:
    assert cut(costs, n_stages) == counts


def test_a_thousand_layers_are_cut_in_no_time() -> None:
    begin = time.process_time()
    counts = cut([1 + n % 7 for n in range(1000)], 64)
    assert sum(counts) == 1000
    assert time.process_time() - begin < 10  # of this process alone: the machine may be busy


def linears(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(widths)))


def test_by_size_counts_parameters_and_buffers_and_with_a_sample_what_is_kept_for_backward() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Flatten())
    parameters = [4 * (32 + 8) * 4, 0, 4 * 64 * 4, 4 * 16 * 4 + (8 + 8) * 4 + 8, 0]
    assert layer_nbytes(module) == parameters
    assert layer_nbytes(module.to("meta")) == parameters
    assert layer_nbytes(module, parameter_copies=1)[0] == parameters[0] / 4
    module = module.to_empty(device="cpu")
    kept = [with_it - alone for with_it, alone in zip(layer_nbytes(module, torch.ones(5, 4)), parameters, strict=True)]
    # The linear keeps its input; tanh its output, which the next linear keeps as well; the norm its input and two rows.
    assert kept == [5 * 4 * 4, 5 * 8 * 4, 0, 5 * 8 * 4 + 2 * 8 * 4, 0]


def test_by_size_needs_no_memory_for_a_module_on_the_meta_device_with_a_sample_either() -> None:
    with torch.device("meta"):
        module = linears(100_000, 100_000, 100_000, 10)
    assert layer_nbytes(module, torch.ones(1, 100_000), 0) == [400_000, 400_000, 400_000]
    assert balance_by_size(module, 2) == [1, 2]
    assert resolve_balance("auto", module, 2, torch.ones(1, 100_000)) == [1, 2]


class Slow(nn.Module):
    """Sleeps so long in forward, and so long in backward where there is one."""

    def __init__(self, forward_s: float, backward_s: float = 0.0, *, trained: bool = True) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(1), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.backward_s))
        return y


def test_by_time_counts_forward_and_backward_and_no_backward_where_there_is_none() -> None:
    never = 2.0  # seconds that nobody must sleep
    frozen = nn.Sequential(Slow(0.01, never, trained=False), Slow(0.01, 0.03), Slow(0.01, 0.03, trained=False))
    first, *others = layer_seconds(frozen, torch.ones(2), n_times=1)
    assert 0.01 <= first < never
    assert all(0.04 <= each < never for each in others)
    module = nn.Sequential(*(Slow(each, each) for each in (0.05, 0.0, 0.0, 0.0)))
    assert balance_by_time(module, 2, torch.ones(2), n_times=1) == [1, 3]
    assert resolve_balance("auto", module, 2, torch.ones(2)) == [1, 3]
    assert resolve_balance("auto", module, 2) == [2, 2]  # by size, as there is no sample


@skippable(stash=["early"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        yield stash("early", self.linear(x))
        return x


@skippable(pop=["early"])
class Pop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("early")
        self.seen.append(skip.requires_grad and skip.is_leaf)
        return self.linear(x + skip)


def test_layers_with_skips_are_measured_with_them() -> None:
    module = nn.Sequential(Stash(), nn.Tanh(), Pop())
    sample = torch.ones(3, 4)
    assert len(layer_seconds(module, sample, n_times=1)) == 3
    assert module[2].module.seen == [True, True]
    *_, last = (a - b for a, b in zip(layer_nbytes(module, sample), layer_nbytes(module), strict=True))
    assert last == 3 * 4 * 4  # the sum, which is what its linear keeps
    for balance in ("size", "time", "auto"):
        assert sum(resolve_balance(balance, module, 2, sample)) == 3


class Pair(nn.Module):
    def forward(self, x: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x * scale, {"mask": mask, "name": "x"}


class Chosen(nn.Module):
    def forward(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        return x[more["mask"]]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.linear, x, use_reentrant=self.reentrant)
        return y


@pytest.mark.parametrize("balance", ["size", "time"])
def test_any_nest_between_layers_several_inputs_and_checkpointing_inside_are_measured(balance: str) -> None:
    module = nn.Sequential(Pair(), Chosen(), Checkpointed(False), Checkpointed(True))
    sample = (torch.ones(4, 3, requires_grad=True), 2.0, NoChunk(torch.tensor([0, 2])))
    assert sum(resolve_balance(balance, module, 3, sample)) == 4
    assert sample[0].grad is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("balance", ["size", "time"])
def test_the_module_and_random_numbers_are_as_before(balance: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    gradient = torch.ones(4, 4)
    module[0].weight.grad = gradient
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    with torch.no_grad():
        resolve_balance(balance, module, 2, torch.randn(5, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), random)
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))
    assert module[3].weight.grad is None
    assert module.training


def test_the_module_is_as_before_also_if_a_layer_fails() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 4))
    module[0].weight.grad = torch.ones(4)
    with pytest.raises(
        RuntimeError, match=r"layer 1, Linear, does not: RuntimeError: .*shape.*balance by size without"
    ):
        balance_by_time(module, 2, torch.randn(5, 4))
    assert torch.equal(module[0].running_var, torch.ones(4))
    assert torch.equal(module[0].weight.grad, torch.ones(4))


def test_a_list_is_taken_as_it_is() -> None:
    assert resolve_balance([1, 3], linears(2, 2, 2, 2, 2), 2) == [1, 3]
    assert resolve_balance((2, 2), linears(2, 2, 2, 2, 2), 2) == [2, 2]


@pytest.mark.parametrize(
    ("balance", "says"),
    [
        ([2, 2, 1], "balance must be 2 numbers of layers, one a stage, each at least 1, got [2, 2, 1]"),
        ([5, 0], "balance must be 2 numbers of layers, one a stage, each at least 1, got [5, 0]"),
        ([2.5, 2.5], "balance must be 2 numbers of layers, one a stage, each at least 1, got [2.5, 2.5]"),
        ([2, 2], "balance must share out all 5 layers, got [2, 2], which are 4"),
        ("speed", "balance must be 'auto', 'size', 'time' or a list of numbers of layers, got 'speed'"),
        ("time", "to balance by time, sample= must be the inputs of a micro-batch, got None; or balance by size"),
    ],
)
def test_a_balance_that_is_none_is_refused(balance: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole text is compared
        resolve_balance(balance, linears(*[2] * 6), 2)
    assert str(error.value) == says


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        (
            linears(2, 2, 2),
            "3 stages need at least 3 layers, got 2; use at most 2 stages, or cut the layers into smaller",
        ),
        (
            nn.Sequential(linears(2, 2, 2), nn.Tanh()),
            "3 stages need at least 3 layers, got 2; put the layers of '0' into the outer nn.Sequential, which",
        ),
        (nn.Sequential(), "3 stages need at least 3 layers, got 0; put layers into the nn.Sequential"),
    ],
)
@pytest.mark.parametrize("balance", ["auto", "time", [1, 1, 1]])
def test_fewer_layers_than_stages_are_refused_with_advice(balance: Any, module: nn.Sequential, advice: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        resolve_balance(balance, module, 3)
    assert str(error.value).startswith(advice)


def test_what_is_no_sequential_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential, to be cut between its layers, got Linear"):
        resolve_balance("auto", nn.Linear(2, 2), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of stages must be at least 1, got 0"):
        resolve_balance("auto", linears(2, 2), 0)


def test_what_takes_no_time_is_not_timed() -> None:
    with pytest.raises(ValueError, match="to be timed, layers must not be on the meta device; balance by size"):
        balance_by_time(linears(2, 2).to("meta"), 1, torch.ones(1, 2))

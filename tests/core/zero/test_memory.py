"""Each stage holds what ZeRO promises and the stated buckets in flight, and no more: by counted bytes on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from benchmarks.allocations import Allocations, Section, held_nbytes
from benchmarks.zero_memory import Held, fsdp2, held_in_a_step
from lightning_distkit.core.zero import ZeroOptimizer, estimate_memory, shard_gradients
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.gone import Gone
from lightning_distkit.core.zero.parameters import shard_parameters
from lightning_distkit.core.zero.reduction import IN_FLIGHT
from tests.ranks import run_ranks

N_LAYERS, WIDTH = 16, 512
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
WHOLE = N_LAYERS * LAYER
BUCKET = 2 * LAYER
CAP_MB = BUCKET / 2**20
PASSES = ("forward", "backward")
SMALL = 64 * 1024  # activations of one row, step counts, flags and paddings


def make_module() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)))


def one_row() -> Tensor:
    return torch.randn(1, WIDTH)


def arm(stage: int, module: nn.Module, bucket_cap_mb: float = CAP_MB) -> tuple[nn.Module, Optimizer]:
    if stage == 3:
        shard_parameters(module)
        return module, DTensorOptimizer(Adam(module.parameters()), module)
    zero = ZeroOptimizer(Adam, module.parameters(), bucket_cap_mb=bucket_cap_mb)
    return module, shard_gradients(zero) if stage == 2 else zero


def in_flight(world_size: int) -> float:
    """Buckets under way: each packed, and received from the others beside its own."""
    return IN_FLIGHT * BUCKET * (1 + (world_size - 1) / world_size)


def formula(stage: int, world_size: int) -> Held:
    """By hand, of a training with Adam."""
    parameters: float
    gradients: float
    shard = WHOLE / world_size
    if stage == 1:
        parameters, gradients, state, others = WHOLE, WHOLE + shard, 2 * shard, in_flight(world_size)
    elif stage == 2:  # and the bucket that backward has just filled
        parameters, gradients, state, others = WHOLE, shard, 2 * shard, in_flight(world_size) + BUCKET
    else:
        # A layer's parameters and its gradients, the next layer, and the gradients on their way from the one before:
        # while the first layer is computed, of whose gradients and of those on their way there are no shards yet.
        parameters, gradients, state = shard, shard, 2 * shard
        others = 4 * LAYER - 2 * LAYER / world_size
    return Held(*map(int, (parameters, gradients, state, parameters + gradients + state + others)))


_held: dict[tuple[int, int], list[Held]] = {}


def held(stage: int, world_size: int) -> list[Held]:
    """Of every rank; measured once."""
    if (stage, world_size) not in _held:
        _held[stage, world_size] = run_ranks(
            world_size, held_in_a_step, partial(arm, stage), make_module, one_row, timeout=120
        )
    return _held[stage, world_size]


every_stage = pytest.mark.parametrize(("stage", "world_size"), [(s, w) for w in (2, 4) for s in (1, 2, 3)])


@every_stage
def test_parameters_gradients_and_state_are_to_the_byte_what_the_formula_says(stage: int, world_size: int) -> None:
    expected = formula(stage, world_size)
    for rank in held(stage, world_size):
        assert rank.parameters == pytest.approx(expected.parameters, abs=SMALL)
        assert rank.gradients == pytest.approx(expected.gradients, abs=SMALL)
        assert rank.optimizer_state == pytest.approx(expected.optimizer_state, abs=SMALL)


@every_stage
def test_the_peak_is_the_formula_and_the_buckets_in_flight(stage: int, world_size: int) -> None:
    for rank in held(stage, world_size):
        assert rank.peak == pytest.approx(formula(stage, world_size).peak, rel=0.05)


@every_stage
def test_the_estimate_is_the_counted_peak(stage: int, world_size: int) -> None:
    estimate = estimate_memory(make_module(), stage, world_size, "adam", bucket_cap_mb=CAP_MB)
    for rank in held(stage, world_size):
        assert rank.peak == pytest.approx(estimate.total, rel=0.05)
        assert rank.optimizer_state == pytest.approx(estimate.optimizer_state, abs=SMALL)


@pytest.mark.parametrize("layers_a_bucket", [1.9, 5.5, 100])  # 16 of one layer, 3 of 5 and one of 1, one of all
@pytest.mark.parametrize("stage", [1, 2])
def test_the_estimate_knows_what_buckets_come_out(stage: int, layers_a_bucket: float) -> None:
    cap_mb = layers_a_bucket * LAYER / 2**20
    estimate = estimate_memory(make_module(), stage, 2, "adam", bucket_cap_mb=cap_mb)
    for rank in run_ranks(2, held_in_a_step, partial(arm, stage, bucket_cap_mb=cap_mb), make_module, one_row):
        assert rank.peak == pytest.approx(estimate.total, rel=0.05)


class TwoLists(nn.Module):
    """As an encoder and a decoder: no list is all of the layers, nor is any child one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for layer in self.decoder:
            x = layer(x)
        return x


class LargeRoot(TwoLists):
    """With layers that belong to no block, as an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.before(x)[:, :WIDTH])
        return self.after(torch.cat([x, x, x], 1))


@pytest.mark.parametrize(("make", "policy"), [(TwoLists, "auto"), (TwoLists, None), (LargeRoot, "auto")])
def test_the_estimate_counts_the_blocks_that_stage_3_takes(make: type[nn.Module], policy: str | None) -> None:
    estimate = estimate_memory(make(), 3, 2, "adam", policy=policy)
    for rank in run_ranks(2, held_in_a_step, partial(sharded_by, policy), make, one_row):
        assert rank.peak == pytest.approx(estimate.total, rel=0.05)


def sharded_by(policy: str | None, module: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard_parameters(module, policy=policy)
    return module, DTensorOptimizer(Adam(module.parameters()), module)


# -- nothing whole survives


def allocated_in_a_step(make_arm: Callable[[nn.Module], tuple[nn.Module, Optimizer]]) -> dict[str, Section]:
    """In two forwards and backwards of a step that is not the first."""
    allocations = Allocations()
    forward, optimizer = make_arm(make_module())
    row = one_row()
    for _ in range(2):
        for name in ("first", "second"):
            with allocations.section(f"{name} forward"):
                loss = forward(row).square().mean()
            with allocations.section(f"{name} backward"):
                loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    return {f"{name} {what}": allocations[f"{name} {what}"] for name in ("first", "second") for what in PASSES}


def hoarding_gradients(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Stage 2, but somebody keeps the whole gradients."""
    kept, put = [], Gone.put

    def keep_and_put(self: Gone, param: Tensor) -> None:
        kept.append(param.grad)
        put(self, param)

    Gone.put = keep_and_put  # type: ignore[method-assign]
    return arm(2, module)


def hoarding_parameters(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Stage 3, but parameters stay whole from the forward to the backward."""
    shard_parameters(module, reshard_after_forward=False)
    return module, DTensorOptimizer(Adam(module.parameters()), module)


def assert_no_whole_gradients(sections: dict[str, Section], world_size: int) -> None:
    kept = WHOLE / world_size
    before = sections["first forward"].before
    for name in ("first backward", "second backward"):  # the second adds to what the first has left
        assert sections[name].after - before < kept + SMALL
    most = in_flight(world_size) + BUCKET
    assert sections["first backward"].peak - before < kept + most + SMALL


def assert_no_whole_parameters(sections: dict[str, Section], world_size: int) -> None:
    forward, backward = sections["first forward"], sections["first backward"]
    assert forward.peak - forward.before < 3 * LAYER + SMALL
    assert forward.after - forward.before < LAYER + SMALL
    assert backward.peak - forward.before < WHOLE / world_size + 4 * LAYER + SMALL
    assert backward.after - forward.before < WHOLE / world_size + SMALL


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_whole_gradient_survives_a_backward_of_stage_2(world_size: int) -> None:
    for rank in run_ranks(world_size, allocated_in_a_step, partial(arm, 2), timeout=120):
        assert_no_whole_gradients(rank, world_size)


def test_gradients_that_survived_would_be_seen() -> None:
    for rank in run_ranks(2, allocated_in_a_step, hoarding_gradients, timeout=120):
        with pytest.raises(AssertionError):
            assert_no_whole_gradients(rank, 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_whole_parameter_survives_a_pass_of_stage_3(world_size: int) -> None:
    for rank in run_ranks(world_size, allocated_in_a_step, partial(arm, 3), timeout=120):
        assert_no_whole_parameters(rank, world_size)


def test_parameters_that_survived_would_be_seen() -> None:
    for rank in run_ranks(2, allocated_in_a_step, hoarding_parameters, timeout=120):
        with pytest.raises(AssertionError):
            assert_no_whole_parameters(rank, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_between_steps_parameters_state_and_memory_for_messages_are_left(stage: int) -> None:
    messages = LAYER if stage == 3 else in_flight(2)
    for rank, counted in zip(held(stage, 2), run_ranks(2, allocated_in_a_step, partial(arm, stage)), strict=True):
        left = counted["first forward"].before - rank.parameters - rank.optimizer_state
        assert left == pytest.approx(messages, abs=SMALL)


# -- checkpoints


def save_and_load(stage: int, path: Path) -> tuple[Section, Section, int]:
    """Counted while the state is gathered, and while another optimizer reads it from a mapped file."""
    allocations = Allocations()
    module, optimizer = arm(stage, make_module())
    module(one_row()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with allocations.section("gather"):
        state = optimizer.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)
    del state, module, optimizer
    dist.barrier()
    _, fresh = arm(stage, make_module())
    with allocations.section("load"):
        fresh.load_state_dict(torch.load(path, mmap=True, weights_only=True))
    tensors = [value for its in fresh.state.values() for value in its.values() if isinstance(value, Tensor)]
    return allocations["gather"], allocations["load"], held_nbytes(tensors)


@pytest.mark.parametrize("world_size", [2, 4])
def test_only_rank_0_gathers_and_a_rank_loads_only_its_part(world_size: int, tmp_path: Path) -> None:
    ranks = run_ranks(world_size, save_and_load, 1, tmp_path / "state.pt", timeout=120)
    for rank, (gather, load, own) in enumerate(ranks):
        whole = 2 * WHOLE if rank == 0 else 0
        assert gather.after - gather.before == pytest.approx(whole, abs=SMALL)
        assert gather.peak - gather.before < whole + BUCKET + SMALL
        assert own == pytest.approx(2 * WHOLE / world_size, abs=SMALL)
        assert load.after - load.before == pytest.approx(own, abs=SMALL)
        assert load.peak - load.before < own + LAYER + SMALL


# -- the counting


def counted_and_held(n_steps: int) -> tuple[int, int]:
    """After so many steps of FSDP2, whose collectives gloo's threads do: they allocate and free."""
    allocations = Allocations()
    module, optimizer = fsdp2(make_module())
    row = one_row()
    for _ in range(n_steps):
        module(row).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    del row
    state = [value for its in optimizer.state.values() for value in its.values()]
    return allocations.alive(), held_nbytes([*module.parameters(), *state])


def test_what_is_counted_is_what_is_held() -> None:
    for counted, tensors in run_ranks(2, counted_and_held, 3):
        assert counted == pytest.approx(tensors, abs=1024)

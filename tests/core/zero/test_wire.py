"""A step of stage 1 or 2 sends what DDP's all-reduce sends, of stage 3 half as much again: by ledger and by network."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.hosts import Host, run_on, two_hosts, wire_bytes
from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients
from lightning_distkit.core.zero.bucket import ALIGNMENT
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.parameters import shard_parameters
from lightning_distkit.core.zero.turn import N_FLAGS
from tests.core.zero.training import OPTIMIZERS, batches, module_for, sharded
from tests.hosts import needs_two_hosts
from tests.ranks import run_ranks

FLOAT32 = 4  # bytes
CAP_MB = 0.001  # of the small net: 262 elements, so that it makes several buckets
N_HOSTS = 2
# On a wire without a limit small segments go out as they come, and headers and acknowledgements make up to 4 %.
RATE = "1gbit"
N_LAYERS, WIDTH = 4, 1024


def linears(stage: int, width: int) -> tuple[nn.Module, ZeroOptimizer | DTensorOptimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(N_LAYERS)))
    if stage == 3:
        shard_parameters(module)
        return module, DTensorOptimizer(torch.optim.SGD(module.parameters(), lr=1e-3), module)
    optimizer = ZeroOptimizer(torch.optim.SGD, module.parameters(), lr=1e-3, bucket_cap_mb=8)
    return module, shard_gradients(optimizer) if stage == 2 else optimizer


# -- by the ledger


def sent_in_each_step(stage: int, accumulate: int = 1) -> tuple[list[int], list[int]]:
    """The bytes of three steps, and those of an all-reduce of the same buckets."""
    module = module_for("adam")
    _, optimizer = sharded(module, OPTIMIZERS["adam"](module), stage, bucket_cap_mb=CAP_MB)
    assert optimizer is not None
    sent, whole = [], []
    for _ in range(3):
        for batch in batches(module, accumulate):
            module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.group.ledger.last_step.nbytes)
        whole.append(optimizer.group.ledger.last_step.nbytes_whole)
    return sent, whole


def trained() -> list[list[int]]:
    """Elements of each trained parameter, bucket by bucket: from the last parameter on, up to the cap."""
    params = [param for param in module_for("adam").parameters() if param.requires_grad]
    buckets: list[list[int]] = [[]]
    for numel in (param.numel() for param in reversed(params)):
        if buckets[-1] and FLOAT32 * (sum(buckets[-1]) + numel) > CAP_MB * 2**20:
            buckets.append([])
        buckets[-1].append(numel)
    return buckets


def up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def formula(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes of gradients and of parameters that a rank sends in a step.

    Each parameter is padded to `ALIGNMENT`, and so is each rank's shard of a bucket. Gradients: every other rank's
    shard goes to its owner, and behind it a flag for each parameter that lies in it, wholly or in part, and two of the
    turn. Parameters: the own shard goes to every other rank.
    """
    gradients = parameters = 0
    for numels in trained():
        padded = [up(numel, ALIGNMENT) for numel in numels]
        shard = up(up(sum(padded), world_size) // world_size, ALIGNMENT)
        owners: list[set[int]] = []  # of each parameter, all ranks that have some of it
        begin = 0
        for numel, room in zip(numels, padded, strict=True):
            owners.append({element // shard for element in range(begin, begin + numel)})
            begin += room
        flags = sum(len(its - {rank}) for its in owners) + N_FLAGS * (world_size - 1)
        gradients += FLOAT32 * ((world_size - 1) * shard + flags)
        parameters += FLOAT32 * (world_size - 1) * shard
    return gradients, parameters


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_sends_to_the_byte_what_the_formula_says(stage: int, world_size: int) -> None:
    for rank, (sent, _) in enumerate(run_ranks(world_size, sent_in_each_step, stage)):
        assert sent == [sum(formula(rank, world_size))] * 3


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_beyond_an_all_reduce_there_are_only_paddings_and_flags(stage: int, world_size: int) -> None:
    n_buckets, n_params = len(trained()), sum(map(len, trained()))
    all_reduced = 2 * FLOAT32 * sum(map(sum, trained())) * (world_size - 1) / world_size
    paddings = 2 * FLOAT32 * (world_size - 1) * ALIGNMENT * (n_params / world_size + n_buckets)
    # A parameter that is cut has one on each side.
    flags = FLOAT32 * (n_params + n_buckets * (world_size - 1) * (1 + N_FLAGS))
    for sent, whole in run_ranks(world_size, sent_in_each_step, stage):
        assert sent[-1] <= all_reduced + paddings + flags
        assert 0 <= sent[-1] - whole[-1] <= flags  # the ledger's own word for it has the paddings


def test_stage_1_sends_gradients_once_however_many_backwards_a_step_has() -> None:
    assert run_ranks(2, sent_in_each_step, 1, 3) == run_ranks(2, sent_in_each_step, 1, 1)


def test_stage_2_sends_gradients_with_every_backward() -> None:
    for rank, (sent, _) in enumerate(run_ranks(2, sent_in_each_step, 2, 3)):
        gradients, parameters = formula(rank, 2)
        assert sent == [3 * gradients + parameters] * 3


def sent_in_each_step_of_stage_3(width: int) -> tuple[list[int], int]:
    module, optimizer = linears(3, width)
    sent = []
    for _ in range(3):
        module(torch.randn(2, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(optimizer.group.ledger.last_step.nbytes)
    return sent, optimizer.group.ledger.last_step.nbytes_whole


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_stage_3_sends_each_block_twice_and_its_gradients_once(world_size: int) -> None:
    width = 50  # of which 3 and 4 ranks have unequal shares
    shard = up(width, world_size) // world_size * (width + 1)  # rows of the weight, and as many of the bias
    for sent, whole in run_ranks(world_size, sent_in_each_step_of_stage_3, width):
        assert sent == [3 * FLOAT32 * N_LAYERS * (world_size - 1) * shard] * 3
        # The ledger's own word for an all-reduce is without paddings: for each row of a shard at most one.
        padded = up(width, world_size) / width
        assert sent[-1] == pytest.approx(1.5 * whole * padded, rel=1e-3)


# -- by the network device


def bytes_a_step(host: Host, stage: int, n_steps: int = 4) -> tuple[float, float]:
    """One rank's bytes a step by the ledger, and its host's by the network device."""
    torch.set_num_threads(1)
    module, optimizer = linears(stage, WIDTH)

    def train(n: int) -> None:
        for _ in range(n):
            loss: Tensor = module(torch.randn(2, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        # All have sent all; then a moment for what is still on its way, the last acknowledgements.
        dist.barrier()
        time.sleep(0.05)

    train(2)  # the meeting, and stage 2's agreement on an order
    ledger = optimizer.group.ledger
    sent, crossed = ledger.total.nbytes, wire_bytes(host)
    train(n_steps)
    return (ledger.total.nbytes - sent) / n_steps, (wire_bytes(host) - crossed) / n_steps


@needs_two_hosts
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_ledger_counts_crosses_the_wire(stage: int, world_size: int) -> None:
    with two_hosts(RATE) as hosts:
        ranks = run_on(hosts, world_size, bytes_a_step, stage, timeout=120)
    all_reduced = 2 * FLOAT32 * N_LAYERS * (WIDTH + 1) * WIDTH * (world_size - 1) / world_size
    on_a_host = world_size // N_HOSTS
    for ledger, device in ranks:
        assert ledger == pytest.approx(1.5 * all_reduced if stage == 3 else all_reduced, rel=1e-4)
        # Each rank sends as much to each other one; what goes to those on its own host does not cross.
        crossing = on_a_host * ledger * (world_size - on_a_host) / (world_size - 1)
        assert device == pytest.approx(crossing, rel=0.05)

"""FSDP2 by point-to-point messages: the numbers of gloo's own collectives, the bytes that are needed, and no more."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_distkit.core.collectives import PeerError
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.fsdp_transport import Buffers
from lightning_distkit.core.zero.parameters import shard_parameters
from lightning_distkit.core.zero.sharding import sharding_of
from tests.core.compression.bodies import distance, mlp
from tests.ranks import run_ranks


def trained(
    point_to_point: bool, arguments: dict[str, Any], n_micro_steps: int = 1, divide: float | None = None
) -> Tensor:
    """The parameters after some steps, as one vector."""
    module = shard_parameters(mlp(10, 13, 13, 13, 5), point_to_point=point_to_point, **arguments)
    if divide is not None:
        module.set_gradient_divide_factor(divide)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = DTensorOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), module)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(n_micro_steps):
            module(torch.randn(4, 10, generator=random)).float().square().mean().backward()
        optimizer.step()
    return torch.cat([param.detach().full_tensor().flatten() for param in module.parameters()])


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_SUMMED_IN_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def both(*arguments: Any) -> tuple[Tensor, Tensor]:
    return trained(True, *arguments), trained(False, *arguments)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_gloos_own_collectives(world_size: int) -> None:
    for ours, gloos in run_ranks(world_size, both, {}):
        assert distance(ours, gloos) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "n_micro_steps", "divide"),
    [
        ({}, 3, None),
        ({"policy": None}, 1, None),
        ({"n_prefetched": 0}, 1, None),
        ({"find_unused_parameters": False}, 1, None),
        ({"n_prefetched": 3}, 1, None),
        ({"reshard_after_forward": False}, 1, None),
        ({"reshard_after_forward": True}, 2, None),
        ({}, 1, 5.0),
    ],
    ids=str,
)
def test_equals_gloos_own_collectives_in_every_setting(
    arguments: Any, n_micro_steps: int, divide: float | None
) -> None:
    for ours, gloos in run_ranks(2, both, arguments, n_micro_steps, divide):
        assert distance(ours, gloos) < 1e-6


@pytest.mark.parametrize("policy", [BF16, BF16_SUMMED_IN_FP32], ids=["bf16", "bf16 summed in fp32"])
def test_equals_gloos_own_collectives_in_bf16(policy: MixedPrecisionPolicy) -> None:
    for ours, gloos in run_ranks(2, both, {"mixed_precision": policy}):
        assert distance(ours, gloos) < 5e-3


def twice() -> bool:
    return torch.equal(trained(True, {}), trained(True, {}))


def test_two_runs_get_the_same_bits() -> None:
    assert all(run_ranks(4, twice))


def hooked() -> bool:
    """What a hook sees of a gradient during the backward is what is there after it."""
    module = shard_parameters(mlp(10, 13, 13, 5))
    seen: dict[int, Tensor] = {}
    for number, param in enumerate(module.parameters()):
        param.register_post_accumulate_grad_hook(lambda p, n=number: seen.__setitem__(n, p.grad.to_local().clone()))
    module(torch.ones(4, 10) * (1 + dist.get_rank())).square().mean().backward()
    assert len(seen) == len(list(module.parameters()))
    return all(torch.equal(seen[number], param.grad.to_local()) for number, param in enumerate(module.parameters()))


def test_a_hook_on_the_gradient_sees_it_complete() -> None:
    assert run_ranks(2, hooked) == [True, True]


def sent(reshard_after_forward: bool | None) -> tuple[int, int]:
    """Bytes of one step, and of the parameters."""
    module = shard_parameters(
        nn.Sequential(*(nn.Linear(60, 60) for _ in range(6))), reshard_after_forward=reshard_after_forward
    )
    optimizer = DTensorOptimizer(torch.optim.SGD(module.parameters()), module)
    for _ in range(2):
        module(torch.ones(2, 60)).sum().backward()
        optimizer.step()
    sharding = sharding_of(module)
    assert sharding is not None
    return sharding.group.ledger.last_step.nbytes, sum(4 * param.numel() for param in module.parameters())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_sends_at_most_one_and_a_half_times_what_ddp_does(world_size: int) -> None:
    for nbytes, whole in run_ranks(world_size, sent, None):
        ddps = 2 * whole * (world_size - 1) / world_size
        assert ddps < nbytes <= 1.5 * ddps


def sent_by_muon() -> tuple[int, int]:
    module = shard_parameters(nn.Sequential(*(nn.Linear(60, 60, bias=False) for _ in range(6))))
    optimizer = DTensorOptimizer(torch.optim.Muon(module.parameters()), module)
    module(torch.ones(2, 60)).sum().backward()
    optimizer.step()
    sharding = sharding_of(module)
    assert sharding is not None
    return sharding.group.ledger.last_step.nbytes, sum(4 * param.numel() for param in module.parameters())


def test_whole_matrices_on_their_owners_cost_a_world_sizes_part_more() -> None:
    for nbytes, whole in run_ranks(3, sent_by_muon):
        ddps = 2 * whole * 2 / 3
        assert nbytes <= 1.5 * ddps * (1 + 1 / 3) * 1.001


def test_not_resharding_sends_what_ddp_does() -> None:
    for nbytes, whole in run_ranks(2, sent, False):
        assert nbytes == whole


def lost() -> None:
    module = shard_parameters(mlp(10, 13, 13, 5))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    module(torch.ones(4, 10)).sum().backward()


def test_a_lost_rank_is_named_as_the_cause() -> None:
    error, _ = run_ranks(2, lost, pg_timeout=5.0, return_exceptions=True)
    assert isinstance(error, PeerError)
    assert "another rank died" in str(error)


def test_buffers_are_lent_again_once_nobody_has_them() -> None:
    buffers = Buffers()
    cpu = torch.device("cpu")
    first = buffers.take(8, torch.float32, cpu)
    second = buffers.take(8, torch.float32, cpu)
    assert first.data_ptr() != second.data_ptr()
    where = first.data_ptr()
    view = first[2:]
    del first
    third = buffers.take(8, torch.float32, cpu)
    assert third.data_ptr() != where
    del view
    fourth = buffers.take(4, torch.float64, cpu)  # as many bytes
    assert fourth.data_ptr() == where
    assert fourth.dtype == torch.float64
    assert buffers.take(0, torch.float32, cpu).numel() == 0

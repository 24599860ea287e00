"""Pipes side by side are one process on the joined batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future

from lightning_distkit.core.compression import HOOKS, PowerSGDState, powerSGD_hook
from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.failure import StageError
from tests.core.compression.reference import Reference
from tests.core.pipeline.models import SCHEDULES_AND_STAGES, all_equal, assert_same_gradients, even, mlp
from tests.ranks import run_ranks

WIDTHS = (6, 10, 8, 10, 4)  # seven layers


def replicated(module: nn.Sequential, schedule: str = "gpipe", n: int = 1, mode: str = "never") -> DistributedPipe:
    """Two pipes of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    balance = even(len(module), 2 * n)
    return DistributedPipe(
        module, 3, mode, balance=balance, schedule=schedule, n_stages_per_rank=n, mesh=mesh, timeout=20
    )


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def every_schedule_and_mode() -> None:
    for schedule, n in SCHEDULES_AND_STAGES:
        for mode in CHECKPOINT_MODES:
            # Other values on the second replica: the pipe takes the first one's.
            pipe = replicated(mlp(*WIDTHS, seed=dist.get_rank() // 2), schedule, n, mode)
            whole = mlp(*WIDTHS)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, whole)]
            for step, rows in enumerate((4, 7, 1)):
                x, y = torch.randn(2, rows, 6), torch.randn(2, rows, 4)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                mine = pipe.data_rank
                if step % 2:
                    pipe.loss(x[mine], loss=mean_square, targets=y[mine]).backward()
                else:
                    mean_square(pipe(x[mine]), y[mine]).backward()
                mean_square(whole(x.flatten(0, 1)), y.flatten(0, 1)).backward()
                assert_same_gradients(pipe, whole)
                for optimizer in optimizers:
                    optimizer.step()
            state = pipe.whole_state_dict(all_ranks=True)
            assert state is not None
            for key, value in whole.state_dict().items():
                torch.testing.assert_close(state[key], value)


def test_two_pipes_of_two_ranks_are_one_process_on_the_joined_batch_for_every_schedule_and_mode() -> None:
    run_ranks(4, every_schedule_and_mode)


def accumulation() -> list[float]:
    """Two micro-steps without averaging and one with: the sum of all, and nothing is sent between replicas before."""
    pipe, whole = replicated(mlp(*WIDTHS)), mlp(*WIDTHS)
    x, y = torch.randn(3, 2, 4, 6), torch.randn(3, 2, 4, 4)
    mine = pipe.data_rank
    sent = []
    for step in range(3):
        if step < 2:
            with pipe.no_sync():
                mean_square(pipe(x[step, mine]), y[step, mine]).backward()
        else:
            mean_square(pipe(x[step, mine]), y[step, mine]).backward()
        sent.append(pipe.data_ledger.total.nbytes)
        mean_square(whole(x[step].flatten(0, 1)), y[step].flatten(0, 1)).backward()
    assert sent[:2] == [0, 0]
    assert sent[2] == sum(parameter.nbytes for parameter in pipe.parameters())  # 2 (W - 1) / W of them
    assert_same_gradients(pipe, whole)
    return sent


def test_accumulation_averages_once() -> None:
    run_ranks(4, accumulation)


class OneOfTwo(nn.Module):
    """Uses its first matrix for some inputs and none of its second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() > 0 else x


def unused() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(OneOfTwo(), nn.Linear(6, 4))
    whole = copy.deepcopy(module)
    pipe = replicated(module)
    x = torch.stack([torch.ones(3, 6), -torch.ones(3, 6)])  # the first replica alone uses the first matrix
    pipe(x[pipe.data_rank]).square().mean().backward()
    torch.cat([whole(each) for each in x]).square().mean().backward()
    assert_same_gradients(pipe, whole)  # and where one process has no gradient, the pipe has none


def test_a_parameter_that_one_replica_uses_is_averaged_and_one_that_none_uses_has_no_gradient() -> None:
    run_ranks(4, unused)


def outside() -> None:
    """A layer before and one behind, replicated on all four ranks."""
    torch.manual_seed(0)
    before, behind = nn.Linear(5, 6), nn.Linear(4, 2)
    whole = nn.Sequential(copy.deepcopy(before), *mlp(*WIDTHS), copy.deepcopy(behind))
    pipe = replicated(mlp(*WIDTHS))
    pipe.also_average([*before.parameters(), *behind.parameters()])
    x = torch.randn(2, 4, 5)
    behind(pipe(before(x[pipe.data_rank]))).square().mean().backward()
    whole(x.flatten(0, 1)).square().mean().backward()
    for mine, its in ((before, whole[0]), (behind, whole[-1])):
        torch.testing.assert_close(mine.weight.grad, its.weight.grad)
        torch.testing.assert_close(mine.bias.grad, its.bias.grad)


def test_layers_before_and_behind_are_averaged_with_the_pipe() -> None:
    run_ranks(4, outside)


def powersgd() -> None:
    """PowerSGD over the data dimension, against the plain algorithm on what each replica computes."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 12, bias=False) for _ in range(4)]
    module = nn.Sequential(*layers)
    pipe = replicated(copy.deepcopy(module), "1f1b")
    arguments: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    pipe.register_comm_hook(PowerSGDState(pipe.data_group, **arguments), powerSGD_hook)
    reference = Reference(2)
    names = [name for name, _ in pipe.named_parameters()]
    wholes = [copy.deepcopy(module) for _ in range(2)]  # each replica alone
    for step in range(6):
        x = torch.randn(2, 6, 12)
        pipe.zero_grad()
        pipe.loss(x[pipe.data_rank], loss=lambda out: out.square().mean()).backward()
        for whole, its in zip(wholes, x, strict=True):
            whole.zero_grad()
            whole(its).square().mean().backward()
        grads = {name: [whole.get_parameter(name).grad for whole in wholes] for name in reversed(names)}
        expected = {name: sum(its) / 2 for name, its in grads.items()} if step < 2 else reference.means(grads)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)
        if step >= 2:
            assert int(torch.linalg.matrix_rank(pipe.get_parameter(names[0]).grad)) == 2  # compressed indeed


def test_powersgd_between_pipes_equals_the_reference() -> None:
    run_ranks(4, powersgd)


def every_hook() -> None:
    whole = mlp(*WIDTHS)
    x = torch.randn(2, 4, 6)
    whole(x.flatten(0, 1)).square().mean().backward()
    for name in HOOKS:
        pipe = replicated(mlp(*WIDTHS))
        arguments = {"start_powerSGD_iter": 2} if HOOKS[name].make_state is PowerSGDState else {}
        pipe.register_comm_hook(*HOOKS[name](pipe.data_group, **arguments))
        pipe(x[pipe.data_rank]).square().mean().backward()
        grads = torch.cat([parameter.grad.flatten() for parameter in pipe.parameters()])
        both = [torch.empty_like(grads) for _ in range(2)]
        dist.all_gather(both, grads, group=pipe.data_group)
        if name == "noop":
            assert not torch.equal(*both)
            continue
        assert torch.equal(*both), name
        assert_same_gradients(pipe, whole, rtol=2e-2, atol=1e-3)  # half precision among them
    pipe = replicated(mlp(*WIDTHS))
    with pytest.raises(TypeError, match="state comes first"):
        pipe.register_comm_hook(lambda state, bucket: bucket, None)


def test_every_hook_of_the_table_averages_between_pipes() -> None:
    run_ranks(4, every_hook)


class Quarter:
    n_calls = 0


def own_hook(state: Quarter, bucket: Any) -> Future[Tensor]:
    """A hook as one writes it for DDP."""
    assert bucket.is_last()
    assert bucket.index() == 0
    assert [each.shape for each in bucket.gradients()] == [each.shape for each in bucket.parameters()]
    state.n_calls += 1
    future: Future[Tensor] = Future()
    future.set_result(torch.full_like(bucket.buffer(), 0.25))
    return future


def with_own_hook() -> int:
    pipe = replicated(mlp(*WIDTHS))
    state = Quarter()
    pipe.register_comm_hook(state, own_hook)
    pipe(torch.randn(4, 6)).square().mean().backward()
    assert all((parameter.grad == 0.25).all() for parameter in pipe.parameters())
    return state.n_calls


def test_a_hook_of_ones_own_is_called_as_ddp_calls_it() -> None:
    assert run_ranks(4, with_own_hook) == [1] * 4


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            raise ValueError("too much")
        return x


def one_replica_fails() -> str:
    pipe = replicated(nn.Sequential(nn.Linear(6, 6), Fragile(), nn.Linear(6, 4)))
    x = torch.full((4, 6), 1e9 if pipe.data_rank else 1.0)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(1.0)
    with pytest.raises(StageError) as info:
        pipe(x).square().mean().backward()
    assert isinstance(info.value, ValueError)
    pipe.zero_grad()
    pipe(torch.ones(4, 6)).square().mean().backward()  # goes on
    return str(info.value)


def test_a_stage_that_fails_in_one_replica_is_raised_by_all_of_them() -> None:
    errors = run_ranks(4, one_replica_fails)
    assert "too much" in errors[0]
    assert all_equal(errors)


def wrong_meshes() -> list[str]:
    messages = []
    mesh = init_device_mesh("cpu", (2, 2))
    for arguments in ({"mesh": mesh, "group": dist.group.WORLD}, {"mesh": init_device_mesh("cpu", (4,))}):
        with pytest.raises(ValueError, match="mesh") as info:
            DistributedPipe(mlp(*WIDTHS), **arguments)
        messages.append(str(info.value))
    return messages


def test_a_mesh_has_two_dimensions_and_excludes_a_group() -> None:
    assert all_equal(run_ranks(4, wrong_meshes))

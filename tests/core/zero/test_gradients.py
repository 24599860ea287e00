"""Every way in which gradients come about ends in those of plain DDP, or of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero import GradScaler, ZeroOptimizer, shard_gradients
from tests.ranks import run_ranks

STAGES = [1, 2]
LR = 0.1


def zero(params: object, stage: int, optimizer: object = torch.optim.SGD, **arguments: object) -> ZeroOptimizer:
    made = ZeroOptimizer(optimizer, params, bucket_cap_mb=1e-4, **{"lr": LR, **arguments})  # type: ignore[arg-type]
    return shard_gradients(made) if stage == 2 else made


class Halves(nn.Module):
    """Uses the first, the second or both of two layers, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        layers = (self.first, self.second)
        return sum((layers[n](x) for n in use), torch.zeros(()))


def unused(stage: int) -> tuple[dict[str, Tensor], int]:
    """Rank 0 uses both layers, the others only the second; nobody the third."""
    module = Halves()
    optimizer = zero(module.parameters(), stage, torch.optim.AdamW, weight_decay=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(4, 5, generator=generator)
        module(x, (0, 1) if dist.get_rank() == 0 else (1,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.state_dict()), len(optimizer.state_dict()["state"])


def unused_in_one_process(world_size: int) -> dict[str, Tensor]:
    module = Halves()
    optimizer = torch.optim.AdamW(module.parameters(), LR, weight_decay=0.5)
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    for _ in range(3):
        losses = [
            module(torch.randn(4, 5, generator=generator), (0, 1) if rank == 0 else (1,)).square().mean()
            for rank, generator in enumerate(generators)
        ]
        (torch.stack(losses).sum() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.state_dict())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_unused_on_one_rank_are_averaged_and_on_all_left_alone(stage: int, world_size: int) -> None:
    wanted = unused_in_one_process(world_size)
    results = run_ranks(world_size, unused, stage)
    for got, _ in results:
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(wanted["third.weight"], Halves().third.weight)  # weight decay did not touch it
    assert results[0][1] == 4  # nor has it a state


def gradients(stage: int, backward: Callable[[nn.Module, ZeroOptimizer, Tensor], None]) -> tuple[Tensor, Tensor]:
    """What one step of SGD with rate 1 moved, and what one process would have moved."""
    moved = []
    for alone in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        before = torch.cat([p.detach().flatten() for p in module.parameters()])
        params = module.parameters()
        optimizer = ZeroOptimizer(torch.optim.SGD, params, None if not alone else Group(), lr=1.0)
        if stage == 2 and not alone:
            shard_gradients(optimizer)
        ranks = range(dist.get_world_size()) if alone else [dist.get_rank()]
        for rank in ranks:
            generator = torch.Generator().manual_seed(rank)
            backward(module, optimizer, torch.randn(4, 5, generator=generator))
        optimizer.step()
        after = torch.cat([p.detach().flatten() for p in module.parameters()])
        moved.append((after - before) / (dist.get_world_size() if alone else 1))
    return moved[0], moved[1]


def once(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    module(x).square().mean().backward()


def twice(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    module(x).square().mean().backward()
    module(2 * x).mean().backward()


def without_sync(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    with optimizer.no_sync():
        module(x).square().mean().backward()
    module(2 * x).mean().backward()


def only_the_last_layer_later(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    module(x).square().mean().backward()
    assert isinstance(module, nn.Sequential)
    module[2](module[1](module[0](x)).detach()).mean().backward()


def checkpointed(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    checkpoint(module, x, use_reentrant=False).square().mean().backward()


def checkpointed_by_reentry(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    assert isinstance(module, nn.Sequential)
    hidden = checkpoint(module[:2], x.requires_grad_(), use_reentrant=True)
    # The first layers twice: their gradients come in two parts of one backward.
    again = checkpoint(module[:2], x + 1, use_reentrant=True)
    module[2](hidden + again).square().mean().backward()


def after_an_error(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ZeroDivisionError

    assert isinstance(module, nn.Sequential)
    hidden = module[0](x)
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        module[2](hidden).mean().backward()
    optimizer.zero_grad()
    module(x).square().mean().backward()


def gradients_dropped_by_the_module(module: nn.Module, optimizer: ZeroOptimizer, x: Tensor) -> None:
    """As many a script does, in place of the optimizer's zero_grad."""
    if optimizer.group.world_size > 1:
        module(5 * x).mean().backward()
        module.zero_grad()
    module(x).square().mean().backward()


WAYS = [
    once,
    twice,
    without_sync,
    only_the_last_layer_later,
    checkpointed,
    checkpointed_by_reentry,
    gradients_dropped_by_the_module,
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_means_of_all_ranks(way: Callable[..., None], stage: int) -> None:
    for got, wanted in run_ranks(3, gradients, stage, way):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_an_error_in_backward(stage: int) -> None:
    got = run_ranks(2, gradients, stage, after_an_error)
    wanted = run_ranks(2, gradients, stage, once)
    torch.testing.assert_close(got[0][0], wanted[0][0], rtol=1e-6, atol=1e-8)


def dropped_before_the_step(stage: int) -> bool:
    module = nn.Linear(3, 3)
    optimizer = zero(module.parameters(), stage)
    before = module.weight.detach().clone()
    module(torch.ones(2, 3)).sum().backward()
    module.zero_grad()
    optimizer.step()
    return torch.equal(before, module.weight)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_the_gradients_were_dropped_does_nothing(stage: int) -> None:
    assert run_ranks(2, dropped_before_the_step, stage) == [True, True]


def mixed(stage: int) -> tuple[bool, list[torch.dtype]]:
    """fp32, bf16 and fp64 parameters and fewer elements than ranks; two optimizers; one process as the oracle."""
    results = []
    for alone in (False, True):
        torch.manual_seed(0)
        parts = [nn.Linear(4, 3), nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 1, dtype=torch.bfloat16)]
        extra = nn.Parameter(torch.ones(1))
        group = Group() if alone else None
        made = [
            ZeroOptimizer(torch.optim.Adam, [p for part in parts for p in part.parameters()], group, lr=0.01),
            ZeroOptimizer(torch.optim.SGD, [extra], group, lr=0.01),
        ]
        if stage == 2 and not alone:
            for each in made:
                shard_gradients(each)
        for _ in range(3):
            x = torch.ones(2, 4)
            for part in parts:
                x = part(x.to(part.weight.dtype))
            (x.float().square().mean() * extra).sum().backward()
            for each in made:
                each.step()
                each.zero_grad()
        results.append([p.detach().clone() for part in parts for p in part.parameters()] + [extra.detach().clone()])
    same = all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*results, strict=True))
    return same, [each.dtype for each in results[0]]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_mixed_dtypes_several_optimizers_and_fewer_elements_than_ranks(stage: int, world_size: int) -> None:
    for same, dtypes in run_ranks(world_size, mixed, stage):
        assert same
        assert set(dtypes) == {torch.float32, torch.float64, torch.bfloat16}


def scaled(stage: int, inf_on: int, mine: bool) -> tuple[float, bool, str]:
    module = nn.Linear(40, 1)
    optimizer = zero(module.parameters(), stage)
    scaler = GradScaler("cpu", init_scale=8.0) if mine else torch.amp.GradScaler("cpu", init_scale=8.0)
    before = module.weight.detach().clone()
    x = torch.ones(2, 40)
    if dist.get_rank() == inf_on:
        x[0, 0] = torch.inf  # in one element, so in one shard, of one rank's gradient
    scaler.scale(module(x).sum()).backward()
    try:
        scaler.step(optimizer)
    except (TypeError, RuntimeError) as error:
        return 0.0, False, str(error)
    scaler.update()
    return scaler.get_scale(), not torch.equal(before, module.weight), ""


@pytest.mark.parametrize("stage", STAGES)
def test_an_inf_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    assert run_ranks(3, scaled, stage, 1, True) == [(4.0, False, "")] * 3
    assert run_ranks(3, scaled, stage, -1, True) == [(8.0, True, "")] * 3


def test_torchs_own_scaler_is_refused() -> None:
    for _, stepped, said in run_ranks(2, scaled, 1, -1, False):
        assert not stepped
        assert "use lightning_distkit.core.zero.GradScaler in its place" in said
    for _, stepped, said in run_ranks(2, scaled, 2, -1, False):
        assert not stepped
        assert said


def sparse(stage: int) -> str:
    module = nn.Embedding(10, 4, sparse=True)
    optimizer = zero(module.parameters(), stage)
    try:
        module(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    except TypeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_gradient_is_one_clear_error(stage: int) -> None:
    for said in run_ranks(2, sparse, stage):
        assert "ZeRO needs dense gradients" in said
        assert "sparse=False" in said


def compiled(stage: int) -> float:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = zero(module.parameters(), stage)
    fast = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        fast(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(module[0].weight.detach().sum())


@pytest.mark.parametrize("stage", STAGES)
def test_compiled_modules_are_trained(stage: int) -> None:
    assert run_ranks(2, compiled, stage)[0] == pytest.approx(run_ranks(1, compiled, 0)[0], rel=1e-6)


def of_a_part(stage: int) -> bool:
    """Modules in a dict in a list, of which the optimizer has one; the rest is left to another, plain one."""
    results = []
    for alone in (False, True):
        torch.manual_seed(0)
        module = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}), nn.Linear(2, 2)])
        inner = module[0]
        optimizer: torch.optim.Optimizer = torch.optim.Adam(inner.parameters(), 1e-2)
        if not alone:
            optimizer = ZeroOptimizer(optimizer, bucket_cap_mb=1e-4)
            if stage == 2:
                shard_gradients(optimizer)
        for _ in range(3):
            x = torch.ones(2, 3)
            module[1](torch.tanh(inner["b"](torch.tanh(inner["a"](x))))).square().mean().backward()
            optimizer.step()
            module.zero_grad()
        results.append([p.detach().clone() for p in module.parameters()])
    return all(torch.allclose(a, b, 1e-6, 1e-8) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_any_structure_may_be_sharded_and_not_only_the_root(stage: int) -> None:
    assert run_ranks(2, of_a_part, stage) == [True, True]

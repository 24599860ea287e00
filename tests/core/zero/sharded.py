"""What the tests of sharded checkpoints save, load and compare, in each stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_distkit.core.zero import (
    DTensorOptimizer,
    ShardedCheckpointWriter,
    ZeroOptimizer,
    load_module_full_state_dict,
    module_full_state_dict,
    shard_gradients,
    shard_parameters,
)
from lightning_distkit.core.zero import sharded_checkpoint as module_under_test
from tests.core.zero.training import OPTIMIZERS, batches, module_for

STAGES = [1, 2, 3]
Made = tuple[nn.Module, "ZeroOptimizer | DTensorOptimizer"]


def made(name: str, stage: int) -> Made:
    module = module_for(name)
    module.register_buffer("seen", torch.full((3,), float(dist.get_rank())))  # each rank's own
    if hasattr(module, "scale"):
        module.scale = nn.Parameter(torch.tensor([1.5]))  # FSDP2 wants a dimension
    return zeroed(module, OPTIMIZERS[name], stage)


def zeroed(module: nn.Module, optimizer: Callable[[nn.Module], Any], stage: int) -> Made:
    if stage == 3:
        module = shard_parameters(module)
        return module, DTensorOptimizer(optimizer(module), module)
    zero = ZeroOptimizer(optimizer(module), bucket_cap_mb=1e-3)  # many buckets, cut within parameters
    return module, shard_gradients(zero) if stage == 2 else zero


def step(module: nn.Module, optimizer: Any, n: int, seed: int) -> None:
    for batch in batches(module, n, seed):
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(writer: ShardedCheckpointWriter, made: Made, path: Path, **arguments: Any) -> None:
    module, optimizer = made
    checkpoint = {"model": module.state_dict(), "optimizer": optimizer.sharded_state_dict(), "epoch": 3}
    writer.save(checkpoint, path, replicated=module.parameters(), **arguments)


def load(made: Made, checkpoint: dict[str, Any]) -> None:
    module, optimizer = made
    load_module_full_state_dict(module, checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def whole(made: Made) -> dict[str, Any]:
    """The oracle: the whole form, on rank 0."""
    module, optimizer = made
    weights = module_full_state_dict(module)
    return {
        "model": {name: value.clone() for name, value in weights.items()},
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
    }


def parameters(module: nn.Module) -> Tensor:
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([each.detach().flatten() for each in wholes])


def assert_same(got: Any, wanted: Any) -> None:
    assert isinstance(got, type(wanted))
    if isinstance(wanted, Tensor):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)  # in the same order, too
        for key, value in wanted.items():
            assert_same(got[key], value)
    elif isinstance(wanted, list):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == wanted


def saved(name: str, stage: int, folder: Path) -> Tensor:
    """Saved; saved again while training goes on; and what two steps later the parameters are."""
    both = made(name, stage)
    step(*both, 3, seed=1)
    with ShardedCheckpointWriter() as writer:
        save(writer, both, folder / "sharded")
        oracle = whole(both)
        may_write, prepare = Event(), module_under_test._Writer.prepare_global_plan

        def late(self: Any, plans: Any) -> Any:
            assert may_write.wait(20)
            return prepare(self, plans)

        module_under_test._Writer.prepare_global_plan = late  # type: ignore[method-assign]
        save(writer, both, folder / "asynchronous", asynchronous=True)
        step(*both, 2, seed=2)
        assert not (folder / "asynchronous").exists()
        may_write.set()
        assert writer.is_under_way
        writer.wait()
        assert not writer.is_under_way
    if dist.get_rank() == 0:
        torch.save(oracle, folder / "whole.ckpt")
    return parameters(both[0])

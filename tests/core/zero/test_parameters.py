"""Stage 3 trains as DDP does, and keeps only shards."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.module_state import module_full_state_dict
from lightning_distkit.core.zero.parameters import shard_parameters, unshard_parameters
from tests.core.compression.bodies import distance, mlp
from tests.core.zero.stage_3 import (
    OPTIMIZERS,
    Net,
    assert_same_state,
    batch,
    matrices,
    steps,
    trained,
    whole,
)
from tests.ranks import run_ranks


def ours_and_ddps(name: str, n_micro_steps: int, no_sync: bool) -> tuple[float, float, dict[str, Any], dict[str, Any]]:
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    plain_optimizer = OPTIMIZERS[name](plain.module)
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS[name](module), module)
    clips = {"ddp": partial(nn.utils.clip_grad_norm_, trained(plain)), "ours": optimizer.clip_grad_norm_}
    if name in ("muon",):  # its own parameters only: the others' gradients count in neither
        clips["ddp"] = partial(nn.utils.clip_grad_norm_, matrices(plain))
    arguments: dict[str, Any] = {"n_micro_steps": n_micro_steps}
    norms = steps(plain, plain_optimizer, 20, no_sync=plain.no_sync, clip=clips["ddp"], **arguments)
    own = steps(module, optimizer, 20, no_sync=optimizer.no_sync if no_sync else None, clip=clips["ours"], **arguments)
    # To the way from the beginning, which is stricter than to the parameters; and to each parameter by itself.
    off = distance(whole(module) - whole(Net()), whole(plain.module) - whole(Net()))
    pairs = zip(module.parameters(), plain.module.parameters(), strict=True)
    off = max(off, *(distance(param.full_tensor().detach(), plains.detach()) for param, plains in pairs))
    off_norms = distance(torch.tensor(own), torch.tensor(norms))
    return off, off_norms, optimizer.state_dict(), plain_optimizer.state_dict()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "muon"])
def test_equals_ddp(name: str, world_size: int) -> None:
    """With two micro-batches a step and clipping; and the optimizer's state is in the plain form, on rank 0 alone."""
    # Muon rounds to bf16, which makes of one bit of difference thousands: its gradients are added up in DDP's order.
    results = run_ranks(world_size, ours_and_ddps, name, 2, name == "muon")
    for rank, (off, off_norms, ours, plains) in enumerate(results):
        assert off < 1e-6
        assert off_norms < 1e-6
        if rank == 0:
            assert_same_state(ours, plains, rtol=1e-4)
        else:
            assert ours == {}


@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_fused", "adagrad", "adafactor"])
def test_equals_ddp_with_other_optimizers(name: str) -> None:
    for off, off_norms, *_ in run_ranks(3, ours_and_ddps, name, 1, False):
        assert off < 1e-6
        assert off_norms < 1e-6


def test_no_sync_equals_ddps() -> None:
    for off, off_norms, *_ in run_ranks(2, ours_and_ddps, "sgd", 3, True):
        assert off < 1e-6
        assert off_norms < 1e-6


def with_replicas(name: str) -> tuple[float, float, float, Any]:
    """Two replicas of two shards; and beside it DDP over all four."""
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = shard_parameters(Net(), mesh=mesh)
    optimizer = DTensorOptimizer(OPTIMIZERS[name](module), module)
    plain_optimizer = OPTIMIZERS[name](plain.module)
    norms = steps(plain, plain_optimizer, 5, clip=partial(nn.utils.clip_grad_norm_, trained(plain)))
    own = steps(module, optimizer, 5, clip=optimizer.clip_grad_norm_)
    state = optimizer.state_dict()
    if state:
        assert_same_state(state, plain_optimizer.state_dict(), rtol=1e-3)
    saved = module_full_state_dict(module)
    off = distance(whole(module), whole(plain.module))
    unshard_parameters(module)
    return (
        off,
        distance(torch.tensor(own), torch.tensor(norms)),
        distance(whole(module), whole(plain.module)),
        len(saved),
    )


@pytest.mark.parametrize("name", ["adam", "adafactor"])
def test_replicas_of_shards_equal_ddp(name: str) -> None:
    for rank, (off, off_norms, off_plain, n_saved) in enumerate(run_ranks(4, with_replicas, name)):
        assert off < 1e-6
        assert off_norms < 1e-6
        assert off_plain < 1e-6
        assert n_saved == (len(Net().state_dict()) if rank == 0 else 0)


def in_a_subgroup() -> float | None:
    """Ranks 1 and 2 of three, which are 0 and 1 there."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    plain = DistributedDataParallel(Net(), process_group=group, find_unused_parameters=True)
    steps(plain, OPTIMIZERS["adam"](plain.module), 3)
    module = shard_parameters(Net(), group)
    optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
    steps(module, optimizer, 3)
    assert bool(optimizer.state_dict()) == (dist.get_rank() == 1)
    return distance(whole(module), whole(plain.module))


def test_a_process_subgroup_equals_ddp() -> None:
    _, first, second = run_ranks(3, in_a_subgroup)
    assert max(first, second) < 1e-6


class Checkpointed(Net):
    def forward(self, i: Tensor) -> Tensor:
        x = self.embedding(i)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        out: Tensor = self.head(x * self.gain)
        return out


def checkpointed() -> float:
    plain = DistributedDataParallel(Checkpointed(), find_unused_parameters=True)
    steps(plain, OPTIMIZERS["adam"](plain.module), 3)
    module = shard_parameters(Checkpointed())
    steps(module, DTensorOptimizer(OPTIMIZERS["adam"](module), module), 3)
    return distance(whole(module), whole(plain.module))


def test_activation_checkpointing_equals_ddp() -> None:
    assert max(run_ranks(2, checkpointed)) < 1e-6


# Norms and clipping


def norms() -> list[tuple[float, float]]:
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS["sgd"](module), module)
    for each in (plain, module):
        nn.functional.cross_entropy(each(batch(0)), batch(1)).backward()
    grads = [param.grad for param in trained(plain) if param.grad is not None]
    pairs = []
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        norm = optimizer.grad_norm(norm_type)
        assert type(norm) is Tensor
        pairs.append((float(norm), float(nn.utils.get_total_norm(grads, norm_type))))
    optimizer.clip_grad_value_(1e-3)
    nn.utils.clip_grad_value_(trained(plain), 1e-3)
    pairs.append((float(optimizer.grad_norm()), float(nn.utils.get_total_norm(grads))))
    return pairs


def test_the_norm_is_that_of_all_shards_and_a_plain_tensor_on_every_rank() -> None:
    first, second, third = run_ranks(3, norms)
    assert first == second == third or torch.allclose(torch.tensor(first), torch.tensor(second))
    for ours, plains in first:
        assert ours == pytest.approx(plains, rel=1e-6)


def scaled(bad_rank: int | None) -> tuple[bool, float]:
    """An inf in one rank's shard alone: whether the parameters stay, and the scale afterwards."""
    module = shard_parameters(mlp(4, 5, 5))
    optimizer = DTensorOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = whole(module)
    scaler.scale(module(torch.ones(2, 4)).sum()).backward()
    if dist.get_rank() == bad_rank:
        next(module.parameters()).grad.to_local()[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, whole(module)), scaler.get_scale()


@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_an_inf_in_one_shard_skips_the_step_on_all(bad_rank: int | None) -> None:
    expected = (False, 8.0) if bad_rank is None else (True, 4.0)
    assert run_ranks(2, scaled, bad_rank) == [expected, expected]


def from_different_seeds() -> Tensor:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    own = whole(module)
    return torch.stack([own, whole(shard_parameters(module))])


def test_the_values_are_rank_0s() -> None:
    first, second = run_ranks(2, from_different_seeds)
    assert torch.equal(first[1], first[0])
    assert torch.equal(second[1], first[0])


def mixed() -> tuple[set[torch.dtype], float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = shard_parameters(Net(), mixed_precision=policy)
    optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
    seen: set[torch.dtype] = set()
    module.layers[0].register_forward_hook(lambda _, args, out: seen.add(out.dtype))
    steps(module, optimizer, 5)
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    steps(plain, OPTIMIZERS["adam"](plain.module), 5)
    return seen, distance(whole(module), whole(plain.module))


def test_mixed_precision_computes_in_it_and_keeps_the_parameters() -> None:
    for seen, off in run_ranks(2, mixed):
        assert seen == {torch.bfloat16}
        assert 1e-6 < off < 0.05


def alone() -> float:
    plain = Net()
    steps(plain, OPTIMIZERS["adamw"](plain), 3)
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS["adamw"](module), module)
    steps(module, optimizer, 3)
    assert len(optimizer.state_dict()["state"]) > 0
    return distance(whole(module), whole(plain))


def test_a_world_of_one_is_plain_torch() -> None:
    assert run_ranks(1, alone)[0] < 1e-6


def test_without_torch_distributed_the_module_stays_plain() -> None:
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS["adamw"](module), module)
    i = torch.arange(6)
    with optimizer.no_sync():
        optimizer.step(lambda: nn.functional.cross_entropy(module(i), i).backward())
    assert not torch.equal(whole(module), whole(Net()))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), state, rtol=0.0)


def one_loss(module: nn.Module, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    i = torch.arange(6)
    loss = nn.functional.cross_entropy(module(i), i.flip(0))
    loss.backward()
    return loss


def scheduled() -> float:
    """A scheduler made for the wrapper; a closure; a param group added late."""
    results = []
    for ours in (True, False):
        module: nn.Module = Net()
        module = shard_parameters(module) if ours else module
        optimizer: Any = torch.optim.SGD([module.embedding.weight], lr=0.1, momentum=0.9)
        optimizer = DTensorOptimizer(optimizer, module) if ours else optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(module.layers.parameters()), "lr": 0.02})

            assert optimizer.step(partial(one_loss, module, optimizer)) is not None
            scheduler.step()
        results.append(whole(module))
    return distance(*results)


def test_schedulers_closures_and_late_param_groups_work() -> None:
    assert max(run_ranks(2, scheduled)) < 1e-6


# Memory


def live_bytes() -> tuple[int, int, int]:
    """Of each rank: bytes of parameters, gradients and states it can reach after a step, and of the whole of one."""
    torch.manual_seed(0)
    module = shard_parameters(nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))))
    optimizer = DTensorOptimizer(torch.optim.AdamW(module.parameters()), module)
    module(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    shards = sum(p.to_local().nbytes for p in module.parameters())
    unsharded = sum(p.numel() * 4 for p in module.parameters())
    return sum(storages.values()), shards, unsharded


def test_whole_parameters_do_not_survive_a_step() -> None:
    for live, shards, unsharded in run_ranks(4, live_bytes):
        block = unsharded / 8
        # Parameters, gradients and two moments in shards; buffers in flight, kept: two of a block. Whole parameters
        # would be four times the shards more.
        assert live < 4 * shards + 2.5 * block
        assert 2.5 * block < unsharded

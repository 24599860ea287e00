"""Stage 3 trains as DDP does, keeps only shards, and speaks of whole parameters and states."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.module_state import load_module_full_state_dict, module_full_state_dict
from lightning_distkit.core.zero.parameters import shard_parameters, unshard_parameters
from lightning_distkit.core.zero.sharding import sharding_of
from tests.core.compression.bodies import distance, mlp
from tests.ranks import run_ranks

WIDTH = 7  # divides by no world size here; the last ranks of 4 have an empty shard of what has 1 to 3 rows


class Net(nn.Module):
    """Repeated layers, odd sizes, a parameter of one element, a frozen one, one that is tied, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH)) for _ in range(3)
        )
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("shift", torch.tensor([0.5]))

    def forward(self, i: Tensor) -> Tensor:
        x = self.embedding(i)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(self.frozen(x) * self.gain + self.shift.to(x.dtype))
        return out


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Interleaved, as weight-decay groups are."""
    params = trained(module)
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in trained(module) if param.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda module: torch.optim.SGD(trained(module), lr=0.1, momentum=0.9),
    "adam": lambda module: torch.optim.Adam(trained(module), lr=1e-2),
    "adamw": lambda module: torch.optim.AdamW(two_groups(module), lr=1e-2),
    "adamw_foreach": lambda module: torch.optim.AdamW(two_groups(module), lr=1e-2, foreach=True),
    "adamw_fused": lambda module: torch.optim.AdamW(two_groups(module), lr=1e-2, fused=True),
    "adagrad": lambda module: torch.optim.Adagrad(trained(module), lr=1e-2),
    "muon": lambda module: torch.optim.Muon(matrices(module), lr=1e-2),
    "adafactor": lambda module: torch.optim.Adafactor(trained(module), lr=1e-2),
}
OURS = partial(shard_parameters, policy="auto")


def batch(step: int) -> Tensor:
    """Of this rank and step."""
    return torch.randint(11, (6,), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def flat(params: list[Tensor]) -> Tensor:
    return torch.cat([param.flatten() for param in params])


def whole(module: nn.Module) -> Tensor:
    """All parameters whole, in order, without a collective of ours."""
    return flat([p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in module.parameters()])


def steps(
    module: nn.Module,
    optimizer: Any,
    n_steps: int,
    *,
    first: int = 0,
    n_micro_steps: int = 1,
    no_sync: Any = None,
    clip: Any = None,
) -> list[float]:
    norms = []
    for step in range(first, first + n_steps):
        optimizer.zero_grad()
        for micro_step in range(n_micro_steps):
            i = batch(step * n_micro_steps + micro_step)
            if no_sync is not None and micro_step < n_micro_steps - 1:
                with no_sync():
                    nn.functional.cross_entropy(module(i), i.flip(0)).backward()
            else:
                nn.functional.cross_entropy(module(i), i.flip(0)).backward()
        if clip is not None:
            norms.append(float(clip(0.05)))
        optimizer.step()
    return norms


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
    off = distance(whole(module) - whole(Net()), whole(plain.module) - whole(Net()))
    off_norms = distance(torch.tensor(own), torch.tensor(norms))
    return off, off_norms, optimizer.state_dict(), plain_optimizer.state_dict()


def assert_same_state(ours: Any, plains: Any, rtol: float) -> None:
    """In the plain form: the same ids, groups, keys and shapes, and values that are close."""
    assert ours["param_groups"] == plains["param_groups"]
    assert list(ours["state"]) == list(plains["state"])
    for number, state in plains["state"].items():
        assert list(ours["state"][number]) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][number][key], value, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "muon"])
def test_equals_ddp(name: str, world_size: int) -> None:
    """With two micro-batches a step and clipping; and the optimizer's state is in the plain form, on rank 0 alone."""
    # Muon rounds to bf16, which makes of one bit of difference thousands: its gradients are added up in DDP's order.
    results = run_ranks(world_size, ours_and_ddps, name, 2, name == "muon")
    for rank, (off, off_norms, ours, plains) in enumerate(results):
        # Relative to the way from the beginning, which is stricter than to the parameters.
        assert off < 1e-5
        assert off_norms < 1e-6
        if rank == 0:
            assert_same_state(ours, plains, rtol=1e-4)
        else:
            assert ours == {}


@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_fused", "adagrad", "adafactor"])
def test_equals_ddp_with_other_optimizers(name: str) -> None:
    for off, off_norms, *_ in run_ranks(3, ours_and_ddps, name, 1, False):
        assert off < 1e-5
        assert off_norms < 1e-6


def test_no_sync_equals_ddps() -> None:
    for off, off_norms, *_ in run_ranks(2, ours_and_ddps, "sgd", 3, True):
        assert off < 1e-5
        assert off_norms < 1e-6


def ours_and_ddps_relative() -> float:
    plain = DistributedDataParallel(Net(), find_unused_parameters=True)
    steps(plain, OPTIMIZERS["adam"](plain.module), 20)
    module = shard_parameters(Net())
    steps(module, DTensorOptimizer(OPTIMIZERS["adam"](module), module), 20)
    return distance(whole(module), whole(plain.module))


def test_parameters_equal_ddps_to_a_millionth() -> None:
    assert max(run_ranks(3, ours_and_ddps_relative)) < 1e-6


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


# Parameters that are unused, tied, frozen


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Branch() for _ in range(2))

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, use_b)
        return x


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        x = self.a(x).tanh()
        return self.b(x) if use_b else x


def unused_here() -> float:
    """Each block's b is used on rank 1 in even steps, on none in odd ones; where weight decay matters."""
    results = []
    for ours in (False, True):
        module: Any = Branches()
        module = shard_parameters(module) if ours else DistributedDataParallel(module, find_unused_parameters=True)
        optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        optimizer = DTensorOptimizer(optimizer, module) if ours else optimizer
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            module(x, dist.get_rank() == 1 and step % 2 == 0).square().mean().backward()
            optimizer.step()
        results.append(whole(module))
    return distance(*results)


def test_parameters_unused_on_one_rank_or_on_all_equal_ddps() -> None:
    assert max(run_ranks(2, unused_here)) < 1e-6


class TiedBlocks(nn.Module):
    """Two layers that share with the root, and two that share with each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.layers[1].weight = self.first.weight
        self.layers[3].weight = self.layers[2].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def tied() -> tuple[float, list[str], list[str], bool]:
    results = []
    for ours in (False, True):
        module: Any = TiedBlocks()
        module = shard_parameters(module) if ours else DistributedDataParallel(module)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = DTensorOptimizer(optimizer, module) if ours else optimizer
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            module(x).square().mean().backward()
            optimizer.step()
        results.append(whole(module))
    sharding = sharding_of(module)
    assert sharding is not None
    state = module_full_state_dict(module)
    unshard_parameters(module)
    still = module.layers[1].weight is module.first.weight and module.layers[3].weight is module.layers[2].weight
    return distance(*results), list(sharding.blocks), list(state), still


def test_tied_parameters_stay_tied_wherever_they_are() -> None:
    for rank, (off, blocks, names, still) in enumerate(run_ranks(2, tied)):
        assert off < 1e-6
        assert blocks == ["layers.0", "layers.1", "layers.4"]
        assert names == (list(TiedBlocks().state_dict()) if rank == 0 else [])
        assert still


def buffers() -> list[Tensor]:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    shard_parameters(module)
    x = torch.full((3, 4), float(dist.get_rank())) + torch.eye(3, 4)
    module(x).sum().backward()
    return [module[1].running_mean.clone(), module_full_state_dict(module).get("1.running_mean", torch.empty(0))]


def test_buffers_stay_those_of_each_rank() -> None:
    (first, saved), (second, _) = run_ranks(2, buffers)
    assert not torch.equal(first, second)
    assert torch.equal(saved, first)


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


# State


def save(name: str, n_steps: int) -> Any:
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS[name](module), module)
    steps(module, optimizer, n_steps)
    return module_full_state_dict(module), optimizer.state_dict()


def load_and_go_on(name: str, states: Any, n_steps: int) -> tuple[Tensor, Tensor]:
    """Here at this world size, and in a plain module and optimizer; every rank has the same batches."""
    module_state, optimizer_state = states
    before = pickle.dumps(states)
    results = []
    for ours in (True, False):
        module: nn.Module = Net()
        with torch.no_grad():
            for param in module.parameters():
                param.zero_()
        module = shard_parameters(module) if ours else module
        optimizer: Any = OPTIMIZERS[name](module)
        if ours:
            optimizer = DTensorOptimizer(optimizer, module)
            load_module_full_state_dict(module, module_state)
            optimizer.load_state_dict(optimizer_state)
        else:
            module.load_state_dict(module_state)
            optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        for step in range(n_steps):
            i = torch.randint(11, (6,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(i), i.flip(0)).backward()
            optimizer.step()
        results.append(whole(module))
    assert pickle.dumps(states) == before  # what was given is not written to
    return results[0], results[1]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "adafactor"])
def test_a_full_state_loads_at_any_world_size_and_into_plain_torch(name: str) -> None:
    states = run_ranks(3, save, name, 3)[0]
    for world_size in (1, 2, 4):
        for ours, plains in run_ranks(world_size, load_and_go_on, name, states, 3):
            assert distance(ours, plains) < 1e-6


def plain_state(name: str) -> Any:
    module = Net()
    optimizer = OPTIMIZERS[name](module)
    steps(module, optimizer, 3)
    return module.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_plain_torchs_state_loads(name: str) -> None:
    states = run_ranks(1, plain_state, name)[0]
    for ours, plains in run_ranks(3, load_and_go_on, name, states, 3):
        assert distance(ours, plains) < 1e-6


def save_and_load_at_once(name: str, n_steps: int) -> tuple[bool, bool, float]:
    """Nothing changes by it; and the run goes on as the one that was not disturbed."""
    undisturbed, module = shard_parameters(Net()), shard_parameters(Net())
    theirs = DTensorOptimizer(OPTIMIZERS[name](undisturbed), undisturbed)
    optimizer = DTensorOptimizer(OPTIMIZERS[name](module), module)
    steps(undisturbed, theirs, n_steps)
    steps(module, optimizer, n_steps)
    for_all = [module_full_state_dict(module), optimizer.state_dict()]
    dist.broadcast_object_list(for_all)
    load_module_full_state_dict(module, for_all[0])
    optimizer.load_state_dict(for_all[1])
    same_module = torch.equal(whole(module), whole(undisturbed))
    again = optimizer.state_dict()
    same_state = not again or all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(again["state"][number][key]))
        for number, state in for_all[1]["state"].items()
        for key, value in state.items()
    )
    steps(undisturbed, theirs, 2, first=n_steps)
    steps(module, optimizer, 2, first=n_steps)
    return same_module, same_state, float((whole(module) - whole(undisturbed)).abs().max())


@pytest.mark.parametrize("n_steps", [0, 3])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_save_then_load_at_once_changes_nothing(name: str, n_steps: int) -> None:
    assert run_ranks(2, save_and_load_at_once, name, n_steps) == [(True, True, 0.0)] * 2


def refused() -> tuple[list[str], bool]:
    """On rank 1 alone the state is wrong; both refuse, and nothing has changed."""
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
    steps(module, optimizer, 1)
    states = [module_full_state_dict(module), optimizer.state_dict()]
    dist.broadcast_object_list(states)
    before, said = whole(module), []
    wrong = copy.deepcopy(states)
    if dist.get_rank() == 1:
        wrong[0]["gain"] = torch.ones(2)
        wrong[1]["state"][0]["exp_avg"] = torch.ones(2, 2)
    for load, state in (
        (partial(load_module_full_state_dict, module), wrong[0]),
        (optimizer.load_state_dict, wrong[1]),
    ):
        with pytest.raises(ValueError, match="shape") as error:
            load(state)
        said.append(str(error.value))
    with pytest.raises(ValueError, match="lacks"):
        load_module_full_state_dict(module, {"foreign": torch.ones(1)})
    for malformed in ({}, {"param_groups": 3, "state": {}}, None):
        with pytest.raises(ValueError, match="as torch makes them"):
            optimizer.load_state_dict(malformed if dist.get_rank() == 0 else states[1])
    return said, torch.equal(before, whole(module))


def test_a_foreign_state_is_refused_on_every_rank_and_changes_nothing() -> None:
    (said, same), (others, others_same) = run_ranks(2, refused)
    assert same
    assert others_same
    assert "gain" in said[0]
    assert "gain" in others[0]
    assert "(rank 1)" in said[0]


def one_alone() -> str:
    module = shard_parameters(Net())
    if dist.get_rank() == 1:
        return ""
    Group.meet.__defaults__ = (timedelta(seconds=1),)  # in place of minutes
    with pytest.raises(RuntimeError, match="must be called on every rank") as error:
        module_full_state_dict(module)
    return str(error.value)


def test_a_full_state_asked_for_on_one_rank_alone_is_an_error() -> None:
    assert "module_full_state_dict" in run_ranks(2, one_alone)[0]


def dcp_save(folder: str) -> Tensor:
    module = shard_parameters(Net())
    module.never.requires_grad_(False)  # torch's own function wants a state of each that is trained
    optimizer = DTensorOptimizer(OPTIMIZERS["adamw"](module), module)
    steps(module, optimizer, 3)
    module_state, optimizer_state = get_state_dict(module, optimizer.optimizer)
    dcp.save({"module": module_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return whole(module)


def dcp_load(folder: str) -> tuple[Tensor, bool]:
    module = shard_parameters(Net())
    module.never.requires_grad_(False)
    optimizer = DTensorOptimizer(OPTIMIZERS["adamw"](module), module)
    module_state, optimizer_state = get_state_dict(module, optimizer.optimizer)
    state = {"module": module_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer.optimizer, model_state_dict=state["module"], optim_state_dict=state["optimizer"])
    loaded = whole(module)
    steps(module, optimizer, 1, first=3)
    state = optimizer.state_dict()
    return loaded, not state or all(float(each["step"]) == 4 for each in state["state"].values())


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_sharded_checkpoints_work_as_they_are(tmp_path: Path) -> None:
    saved = run_ranks(3, dcp_save, str(tmp_path))[0]
    for loaded, stepped in run_ranks(2, dcp_load, str(tmp_path)):
        assert torch.equal(loaded, saved)
        assert stepped


# Plain again


def plain_again(rank_0_only: bool) -> dict[str, Any]:
    module = shard_parameters(Net())
    optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
    steps(module, optimizer, 2)
    module(batch(0))  # a forward alone leaves the root unsharded
    values = whole(module)
    returned = unshard_parameters(module, rank_0_only=rank_0_only)
    found: dict[str, Any] = {"returned": returned is module, "class": type(module).__name__}
    found["fsdp"] = any(isinstance(each, FSDPModule) for each in module.modules())
    found["plain"] = all(type(param) is nn.Parameter for param in module.parameters())
    found["keys"] = sorted(set(vars(module.layers[0])) ^ set(vars(Net().layers[0])))
    found["hooks"] = sum(
        len(hooks)
        for each in module.modules()
        for name, hooks in vars(each).items()
        if name.endswith("_hooks") and hooks
    )
    found["tied"] = module.head.weight is module.embedding.weight
    found["device"] = {param.device.type for param in module.parameters()}
    if found["device"] == {"cpu"}:
        found["same"] = torch.equal(whole(module), values)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
        found["copied"] = torch.equal(copied(batch(0)), module(batch(0)))
        saved = io.BytesIO()
        torch.save(module, saved)
    if not rank_0_only:
        shard_parameters(module, policy=None)
        optimizer = DTensorOptimizer(OPTIMIZERS["adam"](module), module)
        steps(module, optimizer, 1)
        found["again"] = not torch.equal(whole(module), values)
    return found


PLAIN = {"returned": True, "class": "Net", "fsdp": False, "plain": True, "keys": [], "hooks": 0, "tied": True}


def test_an_unsharded_module_is_plain_and_can_be_sharded_again() -> None:
    assert (
        run_ranks(2, plain_again, False)
        == [PLAIN | {"device": {"cpu"}, "same": True, "copied": True, "again": True}] * 2
    )


def test_a_module_unsharded_on_rank_0_only_costs_the_others_nothing() -> None:
    first, second = run_ranks(2, plain_again, True)
    assert first == PLAIN | {"device": {"cpu"}, "same": True, "copied": True}
    assert second == PLAIN | {"device": {"meta"}}


# The meta device


class Attentive(nn.Module):
    """With what makes initialisation hard: a parent that resets its children, a buffer, tied and own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.own = Own()

    def forward(self, i: Tensor) -> Tensor:
        x = self.embedding(i)
        for layer in self.layers:
            x = layer(x)
        return self.own(self.norm(x))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Pretrained(nn.Sequential):
    """As transformers': a second initialisation on top of the first."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def from_meta(cls: type[nn.Module], ours: bool) -> tuple[dict[str, Any], Tensor]:
    torch.manual_seed(5 + 10 * dist.get_rank() * ours)
    if ours:
        with torch.device("meta"):
            module = cls()
        torch.manual_seed(5 + 10 * dist.get_rank())
        shard_parameters(module)
        state = module_full_state_dict(module)
    else:
        state = cls().state_dict()
    return state, torch.rand(1)


@pytest.mark.parametrize("cls", [Attentive, Pretrained])
def test_a_module_on_meta_begins_as_rank_0s_plain_one(cls: type[nn.Module]) -> None:
    ((plains, next_plain),) = run_ranks(1, from_meta, cls, False)
    (ours, next_ours), (_, next_other) = run_ranks(2, from_meta, cls, True)
    assert list(ours) == list(plains)
    for name, value in plains.items():
        assert torch.equal(ours[name], value), name
    assert torch.equal(next_ours, next_plain)  # rank 0 has drawn as much
    assert not torch.equal(next_ours, next_other)  # and the others' random numbers stay their own


def meta_from_state(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with torch.device("meta"):
        module = Attentive()
    module = shard_parameters(module, state_dict=state)
    plain = Attentive()
    plain.load_state_dict(state)
    i = torch.arange(6)
    return module(i).detach(), plain(i).detach()


def test_a_module_on_meta_takes_a_state_dict() -> None:
    torch.manual_seed(3)
    for ours, plains in run_ranks(2, meta_from_state, Attentive().state_dict()):
        assert torch.allclose(ours, plains, atol=1e-6)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class LostBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)


def meta_refused(cls: type[nn.Module]) -> str:
    with torch.device("meta"):
        module = nn.Sequential(cls())
    with pytest.raises(ValueError, match="the meta device") as error:
        shard_parameters(module, policy=None)
    return str(error.value)


@pytest.mark.parametrize(("cls", "name"), [(NoReset, "weight"), (LostBuffer, "0.mask")])
def test_what_nothing_initialises_is_an_error_on_every_rank(cls: type[nn.Module], name: str) -> None:
    first, second = run_ranks(2, meta_refused, cls)
    assert first == second
    assert name in first


# Arguments


def wrong_arguments() -> None:
    scalar = nn.Linear(2, 2)
    scalar.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="gain has none"):
        shard_parameters(scalar)
    with pytest.raises(ValueError, match=r"must have one dtype.*0\.weight.*float32.*1\.weight.*float64"):
        shard_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), policy=None)
    with pytest.raises(ValueError, match="matches none of Net"):
        shard_parameters(Net(), policy=nn.Conv2d)
    with pytest.raises(ValueError, match="n_prefetched must be at least 0, got -1"):
        shard_parameters(Net(), n_prefetched=-1)
    module = shard_parameters(Net())
    with pytest.raises(ValueError, match="sharded already"):
        shard_parameters(module)
    with pytest.raises(TypeError, match="cannot shard LBFGS"):
        DTensorOptimizer(torch.optim.LBFGS(trained(module)), module)
    with pytest.raises(ValueError, match="as shard_parameters has left it"):
        DTensorOptimizer(OPTIMIZERS["sgd"](Net()), module)
    with pytest.raises(ValueError, match="matches none of"):  # on rank 1 alone
        shard_parameters(Net(), policy=nn.Conv2d if dist.get_rank() == 1 else nn.Linear)
    other = nn.Linear(2 + dist.get_rank(), 2)
    with pytest.raises(ValueError, match="must be made alike on every rank"):
        shard_parameters(other)


def test_wrong_arguments_are_errors_on_every_rank() -> None:
    run_ranks(2, wrong_arguments)


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

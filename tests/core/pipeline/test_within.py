"""A pipe inside a larger module: the module's shape, batches, states, norms, and who is gone."""

from __future__ import annotations

import copy
import os
import random
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.lost import RollCall
from lightning_distkit.core.pipeline.merged_state import merged
from lightning_distkit.core.pipeline.placeholder import Placeholder
from lightning_distkit.core.pipeline.shared_batch import SharedBatches
from lightning_distkit.core.pipeline.stage_norm import grad_norm
from lightning_distkit.core.pipeline.starting_values import even_out
from lightning_distkit.core.pipeline.within import PipeWithin, find_sequential
from tests.ranks import RankDied, run_ranks

CPU = torch.device("cpu")


class Model(nn.Module):
    """Tied layers in two stages, a buffer that no state dict has, and layers around."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.before = nn.Linear(4, 4)
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        self.body[4].weight = self.body[0].weight
        for layer in self.body:
            layer.register_buffer("scale", torch.rand(4), persistent=False)
        self.behind = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.body(self.before(x)))


def inside() -> dict[str, Any]:
    group = Group(dist.group.WORLD)
    model = Model(seed=group.rank)  # other values on every rank
    weight = model.body[2].weight
    even_out(model, model.body, [], group)
    part = PipeWithin(model, "body", lambda found: DistributedPipe(found, 2, balance=[2, 1, 2]))
    own = [name for name, each in model.named_parameters() if not isinstance(each, Placeholder)]
    loss = model(torch.arange(12.0).view(3, 4) / 12).square().mean()
    loss.backward()
    norms = [float(grad_norm(model.parameters(), part.counts, group, CPU, p)) for p in (2.0, 1.0, torch.inf)]
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="belongs to stage"):
        model.body[(2, 0, 0)[group.rank]](torch.zeros(1, 4))
    state = merged(model.state_dict(), group, lambda path: part.owner(path[0]))
    model.load_state_dict(model.state_dict())  # warns of nothing
    part.restore(group, range(3))
    return {
        "own": own,
        "loss": loss.item(),
        "norms": norms,
        "copied": [type(each) is Placeholder for each in copied.parameters()],
        "state": {name: value.clone() for name, value in state.items()} if group.rank == 0 else {},
        "whole": [each.detach().clone() for each in (*model.parameters(), *model.buffers())],
        "is_tied": model.body[4].weight is model.body[0].weight,
        "same_object": model.body[2].weight is weight,
        "answer": model(torch.ones(1, 4)).item(),
    }


def test_the_module_keeps_its_shape_and_is_whole_again_afterwards() -> None:
    model = Model()
    results = run_ranks(3, inside)
    loss = model(torch.arange(12.0).view(3, 4) / 12).square().mean()
    loss.backward()
    grads = [each.grad for each in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    around = {name for name in names if not name.startswith("body")}
    for rank, its in enumerate(({"0", "1"}, {"2"}, {"3", "4"})):
        got = results[rank]
        tied = {"body.0.weight"} if rank == 2 else set()
        assert set(got["own"]) == around | tied | {name for name in names if name.split(".")[1] in its}
        assert got["loss"] == pytest.approx(loss.item(), rel=1e-6)
        wanted = [float(nn.utils.get_total_norm(grads, p)) for p in (2.0, 1.0, torch.inf)]
        assert got["norms"] == pytest.approx(wanted, rel=1e-6)
        assert got["copied"] == [name not in got["own"] for name in names]
        torch.testing.assert_close(got["whole"], [*model.parameters(), *model.buffers()], rtol=0, atol=0)
        assert got["is_tied"]
        assert got["same_object"]
        assert got["answer"] == pytest.approx(model(torch.ones(1, 4)).item(), rel=1e-6)
    assert list(results[0]["state"]) == list(model.state_dict())
    torch.testing.assert_close(results[0]["state"], dict(model.state_dict()), rtol=0, atol=0)


def shared() -> tuple[Any, list[float]]:
    group = Group(dist.group.WORLD)
    torch.manual_seed(group.rank)
    random.seed(group.rank)
    batch = {
        "large": torch.rand(300, 300),
        "half": torch.rand(3).bfloat16(),
        "mask": torch.rand(70_000) > 0.5,
        "scalar": torch.rand(()),
        "empty": torch.empty(0, 3),
        "rest": (f"rank {group.rank}", None, [group.rank]),
    }
    got = SharedBatches(group, group, CPU).share(batch)
    return got, [float(torch.rand(1)), random.random()]


def test_every_rank_has_the_first_ones_batch_and_random_numbers() -> None:
    first, *others = run_ranks(3, shared)
    assert first[0]["rest"] == ("rank 0", None, [0])
    for other in others:
        assert other[0].keys() == first[0].keys()
        assert other[0].pop("rest") == first[0]["rest"]
        torch.testing.assert_close(other[0], {k: v for k, v in first[0].items() if k != "rest"}, rtol=0, atol=0)
        assert other[1] == first[1]


def asked() -> list[int]:
    group = Group(dist.group.WORLD)
    roll_call = RollCall(group)
    group.everyones(None, CPU)
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        group.everyones(None, CPU)
    return roll_call.missing()


def test_every_rank_names_the_one_that_is_gone_and_no_other() -> None:
    results = run_ranks(4, asked, return_exceptions=True)
    assert isinstance(results.pop(2), RankDied)
    assert results == [[2]] * 3


def test_the_part_is_found_or_the_candidates_are_listed() -> None:
    model = Model()
    assert find_sequential(model) == ("body", model.body)
    assert find_sequential(model, model.body) == ("body", model.body)
    assert find_sequential(model.body) == ("", model.body)
    model.other = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Tanh())
    with pytest.raises(ValueError, match=r"found 'body', 'other'; name it"):
        find_sequential(model)
    assert find_sequential(model, "other.0")[0] == "other.0"

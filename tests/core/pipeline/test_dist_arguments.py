"""Every wrong argument is one clear error on every rank, before anything is sent; also if one rank alone is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.failure import StageError
from lightning_distkit.core.pipeline.skip import skippable, stash
from tests.core.pipeline.models import all_equal, mlp
from tests.ranks import run_ranks


@skippable(stash=["lost"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("lost", x)
        return x


class Table(nn.Module):
    """A parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, device="meta"))


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (nn.Linear(2, 2), {}, TypeError, "must be an nn.Sequential, got Linear"),
    (None, {"chunks": 0}, ValueError, "chunks must be a positive integer, got 0"),
    (None, {"chunks": 2.0}, ValueError, "chunks must be a positive integer, got 2.0"),
    (None, {"chunks": True}, ValueError, "chunks must be a positive integer, got True"),
    (None, {"checkpoint": "sometimes"}, ValueError, "checkpoint must be one of 'always', 'except_last', 'never'"),
    (None, {"schedule": "zigzag"}, ValueError, "schedule must be one of 'gpipe', '1f1b', 'interleaved_1f1b'"),
    (None, {"schedule": "1f1b", "n_stages_per_rank": 2}, ValueError, "1f1b has one stage a rank, got 2"),
    (None, {"n_stages_per_rank": 0}, ValueError, "n_stages_per_rank must be a positive integer"),
    (None, {"outputs": "first"}, ValueError, "outputs must be one of 'all', 'last'"),
    (None, {"timeout": 0}, ValueError, "timeout must be positive"),
    (None, {"balance": [1, 1]}, ValueError, "balance"),
    (None, {"balance": "luck"}, ValueError, "balance must be"),
    (None, {"balance": "time"}, ValueError, "sample"),
    (nn.Sequential(nn.Linear(2, 2)), {}, ValueError, "2 stages need at least 2 layers, got 1"),
    (nn.Sequential(), {}, ValueError, "2 stages need at least 2 layers, got 0"),
    (nn.Sequential(Stash(), nn.Linear(2, 2)), {}, TypeError, "'lost' as poppable but stashed"),
    (nn.Sequential(Table(), nn.Linear(2, 2)), {}, ValueError, "has none for table"),
]


def each_wrong(ranks: tuple[int, ...]) -> list[str]:
    messages = []
    for module, arguments, kind, text in WRONG:
        right = mlp(2, 2, 2)
        is_wrong = dist.get_rank() in ranks
        made = (right if module is None else module) if is_wrong else right
        with pytest.raises(kind) as info:
            DistributedPipe(made, **(arguments if is_wrong else {}))
        assert text in str(info.value), (text, str(info.value))
        messages.append(str(info.value).split(" (rank")[0])
    pipe = DistributedPipe(mlp(2, 2, 2))  # and nothing was left behind
    pipe(torch.ones(2, 2)).sum().backward()
    return messages


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_every_wrong_argument_is_one_error_on_every_rank(ranks: tuple[int, ...]) -> None:
    assert all_equal(run_ranks(2, each_wrong, ranks))


def each_different() -> list[str]:
    messages = []
    for name, values in {
        "chunks": (2, 3),
        "checkpoint": ("never", "always"),
        "schedule": ("gpipe", "1f1b"),
        "deferred_batch_norm": (True, False),
        "outputs": ("all", "last"),
        "balance": ([1, 2], [2, 1]),
    }.items():
        told = re.escape(f"{name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1")
        with pytest.raises(ValueError, match=told) as info:
            DistributedPipe(mlp(2, 2, 2), **{name: values[dist.get_rank()]})
        messages.append(str(info.value))
    return messages


def test_arguments_that_differ_between_ranks_are_named() -> None:
    assert all_equal(run_ranks(2, each_different))


def names_that_collide() -> None:
    for name in ("loss", "chunks", "balance", "gather", "rank", "_engine"):
        with pytest.raises(ValueError, match=f"got {name}; rename it"):
            DistributedPipe(nn.Sequential(dict_of(**{name: nn.Linear(2, 2), "other": nn.Linear(2, 2)})))
    pipe = DistributedPipe(nn.Sequential(dict_of(embed=nn.Linear(2, 2), head=nn.Linear(2, 2))))
    assert list(pipe.state_dict()) == [f"{'head' if pipe.rank else 'embed'}.{each}" for each in ("weight", "bias")]


def dict_of(**layers: nn.Module) -> Any:
    from collections import OrderedDict

    return OrderedDict(layers)


def test_named_layers_keep_their_names_and_may_not_have_a_pipes_own() -> None:
    run_ranks(2, names_that_collide)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> int:
        return 3


def boundaries() -> list[str]:
    messages = []
    for module in (nn.Sequential(Nothing(), nn.Identity()), nn.Sequential(nn.Identity(), Nothing())):
        for mode in ("never", "always"):
            pipe = DistributedPipe(module, 2, mode, balance=[1, 1])
            with pytest.raises(TypeError, match="at least one tensor") as info:
                pipe(torch.ones(4, 2))
            assert isinstance(info.value, StageError)
            messages.append(str(info.value))
    pipe = DistributedPipe(nn.Sequential(Different(), nn.Identity()), 2, balance=[1, 1])
    with pytest.raises(TypeError, match="same nest") as different:
        pipe(torch.arange(4.0))
    messages.append(str(different.value))
    pipe = DistributedPipe(nn.Sequential(Unpicklable(), nn.Identity()), 2, balance=[1, 1])
    with pytest.raises(TypeError, match="can be pickled") as info:
        pipe(torch.ones(4, 2))
    messages.append(str(info.value))
    return messages


class Different(nn.Module):
    """A tensor for one micro-batch, a tuple for another."""

    def forward(self, x: Tensor) -> Any:
        return [x, x] if x[0] > 0 else x


class Unpicklable(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return [x, lambda: None]


def test_every_wrong_boundary_is_one_error_on_every_rank() -> None:
    assert all_equal(run_ranks(2, boundaries))

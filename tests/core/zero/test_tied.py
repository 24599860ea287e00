"""A tied parameter of a module on meta begins with the plain module's values, or it is said why it cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero import (
    check_initialisable,
    initialise,
    module_full_state_dict,
    shard_parameters,
    sync_module_states,
)
from tests.ranks import run_ranks


class FirstKept(nn.Module):
    """The head takes the embedding's values, which are much larger than its own were."""

    _tied_weights_keys: ClassVar[Any] = ["head.weight"]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 11)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight


class LastKept(FirstKept):
    _tied_weights_keys: ClassVar[Any] = {"embedding.weight": "head.weight"}  # as in transformers 5

    def tie(self) -> None:
        self.embedding.weight = self.head.weight


class InitialisedOnceMore(LastKept):
    """As nanoGPT: tied, and then all modules are visited again."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class InABlock(nn.Module):
    """What says it is not the root, and the two are in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.model = FirstKept()


class Borrowed(nn.Module):
    """The head has no values of its own."""

    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = self.Head(self.embedding.weight)


CLASSES = [FirstKept, LastKept, InitialisedOnceMore, InABlock, Borrowed]


def stage_1(module: nn.Module) -> dict[str, Tensor]:
    check_initialisable(module)
    initialise(module, torch.device("cpu"), Group(dist.group.WORLD), loaded=None)
    sync_module_states(module, Group(dist.group.WORLD))
    return module.state_dict()


def stage_3(module: nn.Module) -> dict[str, Tensor]:
    return module_full_state_dict(shard_parameters(module))


def stage_3_in_blocks(module: nn.Module) -> dict[str, Tensor]:
    return module_full_state_dict(shard_parameters(module, policy=(nn.Embedding, nn.Linear, Borrowed.Head)))


WAYS = [stage_1, stage_3, stage_3_in_blocks]


def from_meta() -> list[str]:
    """Where rank 0's values are not the plain module's, or are not tied."""
    wrong = []
    for cls in CLASSES:
        torch.manual_seed(5)
        plain, following = cls().state_dict(), torch.rand(1)
        for way in WAYS:
            with torch.device("meta"):
                module = cls()
            torch.manual_seed(5 + 10 * dist.get_rank())
            state = way(module)
            if dist.get_rank() == 0:
                where = f"{cls.__name__}, {way.__name__}"
                wrong += [f"{where}: {name}" for name in plain if not torch.equal(state[name], plain[name])]
                wrong += [] if torch.equal(torch.rand(1), following) else [f"{where}: random numbers"]
                ties = {each.data_ptr() for name, each in state.items() if plain[name].shape == (11, 8)}
                wrong += [] if len(ties) == 1 else [f"{where}: not tied"]
            if way is stage_1:
                names = [name for name, _ in module.named_parameters()]
                wrong += [] if names == [name for name, _ in cls().named_parameters()] else [f"{cls}: {names}"]
    return wrong


def test_a_tied_parameter_begins_as_in_the_plain_module_and_stays_tied() -> None:
    assert run_ranks(2, from_meta) == [[], []]


class NotSaid(FirstKept):
    _tied_weights_keys = None


class NotSaidAfterwards(InitialisedOnceMore):
    _tied_weights_keys = None


def refused(way: Callable[[nn.Module], Any]) -> list[str]:
    said = []
    for cls in (NotSaid, NotSaidAfterwards):
        with torch.device("meta"):
            module = cls()
        with pytest.raises(ValueError, match=r"embedding\.weight and head\.weight are the same one") as error:
            way(module)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("way", [stage_1, stage_3])
def test_what_is_not_said_is_refused_with_the_way_out(way: Callable[[nn.Module], Any]) -> None:
    for said in run_ranks(2, refused, way):
        for its in said:
            assert "_tied_weights_keys of the module, as transformers does (here ['head.weight']" in its


def loaded() -> bool:
    with torch.device("meta"):
        module = NotSaid()
    state = NotSaid().state_dict()
    got = module_full_state_dict(shard_parameters(module, state_dict=state))
    return all(torch.equal(value, state[name]) for name, value in got.items())


def test_what_is_loaded_needs_nobody_to_say_it() -> None:
    assert run_ranks(2, loaded) == [True, True]

"""Stage 3: a module on the meta device begins as the plain one would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distkit.core.zero.module_state import module_full_state_dict
from lightning_distkit.core.zero.parameters import shard_parameters
from tests.ranks import run_ranks


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

"""A policy finds the blocks that one would name, and says so when it finds none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_distkit.core.zero.policy import find_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Transformer(nn.Module):
    def __init__(self, n_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(Block() for _ in range(n_layers))
        self.head = nn.Linear(8, 100)


LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("auto", LAYERS),
        ("children", ["embedding", *LAYERS, "head"]),
        (None, []),
        (Block, LAYERS),
        ([Block, nn.Embedding], ["embedding", *LAYERS]),
        (lambda name, _: name.endswith("mlp"), [f"{layer}.mlp" for layer in LAYERS]),
        # 288 + 280 elements of attention and mlp: a layer is above 500, nothing in it is; so are the two at the ends.
        (500, ["embedding", *LAYERS, "head"]),
    ],
    ids=["auto", "children", "none", "class", "classes", "callable", "numel"],
)
def test_a_policy_finds_the_blocks(policy: Any, names: list[str]) -> None:
    assert list(find_blocks(Transformer(), policy)) == names


def test_auto_takes_what_repeats_in_a_sequential() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))
    assert list(find_blocks(module)) == ["0", "2"]


def test_auto_takes_large_children_where_nothing_repeats() -> None:
    module = nn.Sequential(nn.Linear(400, 300), nn.Bilinear(4, 4, 4))
    assert list(find_blocks(module)) == ["0"]


def test_auto_of_a_small_module_is_one_block() -> None:
    assert find_blocks(nn.Linear(4, 4)) == {}


def test_a_module_in_two_places_is_one_block() -> None:
    layer = nn.Linear(4, 4)
    assert list(find_blocks(nn.Sequential(layer, nn.Linear(4, 4), layer))) == ["0", "1"]


def test_by_numel_counts_what_is_not_in_a_block_yet() -> None:
    inner = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(2, 2, bias=False))
    assert list(find_blocks(nn.Sequential(inner, nn.Linear(2, 2)), 100)) == ["0.0"]


@pytest.mark.parametrize("policy", [nn.Conv2d, 10**9, lambda name, module: False], ids=["class", "numel", "callable"])
def test_a_policy_that_matches_nothing_is_an_error(policy: Any) -> None:
    with pytest.raises(ValueError, match="must match at least one module below the root"):
        find_blocks(Transformer(), policy)


def test_a_list_of_layers_cannot_be_a_block() -> None:
    with pytest.raises(ValueError, match="must have a forward, but the policy matches 'layers', a ModuleList"):
        find_blocks(Transformer(), nn.ModuleList)


@pytest.mark.parametrize("policy", ["layers", 1.5, [Block, "Block"], int, True])
def test_what_is_no_policy_is_an_error(policy: Any) -> None:
    with pytest.raises(TypeError, match="policy must be 'auto'"):
        find_blocks(Transformer(), policy)


def test_elements_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        find_blocks(Transformer(), 0)


def test_a_policy_needs_no_memory() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(3)))
    assert len(find_blocks(module)) == 3

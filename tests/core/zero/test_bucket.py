"""Where parameters and shards lie in a flat tensor: nothing overlaps, nothing is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_distkit.core.zero.bucket import (
    ALIGNMENT,
    Bucket,
    Layout,
    balanced,
    in_memory_order,
    in_shape_of,
    slices,
    whole_parameters,
)

NUMELS = st.lists(st.integers(0, 200), min_size=1, max_size=8)
WORLDS = st.integers(1, 5)


def covers(layout: Layout, numels: list[int], world_size: int) -> None:
    """Each element of each parameter is in exactly one place, and that place is where the parameter has it."""
    seen: list[list[int]] = [[0] * numel for numel in numels]
    starts = [sum(layout.splits[:owner]) for owner in range(world_size)]
    places: set[int] = set()
    for piece in layout.pieces:
        for offset in range(piece.end - piece.begin):
            seen[piece.index][piece.begin + offset] += 1
            place = starts[piece.owner] + piece.at + offset
            assert place == layout.begins[piece.index] + piece.begin + offset
            assert piece.at + offset < layout.splits[piece.owner]
            assert place not in places
            places.add(place)
    assert all(count == 1 for each in seen for count in each)


@given(NUMELS, WORLDS)
def test_slices_hold_every_element_once_in_shards_of_one_length(numels: list[int], world_size: int) -> None:
    layout = slices(numels, world_size)
    covers(layout, numels, world_size)
    assert len(set(layout.splits)) == 1
    assert layout.numel < sum(numels) + len(numels) * ALIGNMENT + world_size * ALIGNMENT


@given(NUMELS, WORLDS)
def test_whole_parameters_hold_every_element_once_in_the_shard_of_its_owner(numels: list[int], world_size: int) -> None:
    owners = balanced(numels, [0] * world_size)
    layout = whole_parameters(numels, owners, world_size)
    covers(layout, numels, world_size)
    assert [(piece.begin, piece.end) for piece in layout.pieces] == [
        (0, numels[piece.index]) for piece in layout.pieces
    ]
    assert all(piece.owner == owners[piece.index] for piece in layout.pieces)


@given(NUMELS, WORLDS)
def test_no_rank_has_more_than_a_fair_share_and_one_parameter(numels: list[int], world_size: int) -> None:
    loads = [0] * world_size
    balanced(numels, loads)
    assert sum(loads) == sum(numels)
    assert max(loads) <= sum(numels) / world_size + max(numels)


TENSORS = {
    "contiguous": lambda: torch.randn(3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 3).t(),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "one wide": lambda: torch.randn(1, 4).t(),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_every_memory_format_comes_back_as_it_was(kind: str) -> None:
    tensor: Tensor = TENSORS[kind]()
    flat = in_memory_order(tensor, tensor)
    assert flat.dim() == 1
    assert tensor.numel() == 0 or flat.data_ptr() == tensor.data_ptr()
    back = in_shape_of(flat, tensor)
    assert torch.equal(back, tensor)
    assert tensor.numel() < 2 or back.is_contiguous() == tensor.is_contiguous()
    other = torch.randn(tensor.shape)
    assert torch.equal(in_shape_of(in_memory_order(other, tensor), tensor), other)


def test_parameters_keep_their_values_and_objects_and_share_the_buckets_memory() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in conv.state_dict().items()}
    params = list(conv.parameters())
    bucket = Bucket(params, slices([p.numel() for p in params], 3), rank=1)
    assert all(torch.equal(value, before[name]) for name, value in conv.state_dict().items())
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert list(conv.parameters()) == params or all(a is b for a, b in zip(conv.parameters(), params, strict=True))
    bucket.flat.zero_()
    assert conv.weight.count_nonzero() == 0
    assert not list(bucket.moved())
    conv.weight.data = conv.weight.data.clone()
    assert [each is conv.weight for each in bucket.moved()] == [True]

"""A run of elements is the boxes that it is cut into, no more and no less."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_distkit.core.zero.boxes import boxes, views
from lightning_distkit.core.zero.bucket import in_memory_order

SHAPES = st.lists(st.integers(1, 4), max_size=4)


@given(SHAPES, st.data())
def test_boxes_are_the_run_in_its_order_and_few(shape: list[int], data: st.DataObject) -> None:
    elements = torch.arange(prod(shape)).view(shape)
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, elements.numel())] * 2)))
    found = boxes(begin, end, shape)
    values = [
        elements[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in found
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *values]).tolist() == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4), st.data())
def test_runs_in_any_memory_order_are_boxes_of_the_tensor(
    order: list[int], shape: list[int], data: st.DataObject
) -> None:
    whole = torch.randn(shape).permute(order)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, whole.numel()), max_size=3))), whole.numel()]
    flat, again = in_memory_order(whole, whole), torch.full_like(whole, torch.nan)
    for begin, end in pairwise(cuts):
        for offsets, view in views(flat[begin:end], begin, whole):
            again[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))] = view
    assert torch.equal(again, whole)

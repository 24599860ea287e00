"""A nest taken apart is put together again, with the tensors' own memory."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_distkit.core.pipeline.frames import as_bytes, from_bytes, pack

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Held:
    tensor: Tensor
    name: str


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(allow_nan=False)
tensors = st.sampled_from([torch.ones(2), torch.arange(6).view(2, 3), torch.tensor(True), torch.zeros(0, 3)])
nests = st.recursive(
    plain | tensors,
    lambda each: (
        st.lists(each, max_size=3)
        | st.tuples(each, each)
        | st.dictionaries(st.text(max_size=3), each, max_size=3)
        | st.builds(Pair, each, each)
        | st.builds(OrderedDict, st.lists(st.tuples(st.text(max_size=2), each), max_size=2))
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(nests)
def test_any_nest_comes_out_as_it_went_in(nest: Any) -> None:
    parcel = pack(nest)
    assert same(parcel.with_tensors(parcel.tensors), nest)


def test_a_tensor_that_is_there_twice_travels_once_and_is_still_one() -> None:
    x = torch.ones(3)
    parcel = pack({"a": x, "b": [x, Held(x, "x")]})
    assert parcel.tensors == [x]
    nest = parcel.with_tensors([x * 2])
    assert nest["a"] is nest["b"][0] is nest["b"][1].tensor


def test_types_of_plain_values_are_part_of_the_description() -> None:
    x = torch.ones(3)
    assert len({pack([x, value]).description() for value in (1, 1.0, True, "1", None)}) == 5
    assert pack([x, 1]).description() == pack([2 * x, 1]).description()
    assert pack([x, 1]).description() != pack([x.double(), 1]).description()
    assert pack([x, 1]).description() != pack([x[:2], 1]).description()
    assert pack([x, 1]).description() != pack([x.clone().requires_grad_(), 1]).description()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.complex64,
    ],
)
def test_bytes_are_the_tensors_own_memory_where_it_is_contiguous(dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    row = as_bytes(x)
    assert row.data_ptr() == x.data_ptr()
    assert row.nbytes == x.nbytes
    assert torch.equal(from_bytes(row.clone(), x.shape, dtype), x)
    for other in (x.transpose(0, 2), x[:, 1], x[:1].expand(5, 3, 4), x[0, 0, 0]):
        assert torch.equal(from_bytes(as_bytes(other), other.shape, dtype), other)


def test_conjugated_values_are_resolved() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(from_bytes(as_bytes(x.conj()), x.shape, x.dtype), x.conj())
    assert torch.equal(from_bytes(as_bytes(x.conj().imag), x.shape, torch.float32), x.conj().imag)


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(TypeError, match="can be pickled"):
        pack([torch.ones(1), lambda: None])
    with pytest.raises(TypeError, match="must be dense"):
        pack(torch.eye(3).to_sparse())

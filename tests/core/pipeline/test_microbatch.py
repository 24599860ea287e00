"""What is split comes together again, whatever it is."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_distkit.core.pipeline import NoChunk
from lightning_distkit.core.pipeline.microbatch import (
    merge,
    require_tensor,
    row_counts,
    split,
    split_call,
    tensors_in,
    to_device,
)

Pair = namedtuple("Pair", ["a", "b"])
PLAIN = st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.booleans())


def rows(n_rows: int) -> st.SearchStrategy[Tensor]:
    return st.lists(st.integers(1, 3), max_size=2).map(
        lambda dims: torch.arange(float(n_rows * torch.Size(dims).numel())).view(n_rows, *dims)
    )


def nests(n_rows: int) -> st.SearchStrategy[Any]:
    tensors = rows(n_rows)
    leaves = st.one_of(tensors, PLAIN, tensors.map(NoChunk))
    inner = st.recursive(
        leaves,
        lambda nest: st.one_of(
            st.lists(nest, max_size=3),
            st.tuples(nest, nest),
            st.builds(Pair, nest, nest),
            st.dictionaries(st.sampled_from("abc"), nest),
        ),
        max_leaves=6,
    )
    return st.tuples(tensors, inner, inner)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, NoChunk):
        return isinstance(b, NoChunk) and same(a.tensor, b.tensor)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def has_tensor(nest: Any) -> bool:
    return any(True for _ in tensors_in(nest))


def expected_of(nest: Any, n: int) -> Any:
    """What merging the pieces of ``nest`` must give, written down for each kind of value."""
    if isinstance(nest, Tensor):
        return nest
    if isinstance(nest, NoChunk):
        return torch.cat([nest.tensor] * n)
    if not has_tensor(nest):
        return [nest] * n
    if isinstance(nest, dict):
        return {key: expected_of(value, n) for key, value in nest.items()}
    values = [expected_of(value, n) for value in nest]
    return Pair(*values) if isinstance(nest, Pair) else type(nest)(values)


@settings(max_examples=50)
@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_any_nest_that_is_split_and_merged_is_the_same_with_plain_values_collected(
    data: st.DataObject, n_rows: int, chunks: int
) -> None:
    inputs = data.draw(nests(n_rows))
    pieces = split(inputs, chunks)
    assert len(pieces) == min(n_rows, chunks)
    assert same(merge(pieces), expected_of(inputs, len(pieces)))


@given(st.integers(0, 100), st.integers(1, 100))
def test_pieces_differ_by_one_row_at_most_and_the_longer_ones_come_first(n_rows: int, chunks: int) -> None:
    counts = row_counts(n_rows, chunks)
    assert sum(counts) == n_rows
    assert len(counts) == max(1, min(n_rows, chunks))  # and so not [2, 2] for 4 rows in 3 chunks, as Tensor.chunk makes
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


def test_four_rows_in_three_chunks_are_three_micro_batches() -> None:
    assert [len(x) for (x,) in split((torch.zeros(4),), 3)] == [2, 1, 1]


def test_a_batch_without_rows_is_one_micro_batch() -> None:
    ((x, n),) = split((torch.zeros(0, 3), 5), 4)
    assert (x.shape, n) == ((0, 3), 5)


def test_no_chunk_gives_the_tensor_itself_to_every_micro_batch() -> None:
    mask = torch.ones(7)
    assert all(got is mask for _, got in split((torch.zeros(4, 2), NoChunk(mask)), 4))


def test_no_chunk_refuses_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="NoChunk wraps a tensor, got int"):
        NoChunk(3)  # type: ignore[arg-type]


def test_a_tensor_without_dimensions_is_the_same_for_all_and_such_outputs_are_stacked() -> None:
    scale = torch.tensor(3.0)
    pieces = split((torch.zeros(4), scale), 2)
    assert all(got is scale for _, got in pieces)
    assert torch.equal(merge([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))
    assert torch.equal(merge([torch.tensor(1.0)]), torch.tensor([1.0]))  # one micro-batch is no special case


def test_keywords_are_split_as_positions_are() -> None:
    x = torch.arange(4.0)
    first, second = split_call((x,), {"bias": 2 * x, "mode": "sum"}, 2)
    assert same(first, ((x[:2],), {"bias": 2 * x[:2], "mode": "sum"}))
    assert same(second, ((x[2:],), {"bias": 2 * x[2:], "mode": "sum"}))


@pytest.mark.parametrize("inputs", [(), (3, "a", None), ([],), ({"a": 1},), (NoChunk(torch.ones(3)),)])
def test_inputs_without_a_tensor_are_refused(inputs: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="must contain at least one tensor"):
        split(inputs, 2)


def test_different_numbers_of_rows_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"got shapes \(4, 1\), \(3,\): wrap in NoChunk"):
        split((torch.zeros(4, 1), {"mask": torch.zeros(3)}), 2)
    with pytest.raises(ValueError, match=r"got shapes \(\)"):
        split((torch.tensor(1.0),), 2)


def test_different_nests_are_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(TypeError, match=r"\[Tensor\] from the first and \[Tensor, Tensor\] from number 2 of 2"):
        merge([[x], [x, x]])
    with pytest.raises(TypeError, match="a tensor from some where others gave something else"):
        merge([(x, x), (x, None)])


def test_plain_values_may_differ_in_form_between_micro_batches() -> None:
    x = torch.zeros(1)
    assert same(merge([(x, [1]), (x, [1, "b"]), (x, None)]), (torch.zeros(3), [[1], [1, "b"], None]))


def test_outputs_that_do_not_fit_together_are_refused_with_their_shapes() -> None:
    with pytest.raises(ValueError, match=r"got shapes \(1, 2\), \(1, 3\): pad them alike"):
        merge([torch.zeros(1, 2), torch.zeros(1, 3)])


def test_gradients_come_back_whole_and_through_one_node() -> None:
    x = torch.randn(7, 3, requires_grad=True)
    pieces = split((x * 1, None), 3)
    merge([(piece * (n + 1), None) for n, (piece, _) in enumerate(pieces)])[0].sum().backward()
    factors = torch.tensor([1.0, 1, 1, 2, 2, 3, 3]).unsqueeze(1).expand(7, 3)
    assert torch.equal(x.grad, factors)  # type: ignore[arg-type]
    parents = {piece.grad_fn.next_functions[0][0] for piece, _ in pieces}
    assert len(parents) == 1  # not a slice, and so a gradient of the whole, for each


def test_a_layer_may_write_to_its_piece_in_place() -> None:
    x, factor = torch.randn(6, 2), torch.tensor(2.0, requires_grad=True)
    for needs_gradient in (True, False):
        batch = x.clone().requires_grad_(needs_gradient) * 1
        merge([piece.mul_(factor) for (piece,) in split((batch,), 2)]).sum().backward()
    torch.testing.assert_close(factor.grad, 2 * x.sum())


def test_each_micro_batch_has_containers_of_its_own() -> None:
    options = {"x": [1]}
    first, second = split((torch.zeros(2), options), 2)
    first[1]["x"].append(2)
    assert second[1] == options == {"x": [1]}


def test_boundaries_without_a_tensor_are_named() -> None:
    with pytest.raises(TypeError, match=r"what stage 1 hands on must contain at least one tensor, got \[int, str\]"):
        require_tensor([1, "a"], "what stage 1 hands on")


def test_only_a_copy_to_the_cpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, non_blocking: asked.append((device.type, non_blocking)))
    for kind in ("cpu", "cuda", "meta"):
        to_device((torch.zeros(2), "a"), torch.device(kind))
    assert asked == [("cpu", False), ("cuda", True), ("meta", True)]


def test_tensors_anywhere_in_a_nest_change_device_and_others_stay() -> None:
    x = torch.zeros(2)
    got = to_device((x, {"a": [x, 3]}), torch.device("meta"))
    assert (got[0].device.type, got[1]["a"][0].device.type, got[1]["a"][1]) == ("meta", "meta", 3)
    assert to_device((x,), torch.device("cpu"))[0] is x

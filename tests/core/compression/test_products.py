import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_distkit.core.compression.products import products_


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=6),
    add=st.booleans(),
    gap=st.integers(0, 2),
)
def test_a_batch_gives_what_a_loop_gives(shapes: list[tuple[int, int, int]], add: bool, gap: int) -> None:
    flat = torch.randn(200)
    lefts, rights, outs, begin = [], [], [], 0
    for r, n, m in shapes:
        rights.append(flat[begin : begin + n * m].view(n, m))
        begin += n * m + gap
        lefts.append(torch.randn(r, n))
        outs.append(torch.ones(r, m))
    expected = [left @ right + (1.0 if add else 0.0) for left, right in zip(lefts, rights, strict=True)]
    products_(outs, lefts, rights, add=add, batched=True)
    torch.testing.assert_close(outs, expected)


def test_neighbours_of_one_shape_are_one_batch_without_a_copy() -> None:
    outs, lefts, rights = torch.zeros(3, 2, 5), torch.randn(3, 2, 4), torch.randn(3, 4, 5)
    products_(list(outs), list(lefts), list(rights), batched=True)
    torch.testing.assert_close(outs, lefts @ rights)

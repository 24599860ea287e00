from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_distkit.core.compression.products import product_, products_


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    gaps=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    add=st.booleans(),
)
def test_a_batch_gives_what_a_loop_gives(shape: tuple[int, int, int], gaps: list[int], add: bool) -> None:
    r, n, m = shape
    flat, lefts, rights, begin = torch.randn(200), [], [], 0
    for gap in gaps:
        rights.append(flat[begin : begin + n * m].view(n, m))
        begin += n * m + gap
        lefts.append(torch.randn(r, n))
    outs = [torch.ones(r, m) for _ in gaps]
    expected = [left @ right + (1.0 if add else 0.0) for left, right in zip(lefts, rights, strict=True)]
    products_(outs, lefts, rights, add=add)
    torch.testing.assert_close(outs, expected)


@pytest.mark.parametrize("add", [False, True])
def test_neighbours_are_one_batch_without_a_copy(add: bool) -> None:
    outs, lefts, rights = torch.zeros(3, 2, 5), torch.randn(3, 2, 4), torch.randn(3, 4, 5)
    with patch("torch.mm", side_effect=AssertionError), patch("torch.Tensor.addmm_", side_effect=AssertionError):
        products_(list(outs), list(lefts), list(rights), add=add)
    torch.testing.assert_close(outs, lefts @ rights)


def test_a_bias_between_two_matrices_is_no_obstacle() -> None:
    bucket = torch.randn(3 * 25)
    matrices = [bucket[i * 25 : i * 25 + 20].view(4, 5) for i in range(3)]  # each followed by a vector of five
    outs, lefts = torch.zeros(3, 2, 5), torch.randn(3, 2, 4)
    with patch("torch.mm", side_effect=AssertionError):
        products_(list(outs), list(lefts), matrices)
    torch.testing.assert_close(list(outs), [left @ right for left, right in zip(lefts, matrices, strict=True)])


@pytest.mark.parametrize("sign", [-1, 0, 1])
@pytest.mark.parametrize("inner", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(300, 1024), (512, 600), (7, 9)])
def test_large_and_small_products_with_few_columns(shape: tuple[int, int], inner: int, sign: int) -> None:
    n, m = shape
    out, left, right = torch.randn(n, m), torch.randn(inner, n).mT, torch.randn(inner, m)
    expected = sign * left @ right + out if sign else left @ right
    if sign == 0:
        out.fill_(torch.nan)  # nothing of it may be read
    product_(out, left, right, sign=sign)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

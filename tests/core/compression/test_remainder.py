"""An error that is subtracted later is the same error."""

import pytest
import torch

from lightning_distkit.core.compression.remainder import Remainder, multiply_


def test_factors_count_in_all_that_is_done_with_the_error() -> None:
    whole, p, q = torch.randn(5, 7), torch.randn(2, 5), torch.randn(2, 7)
    error, remainder = whole - p.mT @ q, Remainder(whole.clone(), p, q)
    torch.testing.assert_close(remainder.value(), error)
    torch.testing.assert_close(remainder.to(whole.device).value(), error)
    assert torch.equal(remainder.whole, whole)  # only read so far

    left, before = torch.randn(2, 7), torch.randn(2, 5)
    out = before.clone()
    multiply_([out], [left], [remainder], transposed=True, add=True)
    torch.testing.assert_close(out, before + left @ error.mT)

    left, out = torch.randn(3, 5), torch.full((3, 7), torch.nan)
    multiply_([out], [left], [remainder])
    torch.testing.assert_close(out, left @ error)

    torch.testing.assert_close(remainder.settle_(), error)
    assert remainder.p is None


@pytest.mark.parametrize("r", [1, 3, 20])
def test_any_number_of_products_is_subtracted(r: int) -> None:
    n, m = 30, 40
    error = torch.zeros(n, m, dtype=torch.float64)
    remainder = Remainder(error.clone())
    for _ in range(50):
        matrix, p, q = (torch.randn(*shape, dtype=torch.float64) for shape in ((n, m), (r, n), (r, m)))
        remainder.add_(matrix)
        remainder.subtract_(p, q)
        error += matrix - p.mT @ q
        assert remainder.p is not None
        assert remainder.p.shape[0] < 16 + r  # what is kept does not grow
        torch.testing.assert_close(remainder.value(), error)

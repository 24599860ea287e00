import torch

from lightning_distkit.core.compression.remainder import Remainder, add_products_


def test_the_error_is_the_whole_less_the_factors_product() -> None:
    whole, p, q = torch.randn(5, 4), torch.randn(2, 5), torch.randn(2, 4)
    expected = whole - p.mT @ q
    error = Remainder(whole.clone(), p, q)
    torch.testing.assert_close(error.value(), expected)
    assert torch.equal(error.whole, whole)  # only read
    torch.testing.assert_close(error.settle_(), expected)
    torch.testing.assert_close(error.settle_(), expected)  # once is enough
    torch.testing.assert_close(error.value(), expected)


def test_products_with_the_error_do_not_need_it_subtracted() -> None:
    errors = [Remainder(torch.randn(5, 4), torch.randn(2, 5), torch.randn(2, 4)), Remainder(torch.randn(5, 4))]
    lefts, outs = [torch.randn(3, 4) for _ in errors], [torch.ones(3, 5) for _ in errors]
    expected = [1 + left @ error.value().mT for left, error in zip(lefts, errors, strict=True)]
    add_products_(outs, lefts, errors)
    torch.testing.assert_close(outs, expected)

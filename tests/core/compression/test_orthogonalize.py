import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_distkit.core.compression.orthogonalize import orthonormalized


def off(rows: torch.Tensor) -> float:
    """How far the rows are from orthonormal."""
    return float((rows @ rows.mT - torch.eye(rows.shape[0], dtype=rows.dtype)).abs().max())


@given(r=st.integers(1, 8), more=st.integers(0, 40), condition=st.floats(0, 12), seed=st.integers(0, 1000))
def test_rows_are_orthonormal_however_ill_conditioned(r: int, more: int, condition: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -condition, r).unsqueeze(1)
    rows = torch.randn(r, r, generator=random) @ (scales * torch.randn(r, r + more, generator=random))
    [rows] = orthonormalized([rows])
    assert off(rows) < 1e-5


@pytest.mark.parametrize("r", [1, 2, 3, 8])
def test_the_space_of_the_rows_stays(r: int) -> None:
    rows = torch.randn(r, 50, dtype=torch.float64)
    [result] = orthonormalized([rows])
    torch.testing.assert_close(rows @ result.mT @ result, rows)


def test_different_shapes_at_once_as_one_by_one() -> None:
    factors = [torch.randn(shape) for shape in ((2, 9), (3, 9), (2, 9), (1, 4))]
    together = orthonormalized(factors)
    torch.testing.assert_close(together, [orthonormalized([factor])[0] for factor in factors])


@pytest.mark.parametrize("epsilon", [0, 1e-8])
@pytest.mark.parametrize("r", [1, 4])
def test_zeros_give_no_nan(r: int, epsilon: float) -> None:
    rows = torch.zeros(r, 10)
    [rows] = orthonormalized([rows], epsilon)
    assert rows.isfinite().all()


@pytest.mark.parametrize("scale", [1e-38, 1e-24, 1e24, 1e37])
@pytest.mark.parametrize("r", [1, 2, 4])
def test_no_scale_is_too_small_or_too_large(r: int, scale: float) -> None:
    rows = torch.randn(r, 50) * scale
    [rows] = orthonormalized([rows])
    assert off(rows) < 1e-5


def test_equal_rows_are_replaced_by_orthogonal_ones() -> None:
    rows = torch.ones(3, 10)
    [rows] = orthonormalized([rows])
    assert off(rows) < 1e-6


def test_epsilon_is_added_to_the_norm() -> None:
    rows = torch.tensor([[3.0, 4.0]])
    [rows] = orthonormalized([rows], epsilon=5.0)
    torch.testing.assert_close(rows, torch.tensor([[0.3, 0.4]]))

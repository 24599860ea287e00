"""What every test has: threads and seeds as in a rank, so that a test alone and a test on ranks count alike."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)

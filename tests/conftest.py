"""What every test has: threads and seeds as in a rank, so that a test alone and a test on ranks count alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("no clock", deadline=None)  # a busy machine is not a fault
settings.load_profile("no clock")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)

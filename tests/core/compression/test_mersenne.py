import numpy
import pytest

from lightning_distkit.core.compression.mersenne import SeedSequence


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1])
def test_draws_what_numpy_draws(seed: int) -> None:
    expected = numpy.random.RandomState(seed)
    ours = SeedSequence(seed)
    assert [ours.draw() for _ in range(1000)] == [expected.randint(1_000_000_000) for _ in range(1000)]


def test_continues_where_it_stopped() -> None:
    whole, first = SeedSequence(7), SeedSequence(7)
    expected = [whole.draw() for _ in range(20)]
    [first.draw() for _ in range(12)]
    assert [SeedSequence(7, first.n_drawn).draw()] == expected[12:13]

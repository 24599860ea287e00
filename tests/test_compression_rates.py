"""The paper's compression rates, exactly."""

from __future__ import annotations

import math

import pytest

from benchmarks.compression_rates import MODELS, PAPER, Line, lines
from tests.ranks import run_ranks


def rates(model: str, r: int) -> list[Line]:
    return list(lines(model, r))


@pytest.mark.parametrize("model", MODELS)
def test_at_r_1_every_rate_is_the_papers(model: str) -> None:
    [of_model] = run_ranks(1, rates, model, 1)
    by_layer = {line.layer: line for line in of_model}
    for layer, rate in PAPER[model].items():
        assert math.floor(by_layer[layer].rate + 0.5) == rate, layer
    assert by_layer["vectors"].rate == 1


@pytest.mark.parametrize("model", MODELS)
def test_at_more_columns_a_layer_is_smaller_in_proportion_or_whole(model: str) -> None:
    [one], [four] = run_ranks(1, rates, model, 1), run_ranks(1, rates, model, 4)
    whole = []
    for first, line in zip(one, four, strict=True):
        if line.layer in ("vectors", "total"):
            continue
        if line.nbytes_sent == line.nbytes_whole:
            whole.append(line.layer)
            n, m = line.shape[0], math.prod(line.shape[1:])
            assert 2 * 4 * (n + m) >= n * m  # the factors would not save half
        else:
            assert line.nbytes_sent == 4 * first.nbytes_sent
    assert whole == {"resnet18": [], "lstm": []}[model]

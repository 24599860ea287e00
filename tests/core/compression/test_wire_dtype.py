"""Factors that travel in 16 bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit.core.compression import HOOKS
from tests.core.compression.bodies import MANY_BUCKETS, distance, flat, mlp, own_gradients, powersgd, train
from tests.ranks import run_ranks


def in_16_bits(hook: str, wire_dtype: str) -> tuple[Tensor, Tensor, float]:
    results = []
    for dtype in (wire_dtype, None):
        net = mlp(20, 30, 30, 10)
        model, state = powersgd(net, HOOKS[hook].hook, MANY_BUCKETS, wire_dtype=dtype, matrix_approximation_rank=2)
        train(model, 3, 20)
        gradients, errors = [], []
        for step in range(6):
            with own_gradients(net) as gradient:
                train(model, 1, 20, seed=step)
            gradients.append({p: g - p.grad for p, g in gradient.items()})
            errors.append(state.error_dict)
        results.append(flat(net))
        if dtype is not None:  # what was sent and what is remembered are all that there was, rounding included
            left = [distance(errors[i][p], errors[i - 1][p] + gradients[i][p]) for i in range(1, 6) for p in errors[i]]
    return results[0], results[1], max(left)


@pytest.mark.parametrize(("wire_dtype", "precision"), [("bf16", 0.1), ("fp16", 0.02)])
@pytest.mark.parametrize("hook", ["powersgd", "acp_sgd"])
def test_rounding_is_fed_back_and_ranks_stay_equal(hook: str, wire_dtype: str, precision: float) -> None:
    (first, single, lost), (second, _, also_lost) = run_ranks(2, in_16_bits, hook, wire_dtype)
    assert torch.equal(first, second)
    assert not torch.equal(first, single)
    assert distance(first, single) < precision
    assert max(lost, also_lost) < 1e-6


def rest_is_exact() -> bool:
    """Vectors travel in their own precision."""
    model, _ = powersgd(mlp(20, 30, 10), wire_dtype="bf16")
    train(model, 3, 20)
    bias = model.module[0].bias
    own: list[Tensor] = []
    handle = bias.register_hook(lambda g: own.append(g.clone()))
    train(model, 1, 20)
    handle.remove()
    each = [torch.empty_like(bias) for _ in range(dist.get_world_size())]
    dist.all_gather(each, own[0])
    return torch.equal(bias.grad, sum(g / 2 for g in each))


def test_what_is_not_compressed_keeps_its_precision() -> None:
    assert run_ranks(2, rest_is_exact) == [True, True]

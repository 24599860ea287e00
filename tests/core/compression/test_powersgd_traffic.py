"""What PowerSGD and ACP-SGD send, in how many messages, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_distkit.core.compression import HOOKS, PowerSGDState, powerSGD_hook
from tests.core.compression.bodies import MANY_BUCKETS, mlp, powersgd, train
from tests.ranks import run_ranks


def counted(hook: str, wire_dtype: str | None) -> tuple[list[int], list[int]]:
    net = mlp(100, 200, 200, 50)
    arguments = {"matrix_approximation_rank": 2, "wire_dtype": wire_dtype}
    model, state = powersgd(net, HOOKS[hook].hook, MANY_BUCKETS, **arguments)
    sent = []
    train(model, 4, 100, before_step=lambda step: sent.append(state.ledger.last_step))
    return [counts.nbytes for counts in sent], [counts.n_messages for counts in sent]


MATRICES = [(200, 100), (200, 200), (50, 200)]
VECTORS = 200 + 200 + 50


@pytest.mark.parametrize(("wire_dtype", "nbytes_of_a_number"), [(None, 4), ("bf16", 2)])
def test_bytes_and_messages_are_those_of_the_formula(wire_dtype: str | None, nbytes_of_a_number: int) -> None:
    whole = sum(n * m for n, m in MATRICES) + VECTORS
    factors = nbytes_of_a_number * sum(2 * (n + m) for n, m in MATRICES) + 4 * VECTORS
    for nbytes, n_messages in run_ranks(2, counted, "powersgd", wire_dtype):
        assert nbytes[0] == 4 * whole  # 2 (W - 1) / W is 1 for two ranks
        assert nbytes[2:] == [factors] * 2
        buckets = n_messages[1]
        assert buckets > 2
        # The second factors of all buckets share one. Whole vectors keep their dtype and so need another message.
        assert n_messages[2] >= buckets + 1
        assert n_messages[2] == buckets + 1 or wire_dtype


def test_acp_sgd_sends_one_factor_a_step_in_one_message_a_bucket() -> None:
    p, q = (4 * (sum(2 * side for side in sides) + VECTORS) for sides in zip(*MATRICES, strict=True))
    for nbytes, n_messages in run_ranks(2, counted, "acp_sgd", None):
        assert nbytes[2:] == [p, q]
        assert n_messages[2:] == n_messages[1:2] * 2


def overlap() -> bool:
    """Whether bucket 0's first message was sent before the last bucket came."""
    sent: list[int] = []

    def watching(state: PowerSGDState, bucket: dist.GradBucket) -> Any:
        if bucket.index() == 0:
            sent.clear()
        sent.append(state.ledger.total.n_messages)
        return powerSGD_hook(state, bucket)

    model, _ = powersgd(mlp(100, 200, 200, 50), watching, MANY_BUCKETS)
    train(model, 4, 100)
    return len(sent) > 2 and [count - sent[0] for count in sent] == list(range(len(sent)))


def test_messages_travel_while_backward_goes_on() -> None:
    assert run_ranks(2, overlap) == [True, True]

"""A skip tensor goes from the stage that stashes it straight to the one that pops it, and its gradient back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES
from lightning_distkit.core.pipeline.dist import DistributedPipe
from lightning_distkit.core.pipeline.skip import Namespace, isolate, pop, skippable, stash
from tests.core.pipeline.models import SCHEDULES_AND_STAGES, assert_same_gradients, even
from tests.ranks import run_ranks


@skippable(stash=["wide", "none"])
class Down(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.wide = nn.Linear(width, 6), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Any:
        yield stash("wide", self.wide(x))
        yield stash("none", None)
        return self.linear(x)


@skippable(pop=["wide", "none"])
class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.wide = nn.Linear(6, 6), nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Any:
        wide = yield pop("wide")
        assert (yield pop("none")) is None
        return self.linear(x) + self.wide(wide)


def u_net() -> nn.Sequential:
    """Seven layers; the first and the second stash what the last and the last but one pop, and two neighbours."""
    torch.manual_seed(0)
    outer, inner, near = Namespace(), Namespace(), Namespace()
    return nn.Sequential(
        isolate(Down(), outer),
        isolate(Down(), inner),
        isolate(Down(), near),
        isolate(Up(), near),
        nn.Tanh(),
        isolate(Up(), inner),
        isolate(Up(), outer),
    )


def skips(n_ranks: int) -> None:
    for schedule, n in SCHEDULES_AND_STAGES:
        if n_ranks * n > 7:
            continue
        for mode in CHECKPOINT_MODES:
            module = u_net()
            whole = copy.deepcopy(module)
            pipe = DistributedPipe(
                module, 3, mode, balance=even(7, n_ranks * n), schedule=schedule, n_stages_per_rank=n, timeout=20
            )
            for rows in (6, 2, 5):
                x = torch.randn(rows, 6)
                pipe.zero_grad()
                whole.zero_grad()
                expected = whole(x)
                expected.square().mean().backward()
                out = pipe(x)
                torch.testing.assert_close(out, expected)
                out.square().mean().backward()
                assert_same_gradients(pipe, whole)
                pipe.zero_grad()
                pipe.loss(x, loss=lambda out: out.square().mean()).backward()
                assert_same_gradients(pipe, whole)
                with torch.no_grad():
                    torch.testing.assert_close(pipe.eval()(x), expected)
                pipe.train()


def test_skips_between_any_stages_train_in_all_checkpoint_modes_and_schedules() -> None:
    run_ranks(2, skips, 2)


def test_skips_between_three_stages_train_in_all_checkpoint_modes_and_schedules() -> None:
    run_ranks(3, skips, 3)


def sent_by_the_middle() -> dict[str, tuple[int, int, int]]:
    """Payload bytes of a call and its backward, and the number of messages, after one that made all known."""
    found = {}
    for mode in CHECKPOINT_MODES:
        torch.manual_seed(0)
        pipe = DistributedPipe(nn.Sequential(Down(), nn.Linear(6, 6), Up()), 4, mode, balance=[1, 1, 1])
        for _ in range(2):
            before = pipe.ledger.total
            pipe(torch.randn(64, 6)).square().mean().backward()
        counts = pipe.ledger.total
        found[mode] = (counts.nbytes - before.nbytes, counts.n_messages - before.n_messages, pipe.rank)
    return found


def test_the_middle_rank_carries_none_of_a_skips_bytes() -> None:
    first, middle, last = run_ranks(3, sent_by_the_middle)
    activations, skip, headers = 64 * 6 * 4, 64 * 64 * 4, 64
    for mode in CHECKPOINT_MODES:
        # Four frames on, four back; each a header and a payload.
        assert middle[mode][0] == 2 * activations + 8 * headers
        # The first: activations and skips, then the word at the end to both others.
        assert first[mode][0] == activations + skip + 8 * headers + 2 * headers
        # The last: outputs to both others, gradients to the middle, and those of skips to the first.
        assert last[mode][0] == 2 * activations + activations + skip + (8 + 8) * headers

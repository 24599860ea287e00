"""The arithmetic of docs/which.md: its code prints what stands below it; what it counts is what is sent and held."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.core.compression import HOOKS, attach
from lightning_distkit.core.pipeline import DistributedPipe
from lightning_distkit.core.zero import DTensorOptimizer, ZeroOptimizer, shard_gradients, shard_parameters
from tests.ranks import run_ranks

WHICH = Path(__file__).parents[1] / "docs" / "which.md"


def code_and_output() -> tuple[str, str]:
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", WHICH.read_text(), re.DOTALL)
    assert found is not None
    return found[1], found[2]


def test_the_code_prints_what_stands_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = code_and_output()
    exec(code, {})
    assert capsys.readouterr().out == output


def small(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def sent_by_ddp(hook: str, **arguments: Any) -> float:
    ddp = DistributedDataParallel(small())
    state, function = HOOKS[hook](None, **arguments)
    attach(ddp, state, function)
    for _ in range(6):
        ddp(torch.randn(2, 64)).sum().backward()
    return state.ledger.last_step.nbytes


def measured() -> dict[str, float]:
    """Bytes that this rank sent in a step."""
    found: dict[str, float] = {"ddp": sent_by_ddp("allreduce")}
    compressed = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
    for name in ("powersgd", "acp_sgd"):
        found[name] = sent_by_ddp(name, **compressed)
    for stage in (1, 2, 3):
        module = small()
        if stage == 3:
            module = shard_parameters(module)
            optimizer: Any = DTensorOptimizer(torch.optim.AdamW(module.parameters()), module)
        else:
            optimizer = ZeroOptimizer(torch.optim.AdamW(module.parameters()))
            optimizer = shard_gradients(optimizer) if stage == 2 else optimizer
        for _ in range(3):
            module(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"zero_stage_{stage}"] = optimizer.group.ledger.last_step.nbytes
    for outputs in ("all", "last"):
        pipe = DistributedPipe(small(), 4, outputs=outputs)
        for _ in range(3):
            pipe(torch.randn(256, 64)).sum().backward()
        found[f"pipe, {outputs}"] = pipe.ledger.last_step.nbytes
    return found


def test_what_it_counts_is_what_ranks_send() -> None:
    names: dict[str, Any] = {}
    exec(code_and_output()[0].replace("\nreport()\n", "\n"), names)
    sent: Callable[..., float] = names["sent"]
    first, second = run_ranks(2, measured)
    module = small()
    for rank in (first, second):
        assert rank["ddp"] == sent(module)
        assert rank["powersgd"] == sent(module, 4)
        assert rank["acp_sgd"] == sent(module, 4, factors=1)
        for stage, factor in ((1, 1.0), (2, 1.0), (3, 1.5)):  # and which parameters have a gradient
            assert rank[f"zero_stage_{stage}"] == pytest.approx(factor * sent(module), abs=100)
    activations, headers = 256 * 64 * 4, 4 * 64
    assert first["pipe, last"] == pytest.approx(activations, abs=4 * headers)
    assert second["pipe, last"] == pytest.approx(activations, abs=4 * headers)
    assert second["pipe, all"] == pytest.approx(2 * activations, abs=4 * headers)

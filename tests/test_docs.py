"""The Python in README and docs runs: each block on two ranks, with what a reader would have made before."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_distkit.core.ledger import Ledger
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def what_a_reader_has() -> dict[str, Any]:
    """The names that blocks take as given."""
    import lightning.pytorch as pl  # slow, and only blocks need it

    import accelerate_plugins
    import lightning_distkit
    from lightning_distkit import metrics
    from lightning_distkit.core.compression import bf16_compress_wrapper, noop_hook

    class Trainer(pl.Trainer):
        def fit(self, *_: Any, **__: Any) -> None:
            """What blocks show is around it."""

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    inputs, targets = torch.randn(16, 8), torch.randn(16, 8)
    given = {each: getattr(lightning_distkit, each) for each in lightning_distkit.__all__}
    given |= {each: getattr(metrics, each) for each in metrics.__all__}
    given |= {each: getattr(accelerate_plugins, each) for each in accelerate_plugins.__all__}
    return given | {
        "pl": MagicMock(Trainer=Trainer),
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "model": model,
        "layers": [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)],
        "data": [inputs],
        "loader": DataLoader(TensorDataset(inputs, targets), batch_size=4),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "inputs": inputs,
        "targets": targets,
        "criterion": nn.functional.mse_loss,
        "ddp_model": DistributedDataParallel(nn.Linear(8, 8)),
        "my_hook": noop_hook,
        "my_state": None,
        "bf16_compress_wrapper": bf16_compress_wrapper,
        "MyTransformerBlock": nn.Linear,
        "TransformerBlock": nn.Linear,
        "MetricCollection": MagicMock(),
        "self": MagicMock(),
        "trainer": MagicMock(),
    }


def run_blocks(page: str, folder: str) -> int:
    """Blocks follow on each other, so that one may use what an earlier one has made."""
    os.chdir(folder)
    known = what_a_reader_has()
    with patch.object(known["PowerSGDDDPStrategy"], "ledger", Ledger()):  # there is none before a fit
        for block in blocks(page):
            known["loss"] = known["criterion"](known["model"](known["inputs"]), known["targets"])
            exec(compile(block, page, "exec"), known)
    return len(blocks(page))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_each_block_of_python_runs(page: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert min(run_ranks(2, run_blocks, page, folder)) > 0


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To a file that is there, and to one of its headings."""
    for path, heading in LINK.findall((ROOT / page).read_text()):
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {path}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading[1:] in anchors, f"{page}: {path}{heading}"

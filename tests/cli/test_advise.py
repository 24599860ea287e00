"""The advice: what it says of given measurements, and that it can be had with torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_distkit
from lightning_distkit.cli.advise import DDP, NOTHING, Candidate, Trial, verdict

POWERSGD, ACP = Candidate("powersgd", 4), Candidate("acp_sgd", 1)


def said(ddp: float, free: float, powersgd: float, acp: float) -> str:
    trials = [
        Trial(DDP, ddp, 100.0, 0.0),
        Trial(NOTHING, free, 0.0, 1.0),
        Trial(POWERSGD, powersgd, 10.0, 0.5),
        Trial(ACP, acp, 1.0, 0.9),
    ]
    return " ".join(verdict(trials))


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ((100, 91, 50, 50), "Not worth it: without any communication a step would take 9% less time."),
        ((100, 110, 50, 50), "Not worth it: without any communication a step would take 0% less time."),
        ((100, 80, 97, 99), "20% less time. Not worth it: powersgd, r = 4, the fastest, would make a step 1.0"),
        ((100, 60, 70, 75), "1.4 times as fast and leave out 50% of the gradients; under 1.5 times that does not pay."),
        ((100, 20, 40, 25), "would take 80% less time. Take acp_sgd, r = 1: 4.0 times faster than plain ddp."),
        (
            (100, 20, 26, 25),
            "powersgd, r = 4 takes 4% longer and leaves out less: 50% of the gradients",
        ),
    ],
)
def test_the_verdict(times: tuple[float, float, float, float], says: str) -> None:
    assert says in said(*times)


def test_a_hook_that_only_rounds_is_worth_less_of_a_gain() -> None:
    rounding = Trial(Candidate("fp16"), 80.0, 50.0, 1e-4)
    trials = [Trial(DDP, 100.0, 100.0, 0.0), Trial(NOTHING, 60.0, 0.0, 1.0), Trial(ACP, 75.0, 1.0, 0.9), rounding]
    assert verdict(trials)[1] == "Take fp16: 1.2 times faster than plain ddp."


def test_nothing_gentler_is_named_where_it_costs_much() -> None:
    assert "leaves out less" not in said(100, 20, 40, 25)


MODELS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def net():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

def batch():
    return torch.randn(8, 64)

def with_loss():
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    return net(), lambda module: nn.functional.mse_loss(module(x), y)

def module():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return {"loss": loss}

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(16, 64)), batch_size=8)

    return Module()

def nothing():
    return None
"""


def run(folder: Path, *arguments: str, n_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "models.py").write_text(MODELS)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={n_ranks}"] if n_ranks else []
    root = Path(lightning_distkit.__file__).parent.parent
    return subprocess.run(
        [sys.executable, *launcher, "-m", "lightning_distkit.cli", "advise", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        },
    )


FEW = ("--steps=2", "--rounds=1")


@pytest.mark.parametrize(
    "arguments",
    [("models:with_loss",), ("models.py:net", "--batch=models.py:batch"), ("models.module",)],
    ids=["a loss", "a batch", "a LightningModule"],
)
def test_it_prints_a_line_for_each_hook_and_a_verdict(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, *arguments, *FEW, "--json_lines=true")
    assert done.returncode == 0, done.stderr
    first, *trials, last = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert first["ranks"] == 2
    assert first["nbytes_of_gradients"] == 4 * (2 * 64 * 128 + 128 + 64)
    assert first["link"]["bandwidth"] > 1e6
    assert last["verdict"]
    by_name = {(each["candidate"]["hook"], each["candidate"]["r"]): each for each in trials}
    assert by_name.keys() == {
        *(("ddp", 0), ("noop", 0), ("fp16", 0), ("acp_sgd", 1), ("acp_sgd", 4)),
        *(("powersgd", r) for r in (1, 2, 4, 8)),
    }
    assert by_name["ddp", 0]["nbytes"] == first["nbytes_of_gradients"]
    assert by_name["powersgd", 2]["nbytes"] == 4 * (2 * 2 * (64 + 128) + 128 + 64)
    assert by_name["powersgd", 8]["relative_error"] < by_name["powersgd", 1]["relative_error"] < 1


def test_it_prints_a_table(tmp_path: Path) -> None:
    done = run(tmp_path, "models:with_loss", *FEW)
    assert done.returncode == 0, done.stderr
    for word in ("Gbit/s", "no communication", "acp_sgd", "left out", "0.02 million trained parameters"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "n_ranks", "says"),
    [
        (("models:with_loss",), 0, "launch it as your training is, torchrun --nproc-per-node=2 -m"),
        (("models:missing",), 2, 'must be "package.module:name" or "file.py:name" of a callable'),
        (("nowhere.py:net",), 2, 'must be "package.module:name" or "file.py:name" of a callable'),
        (("models:net",), 2, "an nn.Module (then --batch must say where its inputs come from)"),
        (("models:nothing",), 2, "must return a LightningModule with train_dataloader()"),
        (("models:MODELS",), 2, "of a callable"),
        (("models:with_loss", "--steps=0"), 2, "steps must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_tried_is_said(arguments: tuple[str, ...], n_ranks: int, says: str, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments, n_ranks=n_ranks)
    assert done.returncode != 0
    assert says in done.stderr

"""What compression costs in quality: validation loss against bytes sent, for each hook and r.

    python -m benchmarks.powersgd_quality --picture docs/powersgd_quality.png  # needs the extra "bench"

Two ranks train the demo's small GPT on Python's own sources and a perceptron on scikit-learn's digits, with each hook
alike: the same weights, batches, number of steps and learning rates, the first 10 % of the steps whole. One JSON line a
training, then the tables as Markdown. Bytes are those of one rank, by the ledger. On the text plain DDP is also trained
for fewer steps, each with a whole learning-rate schedule: so it is seen in how many it ends where a hook does.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import task

from benchmarks.hosts import Host, one_host, run_on
from lightning_distkit.core.compression import HOOKS, attach, ledger_of

RANKS = 2
SHORTER = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # shares of the steps, of plain DDP on the text
WARM_UP = 0.1  # share of the steps that are not compressed
N_VALIDATIONS = 8


@dataclass(frozen=True)
class Arm:
    """One of those compared; `r` is its matrix_approximation_rank, 0 if it has none."""

    hook: str
    r: int = 0

    def __str__(self) -> str:
        return f"{self.hook}, r = {self.r}" if self.r else {"allreduce": "ddp"}.get(self.hook, self.hook)


ARMS = [
    *(Arm("allreduce"), Arm("fp16")),
    *(Arm(hook, r) for hook in ("powersgd", "acp_sgd") for r in (1, 2, 4, 8)),
]


@dataclass(frozen=True)
class Curve:
    """One training: bytes that a rank had sent and the validation loss, from time to time."""

    nbytes: list[int]
    losses: list[float]


class Job(Protocol):
    """A model with its data, optimizer and loss; what a batch is, is its own affair."""

    n_steps: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    def batches(self) -> Iterator[Any]: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    def validation(self) -> list[Any]: ...


class Text:
    """The demo: a small GPT reads Python."""

    def __init__(self, n_steps: int, seed: int) -> None:
        self.n_steps = n_steps
        self.train, self.held_out = task.read_rows()
        self.seed = seed
        self.model = task.GPT()
        self.optimizer, self.schedule = task.make_optimizer(self.model, n_steps)

    def batches(self) -> Iterator[Any]:
        return _shared_out(len(self.train), task.BATCH, self.seed, lambda rows: self.train[rows])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return task.loss_of(model, batch)

    def validation(self) -> list[Any]:
        return list(self.held_out.split(32))


class Digits:
    """1797 images of 8 x 8; a perceptron of three layers."""

    def __init__(self, n_steps: int, seed: int) -> None:
        from sklearn.datasets import load_digits

        self.n_steps = n_steps
        images, classes = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes)
        held_out = torch.arange(len(x)) % 5 == 4
        self.x, self.y, self.held_out = x[~held_out], y[~held_out], [(x[held_out], y[held_out])]
        self.seed = seed
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, n_steps)

    def batches(self) -> Iterator[Any]:
        return _shared_out(len(self.x), 32, self.seed, lambda rows: (self.x[rows], self.y[rows]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def validation(self) -> list[Any]:
        return self.held_out


JOBS: dict[str, Callable[[int, int], Job]] = {"text": Text, "digits": Digits}
STEPS = {"text": task.STEPS, "digits": 400}


def _shared_out(n_rows: int, batch: int, seed: int, take: Callable[[Tensor], Any]) -> Iterator[Any]:
    """Each rank's batches, shuffled alike on all and anew in every epoch."""
    random = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randperm(n_rows, generator=random)[dist.get_rank() :: dist.get_world_size()]
        yield from map(take, rows.split(batch)[: len(rows) // batch])


def train(host: Host, name: str, arm: Arm, n_steps: int, seed: int) -> Curve:
    """On every rank; the losses are those of rank 0, whose weights all have."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    job = JOBS[name](n_steps, seed)
    ddp = DistributedDataParallel(job.model)
    start = max(2, int(WARM_UP * n_steps))
    arguments = {"matrix_approximation_rank": arm.r, "start_powerSGD_iter": start} if arm.r else {}
    state, hook = HOOKS[arm.hook](None, **arguments)
    attach(ddp, state, hook)
    batches, curve = job.batches(), Curve([], [])
    for step in range(1, n_steps + 1):
        job.optimizer.zero_grad()
        job.loss(ddp, next(batches)).backward()
        job.optimizer.step()
        job.schedule.step()
        if step % max(1, n_steps // N_VALIDATIONS) == 0 or step == n_steps:
            curve.nbytes.append(ledger_of(state).total.nbytes)
            with torch.no_grad():
                curve.losses.append(statistics.fmean(float(job.loss(job.model, each)) for each in job.validation()))
    return curve


def share_of_steps(loss: float, ends: dict[float, float]) -> float:
    """In what share of the steps plain DDP ends with that loss: between the shares that were trained, a straight line.

    Args:
        ends: DDP's loss at the end, of each share.
    """
    known = sorted((end, share) for share, end in ends.items())
    for (low, longer), (high, shorter) in pairwise(known):
        if low <= loss <= high:
            return longer + (shorter - longer) * (loss - low) / (high - low)
    return known[0][1] if loss < known[0][0] else known[-1][1]


def table(results: dict[str, dict[Arm, list[Curve]]], shorter: dict[str, dict[float, float]]) -> str:
    """One Markdown table a job: bytes, and the loss at the end, the mean over seeds and their range."""
    tables = []
    for name, of_job in results.items():
        rows = [["hook", "r", "MB sent", "x fewer", "validation loss", "worse than ddp"], ["---", "---", *["---:"] * 4]]
        if shorter.get(name):
            rows[0].append("as ddp in so many of the steps")
            rows[1].append("---:")
        ddp = of_job[ARMS[0]]
        exact = statistics.fmean(curve.losses[-1] for curve in ddp)
        for arm, curves in of_job.items():
            ends = [curve.losses[-1] for curve in curves]
            spread = f" ({min(ends):.3f} to {max(ends):.3f})" if len(ends) > 1 else ""
            mean, sent = statistics.fmean(ends), curves[0].nbytes[-1]
            row = [str(arm).split(",")[0], str(arm.r or "-"), f"{sent / 1e6:.2f}", f"{ddp[0].nbytes[-1] / sent:.1f}"]
            rows.append([*row, f"{mean:.3f}{spread}", f"{mean - exact:+.3f}"])
            if shorter.get(name):
                rows[-1].append(f"{share_of_steps(mean, shorter[name] | {1.0: exact}):.2f}")
        tables.append(f"{name}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(tables)


def draw(results: dict[str, dict[Arm, list[Curve]]], path: Path) -> None:
    """Validation loss against bytes sent, a panel a job; of the first seed."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, (name, of_job) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        for arm, curves in of_job.items():
            shade = {1: 0.45, 2: 0.6, 4: 0.75, 8: 0.95}.get(arm.r, 0.8)
            colour = {"powersgd": "Blues", "acp_sgd": "Oranges", "fp16": "Greens"}.get(arm.hook, "Greys")
            megabytes = [nbytes / 1e6 for nbytes in curves[0].nbytes]
            axes.plot(megabytes, curves[0].losses, marker=".", color=colormaps[colour](shade), label=str(arm))
        axes.set(title=name, xlabel="MB sent by a rank", ylabel="validation loss", xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--job", choices=[*JOBS, "all"], default="all")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each on digits; the text is trained once")
    parser.add_argument("--steps", type=int, help="of each training; by default as many as it needs")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    chosen = parser.parse_args()
    results: dict[str, dict[Arm, list[Curve]]] = {}
    shorter: dict[str, dict[float, float]] = {}
    for name in JOBS if chosen.job == "all" else [chosen.job]:
        n_steps = chosen.steps or STEPS[name]
        results[name] = {arm: [] for arm in ARMS}
        for arm in ARMS:
            for seed in range(chosen.seeds if name == "digits" else 1):
                with one_host() as hosts:
                    curve = run_on(hosts, RANKS, train, name, arm, n_steps, seed, timeout=900)[0]
                results[name][arm].append(curve)
                line = {"job": name, "hook": arm.hook, "matrix_approximation_rank": arm.r or None, "seed": seed}
                print(json.dumps(line | {"nbytes": curve.nbytes, "validation_loss": curve.losses}), flush=True)
        for share in SHORTER if name == "text" else ():
            with one_host() as hosts:
                curve = run_on(hosts, RANKS, train, name, ARMS[0], int(share * n_steps), 0, timeout=900)[0]
            shorter.setdefault(name, {})[share] = curve.losses[-1]
            print(json.dumps({"job": name, "hook": "ddp", "share_of_steps": share} | asdict(curve)), flush=True)
    print("\n" + table(results, shorter))
    if chosen.picture:
        draw(results, chosen.picture)


if __name__ == "__main__":
    main()

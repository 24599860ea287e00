"""What a step over a pipe in Lightning's Trainer takes, beside the same step in a bare loop with `DistributedPipe`.

    python -m benchmarks.pipeline_trainer
    python -m benchmarks.pipeline_trainer --quick

Two ranks, one thread each, over loopback. The Trainer's step has in it all that Trainer and strategy do from one
batch to the next: its loop, the batch that is sent, a loss that is logged. Both arms are in the same ranks and take
turns, a few steps at a time, within one fit, so that whatever else the machine does falls on both; a ratio is between
neighbours in time. Same stages, same number of micro-batches, no checkpointing, SGD. One JSON line a figure, the table
as Markdown, and whether what is promised holds.
"""

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it also runs as a script
from benchmarks.hosts import Host, as_torchrun_tells_it, one_host, run_on
from benchmarks.pipes import MODELS, Model, made
from lightning_distkit import PipeStrategy
from lightning_distkit.core.pipeline import DistributedPipe

N_RANKS = 2
CHUNKS = 8
SCHEDULES = ("gpipe", "1f1b")
ARMS = ("bare", "trainer")
AT_MOST = 0.05  # of a bare step
_LR = 1e-3
Turn = list[float]  # seconds of each step


class Module(pl.LightningModule):
    """The model as a user writes it."""

    def __init__(self, model: Model, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.loss_of = model.loss
        self.last_loss = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.last_loss = float(outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=_LR)


def bare_loop(model: Model, schedule: str) -> Callable[[], float]:
    """A step without a Trainer; its loss."""
    layers, (inputs, wanted) = made(model)
    pipe = DistributedPipe(layers, CHUNKS, "never", balance=model.balance(N_RANKS), schedule=schedule)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=_LR)

    def step() -> float:
        if schedule == "gpipe":
            loss = model.loss(pipe(inputs), wanted)
        else:
            loss = pipe.loss(inputs, loss=model.loss, targets=(wanted,))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


class TakeTurns(pl.Callback):
    """Has the bare loop take its turns within a fit. The first step of each turn is not measured: it finds the caches
    full of the other's.

    Attributes:
        turns: of each arm, on this rank.
        losses: of each arm, the one of the last step.
    """

    def __init__(self, bare: Callable[[], float], n_rounds: int, n_steps: int) -> None:
        self.bare = bare
        self.n_rounds, self.n_steps = n_rounds, n_steps
        self.turns: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
        self.losses: dict[str, float] = {}
        self._turn: Turn = []
        self._begin = 0.0

    @property
    def n_batches(self) -> int:
        """That the Trainer must have: a step is over when the next batch is about to begin."""
        return self.n_rounds * (self.n_steps + 1) + 1

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self._begin:
            self._turn.append(time.perf_counter() - self._begin)
        if len(self._turn) == self.n_steps + 1:
            self.turns["trainer"].append(self._turn[1:])
            self.turns["bare"].append(self._of_bare_steps())
            self.losses["trainer"] = module.last_loss
            self._turn = []
        dist.barrier()
        self._begin = time.perf_counter()

    def _of_bare_steps(self) -> Turn:
        turn = []
        for _ in range(self.n_steps + 1):
            dist.barrier()
            begin = time.perf_counter()
            self.losses["bare"] = self.bare()
            turn.append(time.perf_counter() - begin)
        return turn[1:]


def compare(host: Host, name: str, schedule: str, n_rounds: int, n_steps: int) -> dict[str, list[Turn]]:
    """The turns of each arm on this rank."""
    as_torchrun_tells_it(hosts=1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = MODELS[name]
    layers, batch = made(model)
    turns = TakeTurns(bare_loop(model, schedule), n_rounds, n_steps)
    strategy = PipeStrategy(CHUNKS, "never", balance=model.balance(N_RANKS), schedule=schedule)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=N_RANKS,
        strategy=strategy,
        max_epochs=1,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(model, layers), DataLoader([batch] * turns.n_batches, batch_size=None))
    if abs(turns.losses["trainer"] - turns.losses["bare"]) > 1e-4 * abs(turns.losses["bare"]):
        raise RuntimeError(f"after as many steps both must have the same loss, got {turns.losses}")
    return turns.turns


def figures(ranks: list[dict[str, list[Turn]]]) -> Iterator[dict[str, Any]]:
    """Medians over the turns; a step is over when the slowest rank is done."""
    seconds = {
        arm: [
            statistics.median(max(step) for step in zip(*turns, strict=True))
            for turns in zip(*(rank[arm] for rank in ranks), strict=True)
        ]
        for arm in ARMS
    }
    for arm in ARMS:
        yield {"figure": f"step_{arm}", "unit": "ms", "value": 1e3 * statistics.median(seconds[arm])}
    longer = [there / here - 1 for here, there in zip(seconds["bare"], seconds["trainer"], strict=True)]
    yield {"figure": "takes_longer", "unit": "of the bare step", "value": statistics.median(longer)}


def table(lines: list[dict[str, Any]]) -> str:
    """In Markdown, a row a model and schedule."""
    value = {(line["model"], line["schedule"], line["figure"]): line["value"] for line in lines}
    rows = ["| | schedule | ms, bare loop | ms, Trainer | takes longer |", "|---|---|---:|---:|---:|"]
    for model, schedule in dict.fromkeys((line["model"], line["schedule"]) for line in lines):
        bare, trainer, longer = (value[model, schedule, each] for each in ("step_bare", "step_trainer", "takes_longer"))
        rows.append(f"| {model} | `{schedule}` | {bare:.1f} | {trainer:.1f} | {longer:.1%} |")
    return "\n".join(rows)


def promises(lines: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{'met   ' if line['value'] < AT_MOST else 'MISSED'} {line['model']}, {line['schedule']}: takes_longer "
        f"{line['value']:.3f}, under {AT_MOST}"
        for line in lines
        if line["figure"] == "takes_longer"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--schedule", choices=SCHEDULES, nargs="+", default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="that are measured in each turn")
    parser.add_argument("--quick", action="store_true", help="the mlp, three rounds")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.model, chosen.rounds = ["mlp"], 3
    lines = []
    for model in chosen.model:
        for schedule in chosen.schedule:
            with one_host() as hosts:
                ranks = run_on(hosts, N_RANKS, compare, model, schedule, chosen.rounds, chosen.steps, timeout=600)
            for figure in figures(ranks):
                line = {"model": model, "schedule": schedule, "chunks": CHUNKS, "rounds": chosen.rounds} | figure
                print(json.dumps(line), flush=True)
                lines.append(line)
    print("\n" + table(lines) + "\n\n" + promises(lines))


if __name__ == "__main__":
    main()

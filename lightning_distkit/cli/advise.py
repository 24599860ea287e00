"""Whether compression pays, for this model on this network: tried out, not guessed."""

from __future__ import annotations

import json
import os
import statistics
import sys
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distkit.cli.subject import Subject, load_subject
from lightning_distkit.cli.world import world
from lightning_distkit.core.compression import HOOKS, CommState, attach
from lightning_distkit.core.compression.measurement import total

BOTTLENECK = 0.10  # the seed's rule: if doing without communication is not that much faster, the network is not one
# A hook must be so many times faster than DDP: one that sends all, but for rounding, and one that leaves something out,
# as its steps teach less: docs/compression.md has in what share of the steps plain DDP ends where each hook does.
FASTER_ROUNDED = 1.05
FASTER_COMPRESSED = 1.5
_ROUNDED = 0.01  # leaving out no more than that part of the gradients
_WARM_UP = 4  # steps: two whole, as DDP rebuilds its buckets in the second; then two as they will be


@dataclass(frozen=True)
class Candidate:
    """A hook of the table, or plain DDP without one; `r` is its matrix_approximation_rank, 0 if it has none."""

    hook: str
    r: int = 0

    def __str__(self) -> str:
        return f"{self.hook}, r = {self.r}" if self.r else self.hook


DDP = Candidate("ddp")
NOTHING = Candidate("noop")
CANDIDATES = (
    *(DDP, NOTHING, Candidate("fp16")),
    *(Candidate("powersgd", r) for r in (1, 2, 4, 8)),
    *(Candidate("acp_sgd", r) for r in (1, 4)),
)


@dataclass(frozen=True)
class Trial:
    """What one step with a candidate took: the slowest rank's time; the rest of all ranks alike."""

    candidate: Candidate
    step_ms: float
    nbytes: float  # that a rank sends
    relative_error: float  # of all that was to be sent, the part that was left out


@dataclass(frozen=True)
class Link:
    """What an all-reduce over the ranks takes: ``latency_s + bytes on the wire / bandwidth``."""

    latency_s: float
    bandwidth: float  # bytes a second that each rank sends


def advise(
    model: str,
    batch: str | None = None,
    steps: int = 5,
    rounds: int = 3,
    accelerator: Literal["auto", "cpu", "cuda"] = "auto",
    json_lines: bool = False,
) -> None:
    """Try hooks with your model on these ranks, and say whether the network is the bottleneck and what to do.

    Launch it as you launch the training: torchrun [...] -m lightning_distkit.cli advise my_package.models:MyModel

    Args:
        model: where a callable without arguments is, "package.module:name" or "file.py:name". It returns a
            LightningModule with train_dataloader(), an nn.Module, or a tuple of an nn.Module and a function of it that
            returns the loss of a step.
        batch: where a callable is that returns the batch: the LightningModule's, or the positional inputs of the
            nn.Module, whose mean squared output then is the loss.
        steps: steps of each hook in each round.
        rounds: how often all take turns.
        accelerator: where to run; "auto" takes cuda if it is there.
        json_lines: print JSON instead of a table.
    """
    for name, value in (("steps", steps), ("rounds", rounds)):
        if value < 1:
            sys.exit(f"{name} must be at least 1, got {value}")
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) < 2:
        sys.exit(
            "advise measures the network between ranks, and there must be at least two: launch it as your training is, "
            "torchrun --nproc-per-node=2 -m lightning_distkit.cli advise ..."
        )
    warnings.filterwarnings("ignore", module="lightning")  # a module that logs, without a Trainer
    device = _device(accelerator)
    subject = load_subject(model, batch, device)
    with world(device):
        link = measure_link(device)
        trials = try_all(subject, CANDIDATES, device, n_steps=steps, n_rounds=rounds)
        if dist.get_rank() == 0:
            report = _as_json if json_lines else _on_screen
            report(link, subject, trials)


def _device(accelerator: str) -> torch.device:
    if accelerator == "cuda" and not torch.cuda.is_available():
        sys.exit("accelerator=cuda, but torch.cuda.is_available() is False; use cpu or auto")
    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def measure_link(device: torch.device, *, long_enough_s: float = 0.2) -> Link:
    """Latency by the smallest all-reduce, bandwidth by one that takes long; the same on every rank."""
    latency_s = _all_reduce_s(2, device, n_times=20)
    numel = 1 << 16
    while (seconds := _all_reduce_s(numel, device, n_times=3)) < long_enough_s and numel < 1 << 24:
        numel *= 4
    world_size = dist.get_world_size()
    nbytes = 2 * (world_size - 1) / world_size * 4 * numel
    return Link(latency_s, nbytes / max(seconds - latency_s, 1e-9))


def _all_reduce_s(numel: int, device: torch.device, n_times: int) -> float:
    tensor = torch.zeros(numel, device=device)
    times = []
    for _ in range(n_times + 1):
        dist.barrier()
        begin = _now(device)
        dist.all_reduce(tensor)
        times.append(_now(device) - begin)
    return _slowest(statistics.median(times[1:]), device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def _slowest(seconds: float, device: torch.device) -> float:
    """Over the ranks; so that all of them decide alike."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def try_all(
    subject: Subject, candidates: Sequence[Candidate], device: torch.device, *, n_steps: int, n_rounds: int
) -> list[Trial]:
    """One trial of each candidate; the same on every rank.

    One model at a time, so the memory is that of a training. They take turns, there and back, so that whatever else
    the machine does falls on all of them.
    """
    trials: dict[Candidate, list[Trial]] = {candidate: [] for candidate in candidates}
    for n in range(n_rounds):
        for candidate in candidates if n % 2 == 0 else reversed(candidates):
            trials[candidate].append(_try(subject, candidate, device, n_steps))
    return [merge_trials(each) for each in trials.values()]


def merge_trials(trials: Sequence[Trial]) -> Trial:
    """Several of one candidate as one: the median step, as one that another process has held up says nothing."""
    step_ms = statistics.median(trial.step_ms for trial in trials)
    return replace(trials[0], step_ms=step_ms)


def _try(subject: Subject, candidate: Candidate, device: torch.device, n_steps: int) -> Trial:
    # Gradients are views of the buckets, as strategy="powersgd" has them; plain DDP's too: only the hooks shall differ.
    ddp = DistributedDataParallel(deepcopy(subject.module), gradient_as_bucket_view=True)
    state = CommState(None)
    if candidate != DDP:
        arguments = {"matrix_approximation_rank": candidate.r, "start_powerSGD_iter": 2} if candidate.r else {}
        state, hook = HOOKS[candidate.hook](None, **arguments)
        attach(ddp, state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        loss: Tensor = ddp()
        loss.backward()
        optimizer.step()

    for _ in range(_WARM_UP):
        step()
    state.measure()
    step()
    layers = state.last_measurement.over_ranks(state.group) if state.last_measurement is not None else {}
    sent, times = state.ledger.total.nbytes, []
    for _ in range(n_steps):
        dist.barrier()
        begin = _now(device)
        step()
        times.append(_now(device) - begin)
    step_ms = 1e3 * _slowest(statistics.median(times), device)
    if candidate == DDP:
        return Trial(candidate, step_ms, state.group.ring_nbytes(subject.nbytes), 0.0)
    sent = state.ledger.total.nbytes - sent
    return Trial(candidate, step_ms, sent / n_steps, total(layers.values()).relative_error)


def verdict(trials: Sequence[Trial]) -> list[str]:
    """Whether the network is the bottleneck, which hook to take, and which gentler ones are as good."""
    ms = {trial.candidate: trial.step_ms for trial in trials}
    ddp, free = ms[DDP], ms[NOTHING]
    gain = 1 - free / ddp
    if gain < BOTTLENECK:
        return [
            f"Not worth it: without any communication a step would take {max(0.0, gain):.0%} less time.",
            f"Under {BOTTLENECK:.0%} the network is no bottleneck. Stay with plain ddp.",
        ]
    hooks = [trial for trial in trials if trial.candidate not in (NOTHING, DDP)]
    lines = [f"The network is the bottleneck: without any communication a step would take {gain:.0%} less time."]
    worth_it = [trial for trial in hooks if trial.step_ms * _asked_for(trial) <= ddp]
    if not worth_it:
        fastest = min(hooks, key=lambda trial: trial.step_ms)
        lines.append(
            f"Not worth it: {fastest.candidate}, the fastest, would make a step {ddp / fastest.step_ms:.1f} times as "
            f"fast and leave out {fastest.relative_error:.0%} of the gradients; under {_asked_for(fastest):g} times "
            "that does not pay."
        )
        return [*lines, "Stay with plain ddp."]
    fastest = min(worth_it, key=lambda trial: trial.step_ms)
    lines.append(f"Take {fastest.candidate}: {ddp / fastest.step_ms:.1f} times faster than plain ddp.")
    gentler = [
        trial
        for trial in hooks
        if trial.relative_error < 0.9 * fastest.relative_error and trial.step_ms < 1.1 * fastest.step_ms
    ]
    if gentler:
        best = min(gentler, key=lambda trial: trial.relative_error)
        lines.append(
            f"{best.candidate} takes {best.step_ms / fastest.step_ms - 1:.0%} longer and leaves out less: "
            f"{best.relative_error:.0%} of the gradients in place of {fastest.relative_error:.0%}."
        )
    return lines


def _asked_for(trial: Trial) -> float:
    """How many times faster than DDP a step must be to be worth what it leaves out."""
    return FASTER_ROUNDED if trial.relative_error <= _ROUNDED else FASTER_COMPRESSED


def _as_json(link: Link, subject: Subject, trials: Sequence[Trial]) -> None:
    first = {"link": asdict(link), "ranks": dist.get_world_size(), "nbytes_of_gradients": subject.nbytes}
    for line in (first, *map(asdict, trials), {"verdict": verdict(trials)}):
        sys.stdout.write(json.dumps(line) + "\n")


def _on_screen(link: Link, subject: Subject, trials: Sequence[Trial]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        sys.exit("the table needs rich: pip install 'lightning-distkit[cli]', or ask for --json_lines=true")
    console = Console()
    console.print(
        f"Network between the {dist.get_world_size()} ranks: {8e-9 * link.bandwidth:.2f} Gbit/s each, latency "
        f"{1e3 * link.latency_s:.2f} ms. Model: {subject.numel / 1e6:.2f} million trained parameters, "
        f"{subject.nbytes / 1e6:.1f} MB of gradients."
    )
    table = Table("hook", "r", *("ms a step", "x ddp", "kB sent", "left out"))
    for column in table.columns[2:]:
        column.justify = "right"
    ddp = next(trial.step_ms for trial in trials if trial.candidate == DDP)
    for trial in trials:
        table.add_row(
            "no communication" if trial.candidate == NOTHING else trial.candidate.hook,
            str(trial.candidate.r or ""),
            f"{trial.step_ms:.1f}",
            f"{ddp / trial.step_ms:.2f}",
            f"{trial.nbytes / 1e3:.0f}",
            "" if trial.candidate == NOTHING else f"{trial.relative_error:.2%}",
        )
    console.print(table)
    for line in verdict(trials):
        console.print(line)

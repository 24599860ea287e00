"""What a step of a pipe takes, beside one process and torch.distributed.pipelining, and how much is the pipe itself.

    python -m benchmarks.pipeline_step
    python -m benchmarks.pipeline_step --quick

One rank a stage, one thread each, over loopback. All pipes have the same stages, the same number of micro-batches and
no checkpointing. The arms live side by side in the same ranks and take turns, a few steps at a time, so that whatever
else the machine does falls on all of them; ratios are between neighbours in time.

Efficiency is the time of one process, one thread, the whole batch at once, divided by the pipe's time and its number of
ranks. m micro-batches on p ranks cannot have more than m / (m + p - 1) of it (interleaved, more); nor more than cores /
ranks. "Neither" is the part of a step in which a pipe neither computes nor waits for another rank, on the rank where
that is most. One JSON line a figure, the table as Markdown, and whether what is promised holds.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it also runs as a script
from benchmarks.hosts import Host, one_host, run_on
from benchmarks.pipes import MODELS, OneProcess, Ours, Step, Torchs
from lightning_distkit.core.pipeline.timeline import bubble_on_paper

WARM_UP = 2  # steps: torch's pipe finds out about shapes in the first
CHUNKS = (4, 8, 16)
ALONE = "one process"
INTERLEAVED = 2  # stages a rank
ARMS: dict[str, Callable[[Any, int], Step]] = {
    "torch GPipe": lambda model, chunks: Torchs(model, "gpipe", chunks),
    "torch 1F1B": lambda model, chunks: Torchs(model, "1f1b", chunks),
    "gpipe": lambda model, chunks: Ours(model, "gpipe", chunks, inside=False),
    "gpipe, loss inside": lambda model, chunks: Ours(model, "gpipe", chunks, inside=True),
    "1f1b": lambda model, chunks: Ours(model, "1f1b", chunks, inside=True),
    "interleaved_1f1b": lambda model, chunks: Ours(
        model, "interleaved_1f1b", chunks, inside=True, n_stages_per_rank=INTERLEAVED
    ),
}
RIVALS = {"gpipe": "torch GPipe", "gpipe, loss inside": "torch GPipe", "1f1b": "torch 1F1B"}
NEITHER = 0.05  # of a step, at most


@dataclass(frozen=True)
class Sample:
    """One step of one arm on one rank, in seconds."""

    step: float
    neither: float | None


def compare(host: Host, model: str, chunks: list[int], n_rounds: int, n_steps: int) -> dict[Any, list[list[Sample]]]:
    """Of each arm, by its name and its number of micro-batches, the samples of each round on this rank."""
    torch.set_num_threads(1)
    steps: dict[Any, Step] = {(ALONE, 1): OneProcess(MODELS[model])}
    steps |= {(name, m): arm(MODELS[model], m) for m in chunks for name, arm in ARMS.items()}
    wanted = None
    for arm, step in steps.items():
        for _ in range(WARM_UP):
            loss = step()
        wanted = checked(arm, loss, wanted)
    samples: dict[Any, list[list[Sample]]] = {arm: [] for arm in steps}
    for n in range(n_rounds):
        for arm in steps if n % 2 == 0 else reversed(steps):
            steps[arm]()  # not measured: it finds the caches full of another's
            samples[arm].append([])
            for _ in range(n_steps):
                dist.barrier()
                begin = time.perf_counter()
                steps[arm]()
                seconds = time.perf_counter() - begin
                samples[arm][-1].append(Sample(seconds, getattr(steps[arm], "neither", None)))
    return samples


def checked(arm: Any, loss: torch.Tensor | None, wanted: float | None) -> float:
    """The loss of an arm, on every rank. It must be that of one process: what is wrong need not be fast."""
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, None if loss is None else float(loss))
    known = [each for each in losses if each is not None]
    if wanted is not None and any(abs(each - wanted) > 1e-4 * abs(wanted) for each in known):
        raise RuntimeError(f"the loss of {arm} must be {wanted}, as one process has it, got {losses}")
    return known[0]


def figures(ranks: list[dict[Any, list[list[Sample]]]]) -> Iterator[dict[str, Any]]:
    """Medians over the rounds; a step is over when the slowest rank is done."""
    n_ranks = len(ranks)
    seconds = {
        arm: [
            statistics.median(max(each.step for each in step) for step in zip(*rounds, strict=True))
            for rounds in zip(*(rank[arm] for rank in ranks), strict=True)
        ]
        for arm in ranks[0]
    }
    alone = seconds[ALONE, 1]
    for (name, chunks), its in seconds.items():
        named = {"arm": name, "chunks": chunks}
        yield named | {"figure": "step", "unit": "ms", "value": 1e3 * statistics.median(its)}
        if name == ALONE:
            continue
        efficiency = statistics.median(one / (n_ranks * each) for one, each in zip(alone, its, strict=True))
        yield named | {"figure": "efficiency", "unit": "", "value": efficiency}
        bound = 1 - bubble_on_paper(n_ranks, chunks, INTERLEAVED if name.startswith("interleaved") else 1)
        yield named | {"figure": "of_bound", "unit": "", "value": efficiency / bound}
        if name in RIVALS:
            rival = seconds[RIVALS[name], chunks]
            ratio = statistics.median(its / each for its, each in zip(its, rival, strict=True))
            yield named | {"figure": "x_torch", "unit": "times torch's step", "value": ratio}
        if ranks[0][name, chunks][0][0].neither is not None:
            neither = max(
                statistics.median(each.neither / each.step for of_round in rank[name, chunks] for each in of_round)
                for rank in ranks
            )
            yield named | {"figure": "neither", "unit": "of the step", "value": neither}


def table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table a model and number of stages, a row an arm, a group of columns a number of micro-batches."""
    tables = []
    for model, stages in dict.fromkeys((line["model"], line["stages"]) for line in lines):
        its = [line for line in lines if (line["model"], line["stages"]) == (model, stages)]
        value = {(line["arm"], line["chunks"], line["figure"]): line["value"] for line in its}
        rows = [
            "| | micro-batches | ms a step | efficiency | of the bound | x torch's step | neither |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for arm, chunks in dict.fromkeys((line["arm"], line["chunks"]) for line in its):
            name = arm if arm == ALONE or arm.startswith("torch") else f"**{arm}**"
            row = [name, str(chunks), f"{value[arm, chunks, 'step']:.0f}"]
            for figure, form in ("efficiency", ".2f"), ("of_bound", ".2f"), ("x_torch", ".2f"), ("neither", ".1%"):
                found = value.get((arm, chunks, figure))
                row.append("" if found is None else format(found, form))
            rows.append(f"| {' | '.join(row)} |")
        tables.append(f"{model}, {stages} stages on {os.cpu_count()} cores\n\n" + "\n".join(rows))
    return "\n\n".join(tables)


def promises(lines: list[dict[str, Any]]) -> str:
    """On two stages, 8 and 16 micro-batches: no slower than torch's pipe of the same schedule, and little engine."""
    verdicts = []
    for line in lines:
        if line["stages"] == 2 and line["chunks"] in (8, 16) and line["figure"] in ("x_torch", "neither"):
            bound = NEITHER if line["figure"] == "neither" else 1.0
            met = "met   " if line["value"] <= bound else "MISSED"
            where = f"{line['model']}, {line['arm']}, {line['chunks']} micro-batches"
            verdicts.append(f"{met} {where}: {line['figure']} {line['value']:.3f}, at most {bound}")
    return "\n".join(verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="that are measured in each round")
    parser.add_argument("--quick", action="store_true", help="the mlp on two stages, 8 micro-batches, half the rounds")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.model, chosen.stages, chosen.chunks = ["mlp"], [2], [8]
        chosen.rounds = max(2, chosen.rounds // 2)
    lines = []
    for model in chosen.model:
        for stages in chosen.stages:
            with one_host() as hosts:
                ranks = run_on(hosts, stages, compare, model, chosen.chunks, chosen.rounds, chosen.steps, timeout=1800)
            for figure in figures(ranks):
                line = {"model": model, "stages": stages} | figure
                print(json.dumps(line), flush=True)
                lines.append(line)
    print("\n" + table(lines) + "\n\n" + promises(lines))


if __name__ == "__main__":
    main()

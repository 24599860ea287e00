"""What each rank of a pipe holds, by schedule and checkpoint mode, beside torch.distributed.pipelining and one process.

    python -m benchmarks.pipeline_memory
    python -m benchmarks.pipeline_memory --model mlp --stages 2

Bytes are counted at the CPU's allocator (`allocations`), on every rank, a fresh process, and from before the model is
made; the figures are of the third step, without an optimizer. One JSON line a figure, and a Markdown table of the peaks
beside what no schedule can spare: parameters, gradients and, on every rank, the batch.
"""

import argparse
import gc
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it also runs as a script
from benchmarks.allocations import Allocations, held_nbytes
from benchmarks.hosts import Host, one_host, run_on
from benchmarks.pipes import MODELS, Model, OneProcess, Ours, Step, Torchs
from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES

WARM_UP = 2  # steps: in the first, torch's pipe finds out about shapes
RIVAL, OURS = "torch 1F1B", "1f1b, checkpoint never"


def _ours(schedule: str, **arguments: Any) -> Callable[[Model, int], Step]:
    def arm(model: Model, chunks: int) -> Step:
        return Ours(model, schedule, chunks, **arguments)

    return arm


ARMS: dict[str, Callable[[Model, int], Step]] = {
    "one process": lambda model, chunks: OneProcess(model),
    "torch GPipe": lambda model, chunks: Torchs(model, "gpipe", chunks),
    RIVAL: lambda model, chunks: Torchs(model, "1f1b", chunks),
    **{
        f"gpipe, checkpoint {mode}": _ours("gpipe", checkpoint=mode, inside=False)
        for mode in reversed(CHECKPOINT_MODES)
    },
    "gpipe, checkpoint never, outputs last": _ours("gpipe", inside=False, outputs="last"),
    **{f"1f1b, checkpoint {mode}": _ours("1f1b", checkpoint=mode, inside=True) for mode in reversed(CHECKPOINT_MODES)},
    "interleaved_1f1b, checkpoint never": _ours("interleaved_1f1b", inside=True, n_stages_per_rank=2),
}


@dataclass(frozen=True)
class Held:
    """Bytes on one rank."""

    at_rest: int  # between two steps: parameters and the batch
    gradients: int
    peak: int


def measured(host: Host, model: str, arm: str, chunks: int) -> Held:
    """Of this rank, in a step after the first ones."""
    torch.set_num_threads(1)
    allocations = Allocations()
    step = ARMS[arm](MODELS[model], chunks)
    for _ in range(WARM_UP):
        step()
    step.module.zero_grad()
    gc.collect()  # the layers of other ranks
    at_rest = allocations.alive()
    with allocations.section("step"):
        step()
    gradients = held_nbytes(each.grad for each in step.module.parameters() if each.grad is not None)
    return Held(at_rest, gradients, allocations["step"].peak)


def table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table a model and number of stages, in MB: a row an arm, a column a rank."""
    tables = []
    for model, stages in dict.fromkeys((line["model"], line["stages"]) for line in lines):
        its = [line for line in lines if (line["model"], line["stages"]) == (model, stages)]
        value = {(line["arm"], line["rank"], line["figure"]): line["value"] / 1e6 for line in its}
        ranks = range(stages)
        rows = ["| | " + " | ".join(f"rank {rank}" for rank in ranks) + " |", "|---|" + "---:|" * stages]
        if OURS in {line["arm"] for line in its}:
            least = [value[OURS, rank, "at_rest"] + value[OURS, rank, "gradients"] for rank in ranks]
            rows.append(f"| parameters, gradients, batch | {' | '.join(f'{each:.1f}' for each in least)} |")
        for arm in dict.fromkeys(line["arm"] for line in its):
            peaks = [value.get((arm, rank, "peak")) for rank in ranks]
            cells = ["" if each is None else f"{each:.1f}" for each in peaks]
            rows.append(f"| {arm if arm.startswith(('one', 'torch')) else f'**{arm}**'} | {' | '.join(cells)} |")
        tables.append(f"{model}, {stages} stages, {its[0]['chunks']} micro-batches: MB a rank\n\n" + "\n".join(rows))
    return "\n\n".join(tables)


def promises(lines: list[dict[str, Any]]) -> str:
    """Each rank's peak with 1f1b is at most that of torch's 1F1B."""
    peaks = {
        (line["model"], line["stages"], line["arm"], line["rank"]): line["value"]
        for line in lines
        if line["figure"] == "peak"
    }
    verdicts = []
    for (model, stages, arm, rank), peak in peaks.items():
        rival = peaks.get((model, stages, RIVAL, rank))
        if arm == OURS and rival is not None:
            met = "met   " if peak <= rival else "MISSED"
            verdicts.append(
                f"{met} {model}, rank {rank} of {stages}: 1f1b holds {peak / 1e6:.2f} MB, at most {rival / 1e6:.2f}"
            )
    return "\n".join(verdicts)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that namespaces are deleted
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    chosen = parser.parse_args()
    lines = []
    for model in chosen.model:
        for stages in chosen.stages:
            for arm in chosen.arms:
                with one_host() as hosts:
                    ranks = run_on(hosts, stages, measured, model, arm, chosen.chunks, timeout=300)
                for rank, held in enumerate(ranks):
                    if arm == "one process" and rank > 0:
                        continue
                    for figure, value in asdict(held).items():
                        named = {"model": model, "stages": stages, "chunks": chosen.chunks, "arm": arm, "rank": rank}
                        line = named | {"figure": figure, "unit": "bytes", "value": value}
                        print(json.dumps(line), flush=True)
                        lines.append(line)
    print("\n" + table(lines) + "\n\n" + promises(lines))


if __name__ == "__main__":
    main()

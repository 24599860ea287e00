"""Trains a small language model on two processes, with plain DDP and with PowerSGD, and compares the two.

Run: make demo, or: python examples/demo.py [--steps 400] [--seconds 140]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import matplotlib
import task
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # to a file, on machines without a screen too
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
N_PROBE_STEPS = 30
LABELS = {"ddp": "ddp, plain all-reduce", "powersgd": "powersgd", "ddp_noop": "ddp_noop, sends nothing"}

Record = dict[str, Any]  # what `demo_training.Recorder` wrote


def main() -> None:
    parser = argparse.ArgumentParser(description="plain DDP beside PowerSGD, on two processes")
    parser.add_argument(
        "--steps",
        type=int,
        default=task.STEPS,
        help="optimizer steps of each training, at most one epoch (%(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=140, help="fewer steps where the machine is too slow for this (%(default)s)"
    )
    arguments = parser.parse_args()
    began = time.perf_counter()
    OUT.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))

    # First what sends nothing: it shows what the network costs, and how many steps this machine can do in the time.
    records = {"ddp_noop": train("ddp_noop", N_PROBE_STEPS)}
    n_steps = affordable(arguments.steps, arguments.seconds, time.perf_counter() - began, records["ddp_noop"])
    for name in ("ddp", "powersgd"):
        records[name] = train(name, n_steps)
    draw(records, OUT / "demo.png")
    show(records)
    print(f"Curves: {OUT / 'demo.png'}\nThe demo took {time.perf_counter() - began:.0f} s.")


def train(name: str, n_steps: int) -> Record:
    """One training, in processes of its own: Lightning starts the script again for the second rank."""
    print(f"\n{LABELS[name]}: {n_steps} steps on two processes", flush=True)
    out = OUT / f"{name}.json"
    command = [sys.executable, str(HERE / "demo_training.py"), name, str(n_steps), str(out)]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def affordable(n_steps: int, seconds: float, spent: float, probe: Record) -> int:
    """How many steps, at most ``n_steps``, two more trainings can make so that all should end within ``seconds``."""
    start = spent - sum(probe["seconds"])  # imports, mostly
    step = 1.5 * quantiles(probe["seconds"])[0]  # a good one, and half as much for communication and validation
    possible = max(100, int((seconds - spent - 2 * start) / (2 * step)))
    # Multiples of 20, so that the last step ends with a validation.
    n_steps, possible = max(20, n_steps // 20 * 20), possible // 20 * 20
    if possible >= n_steps:
        return n_steps
    print(f"This machine is slow or busy: {possible} steps in place of {n_steps}, to end within {seconds:.0f} s.")
    return possible


def show(records: dict[str, Record]) -> None:
    """The table, and what to make of it."""
    ddp, powersgd = records["ddp"], records["powersgd"]
    table = Table(title="The same model, data and seeds on two processes")
    for column in ("", "validation\nloss", "MB sent\nper rank", "MB sent\nin all", "fewer\nbytes", "ms per\nstep"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in LABELS.items():
        record = records[name]
        nbytes, r = record["nbytes_of_all_ranks"], record["matrix_approximation_rank"]
        table.add_row(
            f"{label}, r = {r}" if r else label,
            f"{record['validation'][-1][1]:.3f}" if record["validation"] else "-",
            f"{record['nbytes'][-1] / 1e6:.1f}",
            f"{nbytes / 1e6:.1f}",
            f"{ddp['nbytes_of_all_ranks'] / nbytes:.1f} x" if nbytes else "-",
            f"{1e3 * step_seconds(record):.1f}",
        )
    print()
    Console().print(table)

    loss, reference = powersgd["validation"][-1][1], ddp["validation"][-1][1]
    n_steps, whole = len(ddp["nbytes"]), ddp["nbytes_of_gradients"]
    n_first = sum(nbytes >= per_step(ddp)[-1] for nbytes in per_step(powersgd))
    later = per_step(ddp)[-1] / per_step(powersgd)[-1]
    nothing, all_ = (1e3 * step_seconds(records[name]) for name in ("ddp_noop", "ddp"))
    share = max(0.0, 1 - nothing / all_)
    verdict = f"{share:.0%} of DDP's step go to sending and waiting" if share >= 0.3 else "the network is no bottleneck"
    print(
        f"- PowerSGD ends {loss - reference:+.3f} from DDP's loss; both began at {ddp['train_loss'][0]:.2f}.\n"
        f"- Its first {n_first} steps send whole gradients, the others {later:.1f} times fewer bytes than DDP's.\n"
        f"- An all-reduce over W ranks counts as 2 (W - 1) / W times its payload. For DDP that is\n"
        f"  {n_steps} steps x {whole:,} bytes of gradients = {n_steps * whole:,}; counted: {ddp['nbytes'][-1]:,}.\n"
        f"- With nothing sent a step takes {nothing:.0f} ms in place of {all_:.0f}: {verdict}.\n"
        f"  Both ranks are on one machine; for slower wires see benchmarks/powersgd_step.py."
    )


def per_step(record: Record) -> list[int]:
    """Bytes that one rank sent in each step."""
    return [after - before for before, after in zip([0, *record["nbytes"]], record["nbytes"], strict=False)]


def step_seconds(record: Record) -> float:
    # Without the first tenth, in which buffers are made and PowerSGD does not compress yet.
    return median(record["seconds"][len(record["seconds"]) // 10 :])


def draw(records: dict[str, Record], path: Path) -> None:
    """Loss against steps, and the same against bytes sent."""
    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name, color in (("ddp", "tab:blue"), ("powersgd", "tab:orange")):
        record = records[name]
        sent = [0, *(nbytes / 1e6 for nbytes in record["nbytes"])]
        losses = record["train_loss"]
        smooth = [mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        steps, validation = zip(*record["validation"], strict=True)
        for axes, xs, at in (
            (by_step, range(1, len(losses) + 1), steps),
            (by_bytes, sent[1:], [sent[step] for step in steps]),
        ):
            axes.plot(xs, smooth, color=color, alpha=0.5, label=f"{name}, training")
            axes.plot(at, validation, "o", color=color, label=f"{name}, validation")
    by_step.set(xlabel="steps", ylabel="loss, nats a byte", ylim=(None, 4))
    by_bytes.set(xlabel="MB sent by each rank")
    by_step.legend(frameon=False)
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()

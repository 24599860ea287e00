"""Whether `distkit advise` is right: what it says of each network, beside what is then measured.

    python -m benchmarks.advise_holds

Two ranks on loopback and on two hosts at 200 Mbit/s (that needs root). First the advice, as the command gives it; then
trainings with each hook, one after the other, as `powersgd_step` measures a step. JSON lines, and a line a model and
network: the verdict, the hook that was measured fastest, and how far the predicted steps were from the measured ones.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.hosts import Host, run_on, why_not
from benchmarks.models import MODELS, batches
from benchmarks.powersgd_step import NETWORKS, Arm, Sample, compare, merge
from lightning_distkit.cli.advise import CANDIDATES, NOTHING, Trial, try_all, verdict
from lightning_distkit.cli.subject import Step, Subject

ARMS = [Arm(candidate.hook, candidate.r) for candidate in CANDIDATES]


def subject(model: str) -> Subject:
    """The benchmark's model as `load_subject` would make it of a path."""
    make, make_batch, loss = MODELS[model]
    torch.manual_seed(0)
    inputs, wanted = next(batches(make_batch, 1))
    of_batch: Callable[[Any], torch.Tensor] = lambda module: loss(module(inputs), wanted)  # noqa: E731
    return Subject(Step(make(), of_batch))


def advice(host: Host, model: str, n_steps: int, n_rounds: int) -> list[Trial]:
    torch.set_num_threads(1)
    return try_all(subject(model), CANDIDATES, torch.device("cpu"), n_steps=n_steps, n_rounds=n_rounds)


def trainings(host: Host, model: str, n_steps: int) -> list[list[Sample]]:
    """One at a time, as a user trains: beside others each would find the caches and the memory full of theirs."""
    return [compare(host, model, [arm], 1, n_steps)[0] for arm in ARMS]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--network", choices=NETWORKS, nargs="+", default=["loopback", "200mbit"])
    parser.add_argument("--steps", type=int, default=10, help="that are measured with each hook")
    chosen = parser.parse_args()
    for network in chosen.network:
        if network != "loopback" and (reason := why_not()):
            print(f"{network} left out: {reason}", file=sys.stderr)
            continue
        for model in chosen.model:
            with NETWORKS[network]() as hosts:
                trials = run_on(hosts, 2, advice, model, 5, 2, timeout=900)[0]
                ranks = run_on(hosts, 2, trainings, model, chosen.steps, timeout=900)
            measured = {}
            for candidate, *of_arm in zip(CANDIDATES, *ranks, strict=True):
                turns = [merge(turn, 2 // len(hosts)) for turn in zip(*of_arm, strict=True)]
                measured[candidate] = statistics.median(turn.wall_ms for turn in turns)
            off = {}
            for trial in trials:
                off[trial.candidate] = trial.step_ms / measured[trial.candidate]
                line = {"model": model, "network": network, "candidate": str(trial.candidate)}
                figures = {"predicted_ms": trial.step_ms, "measured_ms": measured[trial.candidate]}
                print(json.dumps(line | figures | {"ratio": off[trial.candidate]}), flush=True)
            fastest = min((c for c in CANDIDATES if c != NOTHING), key=measured.__getitem__)
            low, high = min(off.values()), max(off.values())
            print(f"{model} on {network}: {' '.join(verdict(trials))}")
            print(f"  measured fastest: {fastest}; predicted / measured: {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()

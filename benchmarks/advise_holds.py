"""Whether `distkit advise` is right: what it says of each network, beside what is then measured.

    python -m benchmarks.advise_holds

Two ranks on loopback and on two hosts at 200 Mbit/s (that needs root). Each hook is tried as the command does it and
then trained with, as `powersgd_step` measures a step. JSON lines, and a line a model and network: the verdict, the hook
that was measured fastest, and how far the predicted steps were from the measured ones.
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
from lightning_distkit.cli.advise import CANDIDATES, NOTHING, Candidate, Trial, merge_trials, try_all, verdict
from lightning_distkit.cli.subject import Step, Subject


def subject(model: str) -> Subject:
    """The benchmark's model as `load_subject` would make it of a path."""
    make, make_batch, loss = MODELS[model]
    torch.manual_seed(0)
    inputs, wanted = next(batches(make_batch, 1))
    of_batch: Callable[[Any], torch.Tensor] = lambda module: loss(module(inputs), wanted)  # noqa: E731
    return Subject(Step(make(), of_batch))


def advised_and_trained(
    host: Host, model: str, n_steps: int, n_rounds: int
) -> tuple[dict[Candidate, list[Trial]], dict[Candidate, list[Sample]]]:
    """A trial of each hook and at once a training with it, there and back, as often as asked.

    Side by side in time, as this machine's steps drift by a quarter within minutes; and one training at a time, as a
    user trains: beside others each would find the caches and the memory full of theirs.
    """
    torch.set_num_threads(1)
    tried: dict[Candidate, list[Trial]] = {candidate: [] for candidate in CANDIDATES}
    trained: dict[Candidate, list[Sample]] = {candidate: [] for candidate in CANDIDATES}
    for n in range(n_rounds):
        for candidate in CANDIDATES if n % 2 == 0 else reversed(CANDIDATES):
            cpu = torch.device("cpu")
            tried[candidate] += try_all(subject(model), [candidate], cpu, n_steps=n_steps, n_rounds=1)
            [samples] = compare(host, model, [Arm(candidate.hook, candidate.r)], 1, n_steps)
            trained[candidate] += samples
    return tried, trained


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--network", choices=NETWORKS, nargs="+", default=["loopback", "200mbit"])
    parser.add_argument("--steps", type=int, default=5, help="that are measured with each hook in each round")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    for network in chosen.network:
        if network != "loopback" and (reason := why_not()):
            print(f"{network} left out: {reason}", file=sys.stderr)
            continue
        for model in chosen.model:
            with NETWORKS[network]() as hosts:
                ranks = run_on(hosts, 2, advised_and_trained, model, chosen.steps, chosen.rounds, timeout=1800)
            trials = [merge_trials(ranks[0][0][candidate]) for candidate in CANDIDATES]
            measured = {}
            for candidate in CANDIDATES:
                of_ranks = [trained[candidate] for _, trained in ranks]
                turns = [merge(turn, 2 // len(hosts)) for turn in zip(*of_ranks, strict=True)]
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

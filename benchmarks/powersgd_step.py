"""What a step with PowerSGD or ACP-SGD costs and saves, beside torch's hook, plain DDP and no reduction at all.

    python -m benchmarks.powersgd_step --quick
    python -m benchmarks.powersgd_step --model mlp --network all

Two ranks, one thread each, on loopback and on two hosts (two network namespaces) at 1 Gbit/s and 200 Mbit/s; the
latter need root. All hooks of a network live side by side in the same ranks and take turns, a few steps at a time, so
that whatever else the machine does falls on all of them; ratios are between neighbours in time. A step is zero_grad,
forward, backward and SGD. One JSON line a figure, then the table as Markdown.

torch's hook gets one bucket, for it kills the process with more on gloo; all else keeps DDP's own buckets. In every
arm, plain DDP's too, the gradients are views of the buckets, as ``strategy="powersgd"`` has them.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it also runs as a script
from benchmarks.hosts import Host, one_host, run_on, two_hosts, why_not, wire_bytes
from benchmarks.models import MODELS, batches
from benchmarks.table import table, targets
from lightning_distkit.core.compression import HOOKS, attach, ledger_of
from lightning_distkit.core.ledger import Ledger

MATRIX_APPROXIMATION_RANKS = (1, 2, 4, 8, 32)
NETWORKS: dict[str, Callable[[], AbstractContextManager[tuple[Host, ...]]]] = {
    "loopback": one_host,
    "1gbit": lambda: two_hosts("1gbit"),
    "200mbit": lambda: two_hosts("200mbit"),
}
OURS = ("powersgd", "acp_sgd")
WARM_UP = 3  # steps: in the second DDP rebuilds its buckets
START = 2  # the first step that PowerSGD may compress
ONE_BUCKET_MB = 1 << 20


@dataclass(frozen=True)
class Arm:
    """One of those compared: `hook` as the table calls it, `r` its matrix_approximation_rank (0: has none)."""

    hook: str
    r: int = 0


@dataclass(frozen=True)
class Sample:
    """What one arm's turn took on one rank, each per step."""

    wall_ms: float
    cpu_ms: float
    ledger_bytes: float
    device_bytes: float


class Trainee:
    """A model under DDP with an arm's hook, and its optimizer; the same weights in every arm."""

    def __init__(self, arm: Arm, model: str) -> None:
        make_model, make_batch, self.loss = MODELS[model]
        torch.manual_seed(0)
        module = make_model()
        torch.manual_seed(dist.get_rank())
        self.batches = batches(make_batch)
        one_bucket = ONE_BUCKET_MB if arm.hook == "torch" else None
        self.ddp = DistributedDataParallel(module, bucket_cap_mb=one_bucket, gradient_as_bucket_view=True)
        self.ledger: Ledger | None = None  # torch's hook and DDP without one count nothing
        compressing: dict[str, Any] = (
            {"matrix_approximation_rank": arm.r, "start_powerSGD_iter": START} if arm.r else {}
        )
        if arm.hook == "torch":
            self.ddp.register_comm_hook(torch_powersgd.PowerSGDState(None, **compressing), one_bucket_only)
        elif arm.hook != "ddp":
            state, hook = HOOKS[arm.hook](None, **compressing)
            attach(self.ddp, state, hook)
            self.ledger = ledger_of(state)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)

    def step(self) -> None:
        inputs, wanted = next(self.batches)
        self.optimizer.zero_grad()
        self.last_loss = self.loss(self.ddp(inputs), wanted)
        self.last_loss.backward()
        self.optimizer.step()

    def turn(self, host: Host, n_steps: int) -> Sample:
        """Take `n_steps`, all ranks starting together, after one that is not measured: it finds the caches cold."""
        self.step()
        dist.barrier()
        sent = self._ledger_bytes()
        device = wire_bytes(host)
        cpu = time.process_time()
        wall = []
        for _ in range(n_steps):
            start = time.perf_counter()
            self.step()
            wall.append(time.perf_counter() - start)
        cpu = time.process_time() - cpu
        dist.barrier()
        device = wire_bytes(host) - device
        sent = self._ledger_bytes() - sent
        return Sample(1e3 * statistics.median(wall), 1e3 * cpu / n_steps, sent / n_steps, device / n_steps)

    def _ledger_bytes(self) -> int:
        return 0 if self.ledger is None else self.ledger.total.nbytes


def one_bucket_only(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, which aborts the process where DDP has more than one bucket; better an error."""
    if bucket.index() > 0:
        raise RuntimeError("torch's hook must get one bucket, got more; raise ONE_BUCKET_MB")
    return torch_powersgd.powerSGD_hook(state, bucket)


def compare(host: Host, model: str, arms: list[Arm], n_rounds: int, n_steps: int) -> list[list[Sample]]:
    """On every rank: each arm's samples, round by round."""
    torch.set_num_threads(1)
    trainees = [Trainee(arm, model) for arm in arms]
    for arm, trainee in zip(arms, trainees, strict=True):
        trainee.turn(host, WARM_UP + (START if arm.r else 0))
    samples: list[list[Sample]] = [[] for _ in arms]
    for n in range(n_rounds):
        for i in range(len(arms)):
            turn = (i + n) % len(arms)  # so that nobody always follows the same one's first step
            samples[turn].append(trainees[turn].turn(host, n_steps))
    for arm, trainee in zip(arms, trainees, strict=True):
        if not trainee.last_loss.isfinite():  # arithmetic with NaN takes another time
            raise RuntimeError(f"{arm} must train, but its loss is {trainee.last_loss}; lower the learning rate")
    return samples


def merge(ranks: Sequence[Sample], ranks_a_host: int) -> Sample:
    """Of one turn: the clock of the slowest rank, processor time and bytes of the mean rank."""
    return Sample(
        max(sample.wall_ms for sample in ranks),
        statistics.fmean(sample.cpu_ms for sample in ranks),
        statistics.fmean(sample.ledger_bytes for sample in ranks),
        statistics.fmean(sample.device_bytes for sample in ranks) / ranks_a_host,
    )


def figures(arms: list[Arm], turns: dict[Arm, list[Sample]], has_counter: bool) -> Iterator[dict[str, Any]]:
    """The figures of one model on one network: medians over rounds, ratios between the turns of one round."""

    def each(arm: Arm, what: str) -> list[float]:
        return [getattr(sample, what) for sample in turns[arm]]

    def over_noop(arm: Arm, what: str) -> list[float]:
        return [mine - noop for mine, noop in zip(each(arm, what), each(Arm("noop"), what), strict=True)]

    for arm in arms:
        of_arm = [
            ("step", "ms", _summary(each(arm, "wall_ms"))),
            ("processor_time", "ms", _summary(each(arm, "cpu_ms"))),
        ]
        if arm.hook not in ("ddp", "torch"):
            of_arm.append(("ledger_bytes", "bytes", _summary(each(arm, "ledger_bytes"))))
        if has_counter:
            of_arm.append(("device_bytes", "bytes", _summary(each(arm, "device_bytes"))))
        if arm.hook not in ("ddp", "noop"):
            of_arm.append(
                ("speed_up_over_ddp", "times", _summary(_ratios(each(Arm("ddp"), "wall_ms"), each(arm, "wall_ms"))))
            )
        if arm.hook == "acp_sgd":
            of_arm.append(
                (
                    "speed_up_over_powersgd",
                    "times",
                    _summary(_ratios(each(Arm("powersgd", arm.r), "wall_ms"), each(arm, "wall_ms"))),
                )
            )
        if arm.hook in OURS:
            for figure, what in ("overhead_processor_time", "cpu_ms"), ("overhead_clock", "wall_ms"):
                ours, torchs = over_noop(arm, what), over_noop(Arm("torch", arm.r), what)
                # Of the medians: a single round's difference may be near zero on a noisy machine.
                ratio = statistics.median(ours) / statistics.median(torchs)
                of_arm.append((figure, "of torch's", _summary(_ratios(ours, torchs)) | {"value": _short(ratio)}))
        for figure, unit, summary in of_arm:
            named = {"hook": arm.hook, "matrix_approximation_rank": arm.r or None, "figure": figure, "unit": unit}
            yield named | summary


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _summary(values: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * values
    return {"value": _short(quartiles[1]), "quartiles": [_short(quartiles[0]), _short(quartiles[2])]}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--network", choices=[*NETWORKS, "all"], default="all")
    parser.add_argument("--ranks", type=int, default=2, help="processes, spread over the hosts")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each hook")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--quick", action="store_true", help="the mlp alone, r = 1 and 4: 8 minutes, not 60")
    chosen = parser.parse_args()
    if chosen.ranks < 2 or chosen.ranks % 2:
        parser.error(f"--ranks must be even, to be spread over two hosts, got {chosen.ranks}")
    if min(chosen.rounds, chosen.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return chosen


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that namespaces are deleted
    chosen = arguments()
    models = list(MODELS) if chosen.model == "all" else [chosen.model]
    rs: tuple[int, ...] = MATRIX_APPROXIMATION_RANKS
    if chosen.quick:
        models, rs = models[:1], (1, 4)
    arms = [Arm("ddp"), Arm("noop"), Arm("bf16"), *(Arm(hook, r) for r in rs for hook in ("torch", *OURS))]
    lines = []
    for network in NETWORKS if chosen.network == "all" else [chosen.network]:
        if network != "loopback" and (reason := why_not()):
            print(f"{network} left out: {reason}", file=sys.stderr)
            continue
        for model in models:
            with NETWORKS[network]() as hosts:
                ranks = run_on(hosts, chosen.ranks, compare, model, arms, chosen.rounds, chosen.steps, timeout=900)
            turns = {
                arm: [merge(turn, chosen.ranks // len(hosts)) for turn in zip(*of_arm, strict=True)]
                for arm, *of_arm in zip(arms, *ranks, strict=True)
            }
            for figure in figures(arms, turns, has_counter=hosts[0].namespace is not None):
                line = {"model": model, "network": network, "ranks": chosen.ranks} | figure
                print(json.dumps(line), flush=True)
                lines.append(line)
    if not lines:
        sys.exit("nothing was measured; without root there is --network loopback")
    print("\n" + table(lines) + "\n\n" + targets(lines))


if __name__ == "__main__":
    main()

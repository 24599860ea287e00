"""Trains for thousands of steps while things go wrong: does each run end as if nothing had happened?

    python -m benchmarks.soak --epochs 200 --faults 8
    python -m benchmarks.soak --strategy pipe zero_stage_2 --epochs 20 --faults 4

Each strategy trains twice, under torchrun's elastic agents: undisturbed, and with faults at random steps. A rank is
killed; a rank is slow; the disk is full while a checkpoint is written; the newest checkpoint is truncated and a rank
killed; the wire between the hosts is cut for a while. The agents start the job again, and it goes on from the newest
checkpoint that opens. At the end weights and optimizer states must be those of the undisturbed run to the last bit.

Two hosts are two network namespaces, which need root; without it the ranks share one, and no wire is cut. A fault comes
once: what has been done is noted in the run's folder. One JSON line a strategy, then the table.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it also runs as a script
from benchmarks.hosts import Host, two_hosts, why_not
from lightning_distkit import PipeStrategy, PowerSGDDDPStrategy, ZeroStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "powersgd": lambda: PowerSGDDDPStrategy(start_powerSGD_iter=10),
    "acp_sgd": lambda: PowerSGDDDPStrategy(start_powerSGD_iter=10, hook="acp_sgd"),
    "zero_stage_1": lambda: ZeroStrategy(stage=1),
    "zero_stage_2": lambda: ZeroStrategy(stage=2),
    "zero_stage_3": lambda: ZeroStrategy(stage=3),
    "pipe": lambda: PipeStrategy(chunks=4, schedule="1f1b"),
}
FAULTS = ("kill", "slow", "full disk", "truncated", "wire")
STEPS_AN_EPOCH = 16
SLOW, CUT = 2.0, 2.0  # seconds
KEPT = 3  # checkpoints
LEFT_OF_DISK = 20_000  # bytes, less than a checkpoint


class Net(pl.LightningModule):
    """Nothing in it draws random numbers, so a run that goes on from the end of an epoch can be exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(16, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.behind = nn.Linear(64, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, wanted = batch
        return (self.behind(self.layers(self.before(x))) - wanted).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        random_ = torch.Generator().manual_seed(1)
        pipes = 1 if isinstance(self.trainer.strategy, PipeStrategy) else self.trainer.world_size
        x = torch.randn(8 * STEPS_AN_EPOCH * pipes, 16, generator=random_)
        return DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=8, shuffle=False)


class Faults(pl.Callback):
    """Does what the plan says, each entry once, and notes what a rank holds.

    Args:
        plan: pairs of a step and a kind; on odd steps on the last rank, on even ones on the first.
    """

    def __init__(self, folder: Path, plan: list[tuple[int, str]]) -> None:
        self.folder, self.plan = folder, dict(plan)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        kind = self.plan.get(step)
        rank = trainer.global_rank
        if kind is None or rank != (trainer.world_size - 1 if step % 2 else 0):
            return
        if kind == "full disk" and rank != 0:
            return  # rank 0 writes
        note = self.folder / f"done {step}"
        if note.exists():
            return
        note.write_text(kind)
        if kind == "truncated" and (newest := by_age(self.folder)):
            os.truncate(newest[-1], newest[-1].stat().st_size // 2)
        if kind in ("kill", "truncated"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "slow":
            time.sleep(SLOW)
        elif kind == "full disk":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write is an error
            resource.setrlimit(resource.RLIMIT_FSIZE, (LEFT_OF_DISK, resource.RLIM_INFINITY))
        elif kind == "wire":
            (self.folder / "cut").touch()  # whoever has started this process has the wire in hand
            time.sleep(0.5)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        line = {"step": trainer.global_step, "nbytes": pages * resource.getpagesize()}
        with (self.folder / f"memory {trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trainer.global_rank == 0:
            for old in by_age(self.folder)[:-KEPT]:
                old.unlink()


def by_age(folder: Path) -> list[Path]:
    """Checkpoints, the oldest first."""
    return sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))


def newest_that_opens(folder: Path) -> Path | None:
    for path in reversed(by_age(folder)):
        try:
            torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:
            print(f"{path.name} does not open: {type(error).__name__}", file=sys.stderr)
        else:
            return path
    return None


def work(strategy: str, folder: Path, epochs: int, plan: list[tuple[int, str]]) -> None:
    """One rank's life, from the newest checkpoint to the end or the next fault."""
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Faults(folder, plan),
            ModelCheckpoint(
                folder,
                "{step}",
                every_n_epochs=1,
                save_top_k=-1,
                save_on_train_epoch_end=True,
                enable_version_counter=False,  # one that does not open is written again
            ),
        ],
    )
    trainer.fit(Net(), ckpt_path=newest_that_opens(folder), weights_only=False)
    trainer.save_checkpoint(folder / "final.ckpt")


@contextmanager
def hosts() -> Iterator[tuple[Host, ...]]:
    with ExitStack() as stack:
        yield (Host(), Host()) if why_not() else stack.enter_context(two_hosts())


def run(strategy: str, folder: Path, epochs: int, plan: list[tuple[int, str]], timeout: float) -> int:
    """Train to the end, started again after each fault; the number of starts that it took."""
    folder.mkdir()
    (folder / "plan").write_text(json.dumps(plan))
    with hosts() as both:
        agents = []
        for number, host in enumerate(both):
            inside = [] if host.namespace is None else ["ip", "netns", "exec", host.namespace]
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{both[0].address}:29512", "--rdzv-id", "soak"]
            launch += ["--rdzv-conf", f"is_host={int(number == 0)}"]  # torchrun does not know a namespace's address
            # Two agents may start their workers at different times, and gloo then connects to one that is ending.
            launch += ["--max-restarts", str(5 * len(plan)), "--node-rank", str(number), "--local-addr", host.address]
            mine = [str(Path(__file__).resolve()), "--work", strategy, str(folder), "--epochs", str(epochs)]
            with (folder / f"log {number}").open("w") as log:
                agents.append(
                    subprocess.Popen(
                        [*inside, *launch, *mine],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env={**os.environ, "GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1"},
                    )
                )
        try:
            watch(agents, both, folder, timeout)
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
    if any(agent.returncode for agent in agents):
        tail = (folder / "log 0").read_text()[-3000:]
        raise RuntimeError(f"{strategy} did not come to its end; {folder / 'log 0'} ends with:\n{tail}")
    return 1 + sum(each.read_text() in ("kill", "full disk", "truncated") for each in folder.glob("done *"))


def watch(agents: list[Any], both: tuple[Host, ...], folder: Path, timeout: float) -> None:
    """Wait for the agents, and cut the wire when a rank asks for it."""
    end = time.monotonic() + timeout
    while any(agent.poll() is None for agent in agents):
        if time.monotonic() > end:
            raise RuntimeError(f"not done within {timeout:g} s; what the ranks said is in {folder}")
        if (folder / "cut").exists():
            (folder / "cut").unlink()
            wire = ["ip", "-n", str(both[0].namespace), "link", "set", "wire"]
            subprocess.run([*wire, "down"], check=True)
            time.sleep(CUT)
            subprocess.run([*wire, "up"], check=True)
        time.sleep(0.1)


def same(one: Any, other: Any) -> bool:
    """To the last bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def made_plan(n_steps: int, n_faults: int, seed: int) -> list[tuple[int, str]]:
    """Faults of all kinds in turn, at random steps after the first epoch."""
    kinds = [kind for kind in FAULTS if kind != "wire" or not why_not()]
    steps = sorted(random.Random(seed).sample(range(STEPS_AN_EPOCH, n_steps), n_faults))
    plan = [(step, kinds[n % len(kinds)]) for n, step in enumerate(steps)]
    return [(step - step % 2 if kind == "full disk" else step, kind) for step, kind in plan]


def soak(strategy: str, epochs: int, n_faults: int, seed: int, timeout: float, folder: Path) -> dict[str, Any]:
    plan = made_plan(epochs * STEPS_AN_EPOCH, n_faults, seed)
    run(strategy, folder / "undisturbed", epochs, [], timeout)
    starts = run(strategy, folder / "disturbed", epochs, plan, timeout)
    finals = [
        torch.load(folder / name / "final.ckpt", map_location="cpu", weights_only=False)
        for name in ("undisturbed", "disturbed")
    ]
    exact = all(same(*(final[key] for final in finals)) for key in ("state_dict", "optimizer_states", "global_step"))
    memory = [
        [json.loads(line)["nbytes"] for line in (folder / "undisturbed" / f"memory {rank}").read_text().splitlines()]
        for rank in range(2)
    ]
    tenth = max(1, epochs // 10)
    return {
        "strategy": strategy,
        "steps": epochs * STEPS_AN_EPOCH,
        "faults": {
            kind: sum(each.read_text() == kind for each in (folder / "disturbed").glob("done *")) for kind in FAULTS
        },
        "starts": starts,
        "exact": exact,
        "first_nbytes": max(max(its[tenth - 1 : 2 * tenth]) for its in memory),
        "last_nbytes": max(max(its[-tenth:]) for its in memory),
    }


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        f"| | steps | {' | '.join(FAULTS)} | starts | as undisturbed | MB a rank, first tenth | last |",
        "|---|---:|" + "---:|" * len(FAULTS) + "---:|---|---:|---:|",
    ]
    for line in lines:
        faults = " | ".join(str(line["faults"][kind]) for kind in FAULTS)
        exact = "to the last bit" if line["exact"] else "**no**"
        memory = f"{line['first_nbytes'] / 1e6:.0f} | {line['last_nbytes'] / 1e6:.0f}"
        rows.append(f"| {line['strategy']} | {line['steps']} | {faults} | {line['starts']} | {exact} | {memory} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strategy", choices=STRATEGIES, nargs="+", default=list(STRATEGIES))
    parser.add_argument("--epochs", type=int, default=200, help=f"of {STEPS_AN_EPOCH} steps")
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for a run")
    parser.add_argument("--work", nargs=2, metavar=("STRATEGY", "FOLDER"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        strategy, folder = chosen.work
        plan = [(step, kind) for step, kind in json.loads((Path(folder) / "plan").read_text())]
        work(strategy, Path(folder), chosen.epochs, plan)
        return
    lines = []
    for strategy in chosen.strategy:
        with tempfile.TemporaryDirectory() as folder:
            line = soak(strategy, chosen.epochs, chosen.faults, chosen.seed, chosen.timeout, Path(folder))
        print(json.dumps(line), flush=True)
        lines.append(line)
    print("\n" + table(lines))
    if not all(line["exact"] for line in lines):
        sys.exit("a run that was disturbed did not end as the undisturbed one")


if __name__ == "__main__":
    main()

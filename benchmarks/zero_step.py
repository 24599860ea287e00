"""What a step of each ZeRO stage takes, beside plain DDP, DDP with ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

    python -m benchmarks.zero_step --ranks 2 4
    python -m benchmarks.zero_step --quick

All ranks on this machine, one thread each, over loopback. The arms of one comparison live side by side in the same
ranks and take turns, a few steps at a time, so that whatever else the machine does falls on all of them. A step is
forward, backward, AdamW and zero_grad. DeepSpeed is there if it is installed, or lies aside (`pip install --target`)
and in PYTHONPATH. One JSON line a figure, the table as Markdown, and whether what is promised holds.
"""

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.hosts import Host, as_torchrun_tells_it, one_host, run_on
from benchmarks.models import MODELS, batches
from lightning_distkit.core.zero import DTensorOptimizer, ZeroOptimizer, shard_gradients, shard_parameters

ADAMW = {"lr": 1e-4}


def blocks(module: nn.Module) -> list[nn.Module]:
    """What FSDP2 and stage 3 wrap alike."""
    layers = getattr(module, "layers", None)
    return [each for each in (layers.layers if layers is not None else module) if list(each.parameters())]


def _training(model: nn.Module, optimizer: Any, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    return _training(DistributedDataParallel(module), torch.optim.AdamW(module.parameters(), **ADAMW), loss_of)


def redundancy(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **ADAMW)
    return _training(DistributedDataParallel(module), optimizer, loss_of)


def fsdp2(module: nn.Module, loss_of: Callable[[nn.Module], Tensor], reshard: bool) -> Callable[[], Tensor]:
    for block in blocks(module):
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(module, reshard_after_forward=reshard)
    return _training(module, torch.optim.AdamW(module.parameters(), **ADAMW), loss_of)


def stage_1(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    optimizer = ZeroOptimizer(torch.optim.AdamW(module.parameters(), **ADAMW))
    return _training(module, optimizer, loss_of)


def stage_2(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    optimizer = ZeroOptimizer(torch.optim.AdamW(module.parameters(), **ADAMW))
    return _training(module, shard_gradients(optimizer), loss_of)


def stage_3(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Callable[[], Tensor]:
    wrapped = set(blocks(module))
    shard_parameters(module, policy=lambda name, each: each in wrapped)
    return _training(module, DTensorOptimizer(torch.optim.AdamW(module.parameters(), **ADAMW), module), loss_of)


def deepspeed(module: nn.Module, loss_of: Callable[[nn.Module], Tensor], stage: int) -> Callable[[], Tensor]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    as_torchrun_tells_it(hosts=1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    # Or else it compiles one, for minutes, and sums in shared memory what the other arms send over loopback.
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config)

    def step() -> Tensor:
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


ARMS: dict[str, Callable[[nn.Module, Callable[[nn.Module], Tensor]], Callable[[], Tensor]]] = {
    "ddp": ddp,
    "ddp + ZeroRedundancyOptimizer": redundancy,
    "stage 1": stage_1,
    "stage 2": stage_2,
    "stage 3": stage_3,
    "fsdp2": lambda module, loss_of: fsdp2(module, loss_of, reshard=True),
    "fsdp2, not resharded": lambda module, loss_of: fsdp2(module, loss_of, reshard=False),
}


# Looked for and not imported: every rank imports this file, and those that need it import it in their turn.
if importlib.util.find_spec("deepspeed") is not None:
    ARMS |= {f"deepspeed {n}": lambda module, loss_of, n=n: deepspeed(module, loss_of, n) for n in (1, 2, 3)}


def compare(host: Host, model: str, names: list[str], n_rounds: int, n_steps: int) -> dict[str, list[float]]:
    """Seconds of each arm's steps on this rank."""
    torch.set_num_threads(1)
    make, make_batch, loss = MODELS[model]
    steps = {}
    for name in names:
        torch.manual_seed(0)
        module = make()
        torch.manual_seed(dist.get_rank())
        data = batches(make_batch)

        def loss_of(forward: nn.Module, data: Any = data) -> Tensor:
            inputs, wanted = next(data)
            return loss(forward(inputs), wanted)

        steps[name] = ARMS[name](module, loss_of)
        for _ in range(3):
            steps[name]()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(n_rounds):
        for name in names if n % 2 == 0 else reversed(names):
            last = steps[name]()  # not measured: it finds the caches full of another's
            dist.barrier()
            for _ in range(n_steps):
                begin = time.perf_counter()
                last = steps[name]()
                seconds[name].append(time.perf_counter() - begin)
            dist.barrier()
            if not last.isfinite():
                raise RuntimeError(f"{name} must train, but its loss is {last}")
    return seconds


def promises(model: str) -> list[tuple[str, str, str, float]]:
    """Of two arms, what the first one's time divided by the second one's must be."""
    faster = 2.0 if model == "mlp" else 1.3
    return [
        ("stage 1", "ddp", "at most", 1.1),
        ("stage 1", "ddp + ZeroRedundancyOptimizer", "at most", 1.0),
        ("stage 2", "ddp", "at most", 1.25),
        *(
            (peer, ours, "at least", faster)
            for ours in ("stage 1", "stage 2")
            for peer in ("fsdp2", f"deepspeed {ours[-1]}")
        ),
        ("fsdp2", "stage 3", "at least", 1.15),  # as fully_shard does it by default, which reshards
    ]


def verdicts(ms: dict[str, float], model: str, world_size: int) -> Iterator[str]:
    """A line for each promise whose arms have run."""
    for one, other, how, bound in promises(model):
        if one in ms and other in ms:
            value = ms[one] / ms[other]
            met = value <= bound if how == "at most" else value >= bound
            word = "met   " if met else "MISSED"
            yield f"{word} {model}, {world_size} ranks: {one} / {other} {value:.2f}, {how} {bound}"


def table(results: dict[tuple[str, int], dict[str, float]]) -> str:
    """An arm a row, a model and number of ranks a column: ms a step, and its share of DDP's."""
    arms = list(dict.fromkeys(name for ms in results.values() for name in ms))
    lines = [
        f"| | {' | '.join(f'{model}, {world_size} ranks' for model, world_size in results)} |",
        f"|---|{'---:|' * len(results)}",
    ]
    for name in arms:
        cells = [
            f"{ms[name]:.0f} ms" + (f", {ms[name] / ms['ddp']:.2f}" if "ddp" in ms else "") for ms in results.values()
        ]
        lines.append(f"| {f'**{name}**' if name.startswith('stage') else name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="that are measured in each round")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--quick", action="store_true", help="half the rounds")
    chosen = parser.parse_args()
    begin, results = time.monotonic(), {}
    n_rounds = max(2, chosen.rounds // 2) if chosen.quick else chosen.rounds
    for model, world_size in product(chosen.model, chosen.ranks):
        with one_host() as hosts:
            ranks = run_on(hosts, world_size, compare, model, chosen.arms, n_rounds, chosen.steps, timeout=900)
        # A step is over when the slowest rank is done.
        ms = results[model, world_size] = {
            name: 1e3 * statistics.median(max(of) for of in zip(*(rank[name] for rank in ranks), strict=True))
            for name in ranks[0]
        }
        for name, value in ms.items():
            print(json.dumps({"model": model, "ranks": world_size, "arm": name, "ms": value}), flush=True)
    print(f"\n{table(results)}\n")
    for (model, world_size), ms in results.items():
        for line in verdicts(ms, model, world_size):
            print(line)
    print(f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

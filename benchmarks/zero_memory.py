"""What a rank holds to train under each ZeRO stage, beside DDP, ZeroRedundancyOptimizer, FSDP2 and the formula.

    python -m benchmarks.zero_memory
    python -m benchmarks.zero_memory --model mlp --ranks 4

Bytes are counted at the CPU's allocator (`allocations`), on rank 0 and from before the model is made; the figures are
of the third step, with AdamW. The batch is so small that activations are: 1 row, or 1 sequence of 8 tokens. One JSON
line a figure, then a Markdown table a model: what is held of parameters, gradients and optimizer state when the
optimizer has stepped, the most that is held at once, and what `estimate_memory` says it is.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it also runs as a script
from benchmarks.allocations import Allocations, held_nbytes
from benchmarks.hosts import Host, one_host, run_on
from benchmarks.models import Transformer, mlp
from lightning_distkit.core.zero import ZeroOptimizer, estimate_memory, shard_gradients
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer
from lightning_distkit.core.zero.parameters import shard_parameters
from lightning_distkit.core.zero.policy import find_blocks

BUCKET_CAP_MB = 8.0  # of ours, so that several make a model
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(1, 1024)),
    "transformer": (lambda: Transformer(length=8), lambda: torch.randint(2048, (1, 8))),
}
WARM_UP = 2  # steps: the state is made in the first, DDP's buckets anew in the second

Arm = Callable[..., tuple[nn.Module, Optimizer]]


def ddp(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    return DistributedDataParallel(module), AdamW(module.parameters())


def redundancy(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: the import alone warns of torch's own jit

    return DistributedDataParallel(module), ZeroRedundancyOptimizer(module.parameters(), AdamW)


def stage_1(module: nn.Module, bucket_cap_mb: float = BUCKET_CAP_MB) -> tuple[nn.Module, Optimizer]:
    return module, ZeroOptimizer(AdamW, module.parameters(), bucket_cap_mb=bucket_cap_mb)


def stage_2(module: nn.Module, bucket_cap_mb: float = BUCKET_CAP_MB) -> tuple[nn.Module, Optimizer]:
    return module, shard_gradients(ZeroOptimizer(AdamW, module.parameters(), bucket_cap_mb=bucket_cap_mb))


def stage_3(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    shard_parameters(module)
    return module, DTensorOptimizer(AdamW(module.parameters()), module)


def fsdp2(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    for block in find_blocks(module).values():
        fully_shard(block)
    fully_shard(module)
    return module, AdamW(module.parameters())


@dataclass(frozen=True)
class Contender:
    name: str
    arm: Arm
    stage: int | None  # of the formula; None where it says nothing


CONTENDERS = (
    Contender("DDP", ddp, 0),
    Contender("DDP + ZeroRedundancyOptimizer", redundancy, None),
    Contender("**stage 1**", stage_1, 1),
    Contender("**stage 2**", stage_2, 2),
    Contender("**stage 3**", stage_3, 3),
    Contender("FSDP2", fsdp2, None),  # bare: its memory for gathering is not kept, and ours is
)


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds: of each kind when the optimizer has stepped, of all at the peak of the step."""

    parameters: int
    gradients: int  # stage 1: the whole ones and its shard of their means
    optimizer_state: int
    peak: int


def held_in_a_step(arm: Arm, make_module: Callable[[], nn.Module], make_batch: Callable[[], Tensor]) -> Held:
    """What this rank, a fresh process, holds to train ``arm(make_module())``, in a step after the first ones."""
    allocations = Allocations()
    module = make_module()
    forward, optimizer = arm(module)
    batch = make_batch()
    for _ in range(WARM_UP + 1):
        with allocations.section("step"):
            forward(batch).square().mean().backward()
            optimizer.step()
        gradients = held_nbytes(_gradients(module, optimizer))
        optimizer.zero_grad()
    parameters, state = held_nbytes(module.parameters()), held_nbytes(_state(optimizer))
    return Held(parameters, gradients, state, allocations["step"].peak)


def _gradients(module: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    pieces = optimizer.pieces() if isinstance(optimizer, ZeroOptimizer) else []
    return [each.grad for each in (*module.parameters(), *pieces) if each.grad is not None]


def _state(optimizer: Any) -> list[Tensor]:
    stepping = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has the one that steps inside
    return [value for its in stepping.state.values() for value in its.values() if isinstance(value, Tensor)]


def measured(host: Host, model: str, arm: Arm) -> Held:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return held_in_a_step(arm, *MODELS[model])


def formula(model: str, stage: int, world_size: int) -> dict[str, int]:
    with torch.device("meta"):
        module = MODELS[model][0]()
    each = estimate_memory(module, stage, world_size, AdamW, bucket_cap_mb=BUCKET_CAP_MB)
    gradients = each.gradients + each.reduced_gradients
    return asdict(Held(each.parameters, gradients, each.optimizer_state, each.total))


def table(lines: list[dict[str, Any]]) -> str:
    """A Markdown table a model, in MB: what was counted, and in brackets how many times the formula that is."""
    kinds = [*Held.__dataclass_fields__]
    head = "| | ranks | " + " | ".join(kind.replace("_", " ") for kind in kinds) + " | formula: peak |"
    tables = []
    for model in dict.fromkeys(line["model"] for line in lines):
        rows = [head, "| --- |" + " ---: |" * (len(kinds) + 2)]
        for ranks, arm in dict.fromkeys((line["ranks"], line["arm"]) for line in lines if line["model"] == model):
            of_arm = {
                line["figure"]: line
                for line in lines
                if (line["model"], line["ranks"], line["arm"]) == (model, ranks, arm)
            }
            row = [arm, str(ranks), *(f"{of_arm[kind]['value'] / 1e6:.1f}" for kind in kinds)]
            peak = of_arm["peak"]
            row.append(
                f"{peak['formula'] / 1e6:.1f} ({peak['value'] / peak['formula']:.2f})" if peak["formula"] else "-"
            )
            rows.append("| " + " | ".join(row) + " |")
        tables.append(f"{model}\n\n" + "\n".join(rows))
    return "\n\n".join(tables)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that namespaces are deleted
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    chosen = parser.parse_args()
    lines = []
    for model in MODELS if chosen.model == "all" else [chosen.model]:
        for ranks in chosen.ranks:
            for contender in CONTENDERS:
                with one_host() as hosts:
                    counted = run_on(hosts, ranks, measured, model, contender.arm, timeout=300)[0]
                expected = {} if contender.stage is None else formula(model, contender.stage, ranks)
                for figure, value in asdict(counted).items():
                    line = {"model": model, "ranks": ranks, "arm": contender.name, "figure": figure, "unit": "bytes"}
                    line |= {"value": value, "formula": expected.get(figure)}
                    print(json.dumps(line), flush=True)
                    lines.append(line)
    print("\n" + table(lines))


if __name__ == "__main__":
    main()

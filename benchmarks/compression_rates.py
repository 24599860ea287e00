"""Bytes of each layer, whole and as factors, beside the tables of the PowerSGD paper; exact, not timed.

    python -m benchmarks.compression_rates

The two models of Vogels et al., 2019 (https://arxiv.org/abs/1905.13727, appendix): ResNet-18 for CIFAR-10 and the LSTM
for WikiText-2. Only the shapes matter, so the gradients are random. They pass through `powerSGD_hook` itself, in a
world of one, and what it would send of each layer is read from its measurement. The paper compresses every matrix; our
hook, like torch's, leaves one whole where the factors would not save half (`min_compression_rate`), which is said where
it happens.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it also runs as a script
from lightning_distkit.core.compression import PowerSGDState, attach, powerSGD_hook

Shapes = dict[str, tuple[int, ...]]


def resnet18() -> Shapes:
    """Of the variant for images of 32 x 32: a stem of 3 x 3, ten classes."""
    shapes: Shapes = {"conv1": (64, 3, 3, 3)}
    n_before = 64
    for layer, n in enumerate((64, 128, 256, 512), 1):
        for block in (0, 1):
            first = n_before if block == 0 else n
            shapes[f"layer{layer}.{block}.conv1"] = (n, first, 3, 3)
            shapes[f"layer{layer}.{block}.conv2"] = (n, n, 3, 3)
            if first != n:
                shapes[f"layer{layer}.{block}.shortcut.0"] = (n, first, 1, 1)
        n_before = n
    shapes["linear"] = (10, 512)
    n_vectors = sum(2 * shape[0] for name, shape in shapes.items() if name != "linear") + 10
    return shapes | {"vectors": (n_vectors,)}  # weights and biases of the normalisations, bias of the last layer


def lstm() -> Shapes:
    """Three layers of 650; the decoder shares the encoder's matrix."""
    shapes: Shapes = {"encoder": (28869, 650)}
    for layer in range(3):
        shapes |= {f"rnn-ih-l{layer}": (2600, 650), f"rnn-hh-l{layer}": (2600, 650)}
    return shapes | {"vectors": (6 * 2600 + 28869,)}


# What the paper's tables say for r = 1, as they round it; the others follow from these by shape.
PAPER = {
    "resnet18": {
        "layer4.1.conv2": 461,
        "layer4.0.conv1": 419,
        "layer3.1.conv2": 230,
        "layer3.0.conv1": 209,
        "layer2.1.conv2": 115,
        "layer2.0.conv1": 105,
        "layer1.1.conv1": 58,
        "layer4.0.shortcut.0": 171,
        "layer3.0.shortcut.0": 85,
        "layer2.0.shortcut.0": 43,
        "linear": 10,
        "conv1": 19,
        "total": 243,
    },
    "lstm": {"encoder": 636, "rnn-ih-l0": 520, "rnn-hh-l0": 520, "total": 310},
}
MODELS = {"resnet18": resnet18, "lstm": lstm}


@dataclass(frozen=True)
class Line:
    """One layer, or the total, of one model at one r."""

    model: str
    r: int
    layer: str
    shape: tuple[int, ...]
    nbytes_whole: int
    nbytes_sent: int
    paper: int | None  # the paper's rate for r = 1

    @property
    def rate(self) -> float:
        return self.nbytes_whole / self.nbytes_sent


class Parameters(nn.Module):
    """Parameters of given shapes, each with a gradient of ones times a random number."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.names = {name.replace(".", "/"): name for name in shapes}
        self.all = nn.ParameterDict({key: nn.Parameter(torch.randn(shapes[name])) for key, name in self.names.items()})

    def forward(self) -> Tensor:
        return torch.stack([parameter.square().sum() for parameter in self.all.values()]).sum()


def lines(model: str, r: int) -> Iterator[Line]:
    """What our hook sends of each layer; needs a process group."""
    shapes = MODELS[model]()
    net = Parameters(shapes)
    ddp = DistributedDataParallel(net)
    # From the first step on, so that one is enough; how much is sent does not depend on the memory.
    state = PowerSGDState(None, r, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    attach(ddp, state, powerSGD_hook)
    state.measure()
    ddp().backward()
    assert state.last_measurement is not None
    layers = {net.names[key]: state.last_measurement.layers[parameter] for key, parameter in net.all.items()}
    for name, layer in layers.items():
        paper = PAPER[model].get(name)
        yield Line(model, r, name, shapes[name], layer.nbytes_whole, layer.nbytes_sent, paper)
    whole, sent = (sum(getattr(layer, what) for layer in layers.values()) for what in ("nbytes_whole", "nbytes_sent"))
    yield Line(model, r, "total", (), whole, sent, PAPER[model]["total"])


def world_of_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def table(of_model: list[Line], rs: list[int]) -> str:
    """One Markdown table: a row a layer, its rate at each r and the paper's."""
    rows = [["layer", "shape", "kB whole", *(f"x fewer, r = {r}" for r in rs), "paper, / r"]]
    rows.append(["---", "---"] + ["---:"] * (len(rs) + 2))
    for layer in dict.fromkeys(line.layer for line in of_model):
        at = {line.r: line for line in of_model if line.layer == layer}
        first = at[rs[0]]
        rates = ["whole" if at[r].nbytes_sent == first.nbytes_whole else f"{at[r].rate:.1f}" for r in rs]
        shape = " x ".join(map(str, first.shape)) or "-"
        rows.append([layer, shape, f"{first.nbytes_whole / 1024:.0f}", *rates, str(first.paper or "-")])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--r", type=int, nargs="+", default=[1, 2, 4], help="matrix_approximation_rank")
    rs: list[int] = parser.parse_args().r
    world_of_one()
    for model in MODELS:
        of_model = [line for r in rs for line in lines(model, r)]
        for line in of_model:
            sys.stdout.write(json.dumps(asdict(line) | {"rate": line.rate}) + "\n")
        off = [line for line in of_model if line.r == 1 and line.paper not in (None, math.floor(line.rate + 0.5))]
        print(f"\n{model}\n\n{table(of_model, rs)}\n")
        print(f"different from the paper at r = 1: {', '.join(line.layer for line in off) or 'nothing'}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

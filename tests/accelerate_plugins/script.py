"""A user's script that knows plain Accelerate only; the tests put the runner before it.

Usage: script.py OUTPUT [--made_by subclass|state_first]
"""

import argparse
import json
import pickle
import sys

import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mine(Accelerator):
    """A subclass, as frameworks on top of Accelerate have."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.own = self.num_processes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--made_by", default="")
    args = parser.parse_args()
    if args.made_by == "state_first":
        PartialState()
    accelerator = Mine() if args.made_by == "subclass" else Accelerator()
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 8, generator=random), torch.randn(24, 1, generator=random))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 3))
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        said = {
            "losses": losses,
            "weights": [each.tolist() for each in state.values()],
            "num_processes": accelerator.num_processes,
            "class": type(accelerator).__name__,
            "plugin": type(getattr(accelerator, "plugin", None)).__name__,
            "argv": sys.argv[1:],
            "pickles": pickle.loads(pickle.dumps(Mine)) is Mine,
            "own": getattr(accelerator, "own", None),
        }
        with open(args.output, "w") as file:  # noqa: PTH123
            json.dump(said, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""The task on two processes with compressed gradients: `baseline.py` with the marked lines changed.

Run: torchrun --nproc-per-node 2 examples/plain/powersgd.py
"""

import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# <-- changed: from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from lightning_distkit.core.compression import PowerSGDState, powerSGD_hook

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task


def main() -> None:
    task.use_loopback()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, validation = task.read_rows()
    loader = DataLoader(train, task.BATCH, sampler=DistributedSampler(train), drop_last=True)
    model = DistributedDataParallel(task.GPT())
    state = PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=max(2, task.STEPS // 20)
    )  # <-- changed
    model.register_comm_hook(state, powerSGD_hook)  # <-- changed
    optimizer, schedule = task.make_optimizer(model)

    for step, batch in enumerate(islice(loader, task.STEPS), 1):
        loss = task.loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step:4} of {task.STEPS}: training loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        with torch.no_grad():
            losses = [task.loss_of(model.module, rows) for rows in validation.split(4 * task.BATCH)]
        print(f"validation loss {torch.stack(losses).mean():.3f}")
        print(f"sent by each rank: {state.ledger.total.nbytes / 1e6:.1f} MB")  # <-- changed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

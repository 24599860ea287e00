"""The task on two processes with ZeRO stage 2: `baseline.py` with the marked lines changed.

Run: torchrun --nproc-per-node 2 examples/plain/zero.py
"""

import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

# <-- changed: from torch.nn.parallel import DistributedDataParallel
from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task


def main() -> None:
    task.use_loopback()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, validation = task.read_rows()
    loader = DataLoader(train, task.BATCH, sampler=DistributedSampler(train), drop_last=True)
    model = task.GPT()  # <-- changed: no wrapper
    optimizer, schedule = task.make_optimizer(model)
    optimizer = shard_gradients(ZeroOptimizer(optimizer))  # <-- changed: shard_gradients makes stage 1 stage 2

    for step, batch in enumerate(islice(loader, task.STEPS), 1):
        loss = task.loss_of(model, batch)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # <-- changed: no rank has all gradients
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step:4} of {task.STEPS}: training loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        with torch.no_grad():
            losses = [task.loss_of(model, rows) for rows in validation.split(4 * task.BATCH)]
        print(f"validation loss {torch.stack(losses).mean():.3f}")
        state = sum(each.nbytes for its in optimizer.state.values() for each in its.values())  # <-- changed
        print(f"optimizer state held by this rank: {state / 1e6:.1f} MB")  # <-- changed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

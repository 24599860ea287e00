"""The task on two processes as a pipeline: `baseline.py` with the marked lines changed.

Run: torchrun --nproc-per-node 2 examples/plain/pipeline.py
"""

import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

# <-- changed: from torch.nn.parallel import DistributedDataParallel
from lightning_distkit.core.pipeline import DistributedPipe

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task


def main() -> None:
    task.use_loopback()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, validation = task.read_rows()
    # <-- changed: no sampler, as all ranks work on the same rows; twice as many, as two ranks of DDP have together
    loader = DataLoader(train, 2 * task.BATCH, shuffle=True, drop_last=True)
    model = DistributedPipe(task.GPT(), chunks=4, checkpoint="never")  # <-- changed
    optimizer, schedule = task.make_optimizer(model)

    for step, batch in enumerate(islice(loader, task.STEPS), 1):
        loss = task.loss_of(model, batch)
        loss.backward()
        model.clip_grad_norm_(1.0)  # <-- changed: no rank has all gradients
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step:4} of {task.STEPS}: training loss {loss.item():.3f}", flush=True)

    with torch.no_grad():  # <-- changed: on every rank
        losses = [task.loss_of(model, rows) for rows in validation.split(4 * task.BATCH)]
    if dist.get_rank() == 0:
        print(f"validation loss {torch.stack(losses).mean():.3f}")
    print(f"rank {dist.get_rank()} holds {sum(each.numel() for each in model.parameters())} parameters")  # <-- changed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The task with Accelerate on two processes, each with half of the layers: `baseline.py` with the marked lines changed.

Run: accelerate launch --multi_gpu --num_processes 2 examples/with_accelerate/pipeline.py
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from accelerate_plugins import Accelerator, PipePlugin  # <-- changed

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task


def main() -> None:
    task.use_loopback()
    set_seed(0)
    accelerator = Accelerator(cpu=True, plugin=PipePlugin(chunks=4))  # <-- changed
    train, validation = task.read_rows()
    model = task.GPT()
    # Accelerate steps a schedule once for each process, so that its steps are rows seen, as in one process.
    optimizer, schedule = task.make_optimizer(model, task.STEPS * accelerator.num_processes)
    model, optimizer, schedule, train, validation = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(train, 2 * task.BATCH, shuffle=True, drop_last=True),  # <-- changed: one batch for both processes
        DataLoader(validation, 4 * task.BATCH),
    )

    for step, batch in enumerate(islice(train, task.STEPS), 1):
        with accelerator.accumulate(model):
            loss = task.loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            accelerator.print(f"step {step:4} of {task.STEPS}: training loss {loss.item():.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(task.loss_of(model, rows).repeat(len(rows))) for rows in validation]
    accelerator.print(f"validation loss {torch.cat(losses).mean():.3f}")
    held = sum(each.numel() for each in model.parameters())  # <-- changed
    accelerator.print(f"parameters held by this rank: {held / 1e6:.2f} million")  # <-- changed


if __name__ == "__main__":
    main()

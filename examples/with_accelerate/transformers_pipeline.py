"""A small GPT-2 of Hugging Face Transformers, its layers on two processes, learns Python; nothing is downloaded.

Run: accelerate launch --multi_gpu --num_processes 2 examples/with_accelerate/transformers_pipeline.py

Embedding and head, which is tied to it, are on both; each has half of the layers, and runs this loop as it is.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate_plugins import Accelerator, PipePlugin

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Rows end where a line ends: what follows is padding, which is masked and does not count in the loss."""
    ids = torch.stack(rows)[:, :-1].long()
    is_end = (ids == ord("\n")) & (torch.arange(ids.shape[1]) >= ids.shape[1] // 2)
    mask = (is_end.cumsum(1) - is_end.long()) == 0
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.where(mask, torch.tensor(-100))}


def main() -> None:
    task.use_loopback()
    set_seed(0)
    accelerator = Accelerator(cpu=True, plugin=PipePlugin(chunks=4))
    train, validation = task.read_rows()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=task.VOCABULARY,
            n_positions=task.CONTEXT,
            n_embd=128,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    optimizer, schedule = task.make_optimizer(model, task.STEPS)
    model, optimizer, schedule, train, validation = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(train, 2 * task.BATCH, shuffle=True, drop_last=True, collate_fn=collate),
        DataLoader(validation, 4 * task.BATCH, collate_fn=collate),
    )

    for step, batch in enumerate(islice(train, task.STEPS), 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            accelerator.print(f"step {step:4} of {task.STEPS}: training loss {loss.item():.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**rows).loss.repeat(len(rows["labels"]))) for rows in validation]
    accelerator.print(f"validation loss {torch.cat(losses).mean():.3f}")
    held = sum(each.numel() for each in model.parameters() if not each.is_meta)
    accelerator.print(f"parameters held by this rank: {held / 1e6:.2f} million")


if __name__ == "__main__":
    main()

"""A user's script in the way of Accelerate's own ``nlp_example``: a Transformers model, attention masks, a metric.

It knows no plugin; model and text are made of what is on the machine. Usage: nlp_script.py OUTPUT [--cpu]
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

LENGTH = 32


def rows() -> list[tuple[bytes, int]]:
    """Lines of the standard library's sources; whether each has an assignment."""
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    lines = [line.strip()[:LENGTH] for line in text.splitlines() if len(line.strip()) > 4]
    return [(line, int(b" = " in line)) for line in lines[::12]]


def collate(batch: list[tuple[bytes, int]]) -> dict[str, torch.Tensor]:
    longest = max(len(line) for line, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (line, _) in enumerate(batch):
        ids[row, : len(line)] = torch.tensor(list(line))
        mask[row, : len(line)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in batch])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)
    set_seed(0)
    data = rows()
    train = DataLoader(data[40:], shuffle=True, collate_fn=collate, batch_size=8)
    evaluation = DataLoader(data[:40], collate_fn=collate, batch_size=16)
    config = BertConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer = AdamW(params=model.parameters(), lr=3e-3, eps=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, len(train) * 2 // 2)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(model, optimizer, train, evaluation, schedule)

    losses, accuracies = [], []
    for _ in range(2):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(outputs.loss.detach(), "mean")))
        model.eval()
        right = seen = 0
        for batch in evaluation:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right, seen = right + int((predictions == labels).sum()), seen + len(labels)
        accuracies.append(right / seen)
    if accelerator.is_main_process:
        said = {"losses": losses, "accuracies": accuracies, "seen": seen, "n": accelerator.num_processes}
        args.output.write_text(json.dumps(said))
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""The same over two pipelines of two processes, each with half of the data: the marked lines are changed.

Source: "Training Transformer models using Distributed Data Parallel and Pipeline Parallelism",
https://pytorch.org/tutorials/advanced/ddp_pipeline.html

Run: torchrun --nproc-per-node 4 examples/plain/transformer_data_parallel_pipeline.py
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh  # <-- changed
from torch.nn import functional as F

from lightning_distkit.core.pipeline import DistributedPipe

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task

BPTT = 35  # time steps that the model sees at once
COLUMNS = 20  # sequences side by side
D_MODEL, N_HEADS, D_HIDDEN, N_LAYERS, DROPOUT = 128, 4, 256, 4, 0.1


class Encoder(nn.Module):
    """Tokens (batch, time) to vectors (batch, time, D_MODEL), with sines that tell the position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.VOCABULARY, D_MODEL)
        self.dropout = nn.Dropout(DROPOUT)
        position = torch.arange(BPTT).unsqueeze(1)
        rate = torch.exp(torch.arange(0, D_MODEL, 2) * (-math.log(10000.0) / D_MODEL))
        table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=-1)
        self.register_buffer("table", table.flatten(1))  # (BPTT, D_MODEL)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) * math.sqrt(D_MODEL) + self.table[: tokens.shape[1]])


class Layer(nn.TransformerEncoderLayer):
    """One that sees what is before alone."""

    def __init__(self) -> None:
        super().__init__(D_MODEL, N_HEADS, D_HIDDEN, DROPOUT, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, src_mask=mask, is_causal=True)


def batchify(rows: Tensor) -> Tensor:
    """The text as COLUMNS long sequences (COLUMNS, time), side by side."""
    text = rows[:, :-1].flatten().long()
    return text[: len(text) // COLUMNS * COLUMNS].view(COLUMNS, -1)


def get_batch(text: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Piece ``n`` and what follows each of its tokens, (COLUMNS, BPTT) each; the last piece is shorter."""
    begin = n * BPTT
    end = min(begin + BPTT, text.shape[1] - 1)
    return text[:, begin:end], text[:, begin + 1 : end + 1]


def evaluate(model: DistributedPipe, text: Tensor) -> float:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for n in range(min(20, math.ceil((text.shape[1] - 1) / BPTT))):
            tokens, targets = get_batch(text, n)
            logits = model(tokens)
            total += targets.numel() * F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
            count += targets.numel()
    return total / count


def main() -> None:
    task.use_loopback()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, validation = map(batchify, task.read_rows())
    train = train.chunk(2)[dist.get_rank() // 2]  # <-- changed: sequences are split over the pipelines
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))  # <-- changed
    layers = nn.Sequential(Encoder(), *(Layer() for _ in range(N_LAYERS)), nn.Linear(D_MODEL, task.VOCABULARY))
    model = DistributedPipe(layers, chunks=8, mesh=mesh)  # <-- changed
    optimizer, schedule = task.make_optimizer(model)

    for step in range(task.STEPS):
        model.train()
        tokens, targets = get_batch(train, step % (train.shape[1] // BPTT))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1:4} of {task.STEPS}: training loss {loss.item():.3f}", flush=True)

    value = evaluate(model, validation)
    if dist.get_rank() == 0:
        print(f"validation loss {value:.3f}, perplexity {math.exp(value):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

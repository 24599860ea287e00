"""The job that all examples share: a small byte-level GPT learns Python from the standard library's own sources.

Plain torch and no download; `lightning_task.py` wraps it for the Trainer.
"""

import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # every byte is a token
CONTEXT = 128
BATCH = 8  # rows per rank and step
STEPS = 400
LEARNING_RATE = 4e-3
N_TRAIN, N_VALIDATION = 27_000, 512  # rows at most


def read_rows() -> tuple[Tensor, Tensor]:
    """Training and validation rows, (n, CONTEXT + 1) uint8, the same for one version of Python.

    Every tenth file is for validation, and of its rows evenly spaced ones are taken.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if len(files) < 20:
        raise FileNotFoundError(f"the examples read the standard library's sources; only {len(files)} are here")
    train = _rows(b"\n".join(file.read_bytes() for i, file in enumerate(files) if i % 10 != 9))
    validation = _rows(b"\n".join(file.read_bytes() for i, file in enumerate(files) if i % 10 == 9))
    every = max(1, len(validation) // N_VALIDATION)
    return train[:N_TRAIN], validation[::every][:N_VALIDATION]


def _rows(text: bytes) -> Tensor:
    # Where a row ends the next begins: they share one byte, which the one predicts and the other reads.
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)


def use_loopback() -> None:
    """Have gloo talk within this machine: it looks for the interface by the host's name, which some machines lack."""
    if sys.platform in ("linux", "darwin"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with a residual: (batch, time, d_model) to the same."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (batch, heads, time, d_model / heads)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Embedding(nn.Module):
    """Tokens (batch, time) to vectors (batch, time, d_model): each byte, the byte before it, and where it stands."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, d_model)
        self.position = nn.Parameter(torch.zeros(CONTEXT, d_model))
        nn.init.normal_(self.token.weight, std=0.5)
        nn.init.normal_(self.position, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        # Attention finds the byte before only after some hundred steps; given at once, a short run gets further.
        before = F.pad(x, (0, 0, 1, 0))[:, :-1].roll(x.shape[-1] // 2, dims=-1)
        return x + before + self.position[: tokens.shape[1]]


class GPT(nn.Sequential):
    """Tokens (batch, time) to logits (batch, time, VOCABULARY). One list of layers, so that a pipeline can split it."""

    def __init__(self, d_model: int = 128, n_blocks: int = 2, n_heads: int = 4) -> None:
        super().__init__(
            Embedding(d_model),
            *(Block(d_model, n_heads) for _ in range(n_blocks)),
            nn.LayerNorm(d_model),
            nn.Linear(d_model, VOCABULARY),
        )


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy, in nats, of each next byte in rows (batch, CONTEXT + 1)."""
    tokens = rows.long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(
    model: nn.Module, n_steps: int = STEPS
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """The optimizer, and its schedule by steps: a warm-up over 5 % of them, then linearly down to a tenth."""
    warm_up = max(1, n_steps // 20)

    def share(step: int) -> float:
        return min((step + 1) / warm_up, 1.0 - 0.9 * (step - warm_up) / max(1, n_steps - warm_up))

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)

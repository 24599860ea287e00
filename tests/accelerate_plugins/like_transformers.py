"""A model with the traits of a Transformers model, in plain torch: what a pipe has to cope with.

Layers in an `nn.ModuleList` that are called with keyword arguments, a mask of rows and positions that are the same for
all; some return tuples; a head tied to the embedding; an output that is a dataclass with the loss in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS = 32, 16, 2


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Layer(nn.Module):
    """Self-attention and a perceptron: (n_rows, time, WIDTH) to the same, alone or in a tuple."""

    def __init__(self, gives_tuple: bool, dropout: float) -> None:
        super().__init__()
        self.gives_tuple = gives_tuple
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, *, positions: tuple[Tensor, Tensor], scale: float
    ) -> Any:
        cos, sin = positions  # (time, WIDTH), of no rows
        x = hidden_states * cos + hidden_states.flip(-1) * sin
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=scale)
        hidden_states = hidden_states + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        hidden_states = hidden_states + self.mlp(hidden_states)
        return (hidden_states, None) if self.gives_tuple else hidden_states


class Decoder(nn.Module):
    def __init__(self, n_layers: int, gives_tuple: bool, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(gives_tuple, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        time = input_ids.shape[1]
        hidden: Any = self.embed(input_ids)
        mask = attention_mask[:, None, None, :].bool() & torch.ones(time, time, dtype=torch.bool).tril()  # (n, 1, t, t)
        angles = torch.arange(time)[:, None] / torch.arange(1, WIDTH + 1)
        for layer in self.layers[: len(self.layers)]:
            hidden = layer(hidden, mask, positions=(angles.cos(), angles.sin()), scale=0.3)
            if layer.gives_tuple:
                hidden = hidden[0]
        normed: Tensor = self.norm(hidden)
        return normed


class LanguageModel(nn.Module):
    """The decoder and a head that is the embedding; ``model(input_ids=, attention_mask=, labels=)``."""

    def __init__(self, n_layers: int = 5, gives_tuple: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(n_layers, gives_tuple, dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.model.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(self.model(input_ids, attention_mask=attention_mask))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return Output(loss, logits)


def batch(number: int, n_rows: int = 6, time: int = 7) -> dict[str, Tensor]:
    """Rows of different lengths: padded, masked, and not counted in the loss."""
    random = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (n_rows, time), generator=random)
    lengths = torch.randint(3, time + 1, (n_rows,), generator=random)
    mask = (torch.arange(time) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(mask.bool(), torch.tensor(-100))}

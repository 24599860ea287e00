"""The three models that benchmarks train, each with batches of made-up data small enough for one thread a rank."""

from collections.abc import Callable, Iterator
from itertools import cycle, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def _norm(n_channels: int) -> nn.Module:
    """Batch normalisation without running statistics: DDP would broadcast those in every step, with any hook alike."""
    return nn.BatchNorm2d(n_channels, track_running_stats=False)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside the identity, or beside a 1x1 convolution where the shape changes."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            _norm(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            _norm(n_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), _norm(n_out))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu(self.body(x) + self.shortcut(x))
        return out


class Transformer(nn.Module):
    """Embedding, encoder layers, output layer; tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, n_tokens: int = 2048, width: int = 256, n_layers: int = 6, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(n_tokens, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, n_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.layers(self.tokens(tokens) + self.positions))
        return logits


def mlp() -> nn.Module:
    """12 x Linear(1024, 1024), He's initialisation so that gradients keep their size from layer to layer."""
    layers: list[nn.Module] = []
    for _ in range(12):
        linear = nn.Linear(1024, 1024)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def resnet18() -> nn.Module:
    """The shape of ResNet-18, 10 classes: 11.2 million parameters, most of them in 3x3 convolutions of 512 channels."""
    widths = (64, 64, 128, 256, 512)
    blocks: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        blocks += [ResidualBlock(n_in, n_out, 1 if n_in == n_out else 2), ResidualBlock(n_out, n_out, 1)]
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), _norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _regression() -> Batch:
    return torch.randn(64, 1024), torch.randn(64, 1024)


def _images() -> Batch:
    return torch.randn(4, 3, 64, 64), torch.randint(10, (4,))


def _text() -> Batch:
    return torch.randint(2048, (2, 64)), torch.randint(2048, (2, 64))


def _cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Callable[[Tensor, Tensor], Tensor]]] = {
    "mlp": (mlp, _regression, F.mse_loss),
    "resnet18": (resnet18, _images, _cross_entropy),
    "transformer": (Transformer, _text, _cross_entropy),
}


def batches(make: Callable[[], Batch], n_batches: int = 4) -> Iterator[Batch]:
    """The same few batches again and again, so that making them costs no step anything."""
    return cycle([make() for _ in range(n_batches)])

"""A U-Net over Pipe: each level on the way down stashes what its counterpart on the way up pops, past all in between.

It learns to find discs in noise. The layers are spread over two GPUs if there are, or else are on one, or the CPU.

Run: python examples/plain/unet_skips.py
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_distkit.core.pipeline import Pipe
from lightning_distkit.core.pipeline.skip import Namespace, pop, skippable, stash

WIDTH = 32  # of an image
BATCH = 8
STEPS = 40
Steps = Generator[Any, Any, Tensor]


def convolution(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))


@skippable(stash=["level"])
class Down(nn.Module):
    """(batch, n_in, width, width) to (batch, n_out, width / 2, width / 2)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.convolution = convolution(n_in, n_out)

    def forward(self, x: Tensor) -> Steps:
        x = self.convolution(x)
        yield stash("level", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["level"])
class Up(nn.Module):
    """(batch, n_in, width / 2, width / 2) and its level's (batch, n_out, width, width) to the latter's shape."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.convolution = convolution(n_in + n_out, n_out)

    def forward(self, x: Tensor) -> Steps:
        level = yield pop("level")
        return self.convolution(torch.cat([F.interpolate(x, scale_factor=2), level], dim=1))


def unet(widths: tuple[int, ...] = (8, 16, 32)) -> nn.Sequential:
    """Images (batch, 1, width, width) to logits of the same shape."""
    down, up = [], []
    for n_in, n_out, n_deeper in zip((1, *widths), widths, (*widths[1:], widths[-1]), strict=False):
        level = Namespace()  # as all levels use one name
        down.append(Down(n_in, n_out).isolate(level))
        up.append(Up(n_deeper, n_out).isolate(level))
    return nn.Sequential(*down, convolution(widths[-1], widths[-1]), *reversed(up), nn.Conv2d(widths[0], 1, 1))


def scenes(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images, and masks of the discs in them, both (n, 1, WIDTH, WIDTH)."""
    centre = torch.rand(n, 3, 2, 1, 1, generator=generator) * WIDTH  # three discs in each
    radius = 2 + torch.rand(n, 3, 1, 1, generator=generator) * WIDTH / 8
    where = torch.stack(torch.meshgrid(torch.arange(WIDTH), torch.arange(WIDTH), indexing="ij"))
    masks = ((where - centre).norm(dim=2) < radius).any(1, keepdim=True).float()
    return masks + torch.randn(masks.shape, generator=generator), masks


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = unet()
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())[:2]] or [torch.device("cpu")]
    for n, layer in enumerate(model):
        layer.to(devices[n * len(devices) // len(model)])
    pipe = Pipe(model, chunks=4, deferred_batch_norm=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-2)

    for step in range(1, STEPS + 1):
        images, masks = scenes(BATCH, generator)
        logits = pipe(images.to(devices[0])).local_value()
        loss = F.binary_cross_entropy_with_logits(logits, masks.to(logits.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:3} of {STEPS}: training loss {loss.item():.3f}", flush=True)

    pipe.eval()
    images, masks = scenes(50, generator)
    with torch.no_grad():
        found = pipe(images.to(devices[0])).local_value().cpu() > 0
    both, either = (found & (masks > 0)).sum(), (found | (masks > 0)).sum()
    print(f"discs found: intersection over union {both / either:.2f}")


if __name__ == "__main__":
    main()

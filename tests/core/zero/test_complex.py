"""Complex parameters are trained and clipped as in one process; by value, as there, they cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients
from tests.ranks import run_ranks

CLIP = 0.5


class Net(nn.Module):
    """Complex and real ones, and one that rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(7, 3, dtype=dtype, generator=generator) for dtype in (torch.complex64, torch.float32)]
        self.spectrum, self.real = (nn.Parameter(each) for each in made)
        self.on_rank_0 = nn.Parameter(torch.randn(5, dtype=torch.complex128, generator=generator))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        loss = (self.spectrum * x).abs().square().sum() + (self.spectrum.conj() * self.real).imag.sum()
        return loss + self.on_rank_0.abs().square().sum() if rank == 0 else loss


def trained(stage: int, norm_type: float) -> tuple[list[Tensor], list[float]]:
    """Stage 0 is one process that does what all ranks would."""
    module, ranks = Net(), range(dist.get_world_size()) if stage == 0 else [dist.get_rank()]
    plain = torch.optim.Adam(module.parameters(), 0.1)
    optimizer: Any = plain if stage == 0 else ZeroOptimizer(plain, bucket_cap_mb=1e-4)
    if stage == 2:
        shard_gradients(optimizer)
    norms = []
    for n in range(3):
        for rank in ranks:
            x = torch.randn(7, 3, generator=torch.Generator().manual_seed(10 * n + rank))
            (module(x, rank) / (len(ranks))).backward()
        if stage == 0:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP, norm_type)))
        else:
            norms.append(float(optimizer.clip_grad_norm_(CLIP, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()], norms


def both(stage: int, norm_type: float) -> tuple[Any, Any]:
    return trained(stage, norm_type), trained(0, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
@pytest.mark.parametrize("stage", [1, 2])
def test_complex_parameters_are_clipped_and_trained_as_by_torch(stage: int, norm_type: float) -> None:
    for (params, norms), (wanted, wanted_norms) in run_ranks(3, both, stage, norm_type):
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        assert min(norms) > CLIP
        torch.testing.assert_close(params, wanted, rtol=1e-5, atol=1e-6)


def clipped_by_value(stage: int) -> None:
    module = Net()
    optimizer: Any = ZeroOptimizer(torch.optim.Adam(module.parameters(), 0.1))
    if stage == 2:
        shard_gradients(optimizer)
    module(torch.ones(7, 3), dist.get_rank()).backward()
    with pytest.raises(ValueError, match=r"must be real, got torch\.complex128 and torch\.complex64; clip by norm"):
        optimizer.clip_grad_value_(CLIP)


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_complex_gradients_by_value_is_refused_on_every_rank(stage: int) -> None:
    run_ranks(2, clipped_by_value, stage)

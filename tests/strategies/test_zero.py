"""Lightning trains with ZeRO as it does with plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelPruning,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_distkit import ZeroStrategy
from tests.ranks import run_ranks
from tests.strategies.modules import Net as PlainNet
from tests.strategies.modules import parameters, trainer

STAGES = [1, 2, 3]


def strategy_for(stage: int) -> Any:
    return (
        ZeroStrategy(stage, bucket_cap_mb=None if stage == 3 else 1e-3) if stage else "ddp_find_unused_parameters_true"
    )


class Net(PlainNet):
    """Batch normalisation, weight-decay groups and a scheduler; remembers the norm that clipping is to find."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.net.insert(0, nn.BatchNorm1d(16))  # not behind a bias, whose gradient would then be rounding alone
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([each.to(self.dtype) for each in batch], batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step([each.to(self.dtype) for each in batch], batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if hasattr(optimizer, "grad_norm"):
            self.norms.append(float(optimizer.grad_norm()))
        else:
            params = (p for group in optimizer.param_groups for p in group["params"])
            self.norms.append(float(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])))

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "step"}
        ]


class Unscheduled(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Manual(Net):
    """Two optimizers, each for its own layers and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(16, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, part in ((first, self.net), (second, self.other)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((part(batch[0]) - batch[1]).square().mean())
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-2), torch.optim.SGD(
            self.other.parameters(), 0.1, momentum=0.9
        )


def random_data(rank: int, n_batches: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1 + rank)
    return torch.randn(4 * n_batches, 16, generator=random), torch.randn(4 * n_batches, 4, generator=random)


class Adversarial(Net):
    """One network's loss is by way of the other, which has a loss of its own; a forward serves two backwards."""

    toggles = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        makes, judges = self.optimizers()
        made = self.net(batch[0])
        self.minimize(judges, lambda: self.judge(made.detach()).square().mean() - self.judge(batch[1]).mean())
        self.minimize(makes, lambda: -self.judge(made).mean())
        if batch_idx % 2 == 1:
            self.minimize(makes, lambda: (self.net(batch[0]) - batch[1]).square().mean())

    def minimize(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss())
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-2), torch.optim.SGD(self.judge.parameters(), 0.1)


class Toggling(Adversarial):
    toggles = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        makes, judges = self.optimizers()
        self.minimize(judges, lambda: self.judge(self.net(batch[0])).mean() - self.judge(batch[1]).mean())
        self.minimize(makes, lambda: (self.judge(self.net(batch[0])) - 1).square().mean())


class WithGain(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


KINDS: dict[str, tuple[type[Net], Callable[[], dict[str, Any]]]] = {
    "plain": (Net, dict),
    "accumulation": (Net, lambda: {"accumulate_grad_batches": 2}),
    "accumulation by schedule": (
        Net,
        lambda: {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 3})], "max_epochs": 2},
    ),
    "bf16-mixed": (Net, lambda: {"precision": "bf16-mixed"}),
    "16-mixed": (
        Net,
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]},
    ),
    "bf16-true": (Net, lambda: {"precision": "bf16-true"}),
    "64-true": (Net, lambda: {"precision": "64-true"}),
    "clip norm": (Net, lambda: {"gradient_clip_val": 0.1}),
    "bf16-mixed, clipped": (Net, lambda: {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "clip value": (Net, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manual": (Manual, dict),
    "manual, adversarial": (Adversarial, dict),
    "manual, adversarial, toggled": (Toggling, dict),
    "manual, with parameters in no child": (WithGain, dict),
    "early stopping": (Net, lambda: {"callbacks": [EarlyStopping("val_loss", patience=0)], "max_epochs": 3}),
    "pruning": (
        Net,
        lambda: {
            "callbacks": [ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)],
            "max_epochs": 2,
        },
    ),
    "overfit": (Net, lambda: {"overfit_batches": 2, "max_epochs": 2}),
}


def trained(kind: str, stage: int, folder: Path) -> tuple[Tensor, list[float], dict[str, Tensor]]:
    cls, arguments = KINDS[kind]
    net = cls()
    fit = trainer(strategy_for(stage), folder, **arguments())
    fit.fit(net)
    state = {name: value for name, value in net.state_dict().items() if "num_batches" not in name}
    return parameters(net), net.norms, state


REFUSED_IN_STAGE_3 = {
    "manual, with parameters in no child": "parameters that no block has are whole for one only; here those are gain:",
    "pruning": "ModelPruning masks whole parameters, and in stage 3 no rank has them: use stage 2",
}


def all_refused(folder: Path) -> dict[str, str]:
    said = {}
    for kind in REFUSED_IN_STAGE_3:
        with pytest.raises(MisconfigurationException) as error:
            trained(kind, 3, folder)
        said[kind] = str(error.value)
    return said


def test_what_cannot_work_in_stage_3_is_refused_at_once(tmp_path: Path) -> None:
    for said in run_ranks(2, all_refused, tmp_path):
        for kind, text in REFUSED_IN_STAGE_3.items():
            assert text in said[kind]


def trained_by_each(kind: str, stages: list[int], folder: Path) -> dict[int, Any]:
    return {stage: trained(kind, stage, folder) for stage in stages}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_equals_ddps_in_every_stage(kind: str, tmp_path: Path) -> None:
    stages = [stage for stage in STAGES if stage < 3 or kind not in REFUSED_IN_STAGE_3]
    first, second = run_ranks(2, trained_by_each, kind, [0, *stages], tmp_path)
    is_half = kind.startswith(("bf16", "16"))
    tolerance = {"rtol": 2e-2, "atol": 4e-3} if is_half else {"rtol": 1e-5, "atol": 1e-6}
    _, its_norms, its_state = first[0]
    for stage in stages:
        weights, norms, state = first[stage]
        assert torch.equal(weights, second[stage][0]), stage
        assert norms == second[stage][1], stage
        # Batch normalisation's statistics are rank 0's.
        torch.testing.assert_close(state, its_state, **tolerance, msg=lambda said, n=stage: f"stage {n}: {said}")
        assert norms == pytest.approx(its_norms, rel=2e-2 if is_half else 1e-5), stage

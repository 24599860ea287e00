"""Callbacks that average or unfreeze weights do with ZeRO what they do on one device, saved and resumed, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import run_ranks
from tests.strategies.modules import Net as PlainNet
from tests.strategies.modules import parameters, trainer
from tests.strategies.test_zero import STAGES, Net, Unscheduled, random_data, strategy_for


class Averaged(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda average, current, n: average + (current - average) / (n + 1))


class LateScheduled(Unscheduled):
    """Has a scheduler that the averaging takes the place of, and that cannot load the other's state."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


class WithoutNorm(LateScheduled):
    def __init__(self) -> None:
        super().__init__()
        del self.net[0]


AVERAGING: dict[str, tuple[type[Net], Callable[[], Any]]] = {
    "equal": (Net, Averaged),
    "exponential": (Net, lambda: EMAWeightAveraging(decay=0.8)),
    "parameters only": (Net, lambda: EMAWeightAveraging(decay=0.8, use_buffers=False, update_every_n_steps=2)),
    "stochastic, with an epoch for the batch norm": (
        LateScheduled,
        lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=2),
    ),
    "stochastic": (
        WithoutNorm,
        lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_strategy="linear"),
    ),
}


def averaged(name: str, stage: int, folder: Path, from_file: Path | None = None) -> dict[str, Any]:
    """Four epochs, or the last two of them; the checkpoint after the second; validated and saved once more after it."""
    cls, make = AVERAGING[name]
    net, callback = cls(), make()
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit = trainer(strategy_for(stage), folder, max_epochs=4, enable_checkpointing=True, callbacks=[callback, keep])
    fit.fit(net, ckpt_path=from_file)
    after = float(fit.validate(net, verbose=False)[0]["val_loss"])
    fit.save_checkpoint(folder / "end.ckpt")
    assert not {"setup", "on_train_end", "load_state_dict", "on_load_checkpoint"} & set(vars(callback))
    assert all(type(each) is nn.Parameter for each in net.parameters())
    average = callback._average_model
    return {
        "net": {key: value for key, value in net.state_dict().items() if "num_batches" not in key},
        "average": {key: value for key, value in average.state_dict().items() if "num_batches" not in key},
        "val_loss": after,
        "norms": net.norms,
    }


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def weights_of(path: Path) -> dict[str, Any]:
    """All that a checkpoint says of weights and their averages."""
    checkpoint = torch.load(path, weights_only=True)
    found = {name: checkpoint.get(name, {}) for name in ("state_dict", "current_model_state", "averaging_state")}
    found |= {key: state for key, state in checkpoint["callbacks"].items() if "Checkpoint" not in key}
    for state in found.values():
        state.pop("scheduler_state", None)
    return found


Runs = Callable[[str, int], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of a kind of averaging at a stage (0 is DDP) the checkpoints and the results, run once."""

    @cache
    def run(name: str, stage: int) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("averaged")
        return folder, run_ranks(2, averaged, name, stage, folder)

    return run


ONE_OF_EACH = ["equal", "stochastic, with an epoch for the batch norm"]


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in AVERAGING for stage in STAGES if stage == 3 or name in ONE_OF_EACH]
)
def test_averaging_equals_ddps_and_so_do_its_checkpoints(name: str, stage: int, runs: Runs) -> None:
    (theirs, wanted), (ours, got) = runs(name, 0), runs(name, stage)
    assert_close(got[0], wanted[0])
    for key in ("net", "average"):  # both ranks have the whole
        parameters_only = [each for each in got[0][key] if "running" not in each]
        assert_close({k: got[1][key][k] for k in parameters_only}, {k: got[0][key][k] for k in parameters_only})
    files = sorted(path.name for path in theirs.glob("*.ckpt"))
    assert files == sorted(path.name for path in ours.glob("*.ckpt"))
    assert len(files) >= 5
    for file in files:
        assert_close(weights_of(ours / file), weights_of(theirs / file))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize(("stage", "saved_at"), [(3, 0), (3, 3), (0, 3)])
def test_averaging_goes_on_from_a_checkpoint_of_ddp_and_the_other_way_round(
    name: str, stage: int, saved_at: int, runs: Runs, tmp_path: Path
) -> None:
    (_, wanted), (saved, _) = runs(name, 0), runs(name, saved_at)
    got = run_ranks(2, averaged, name, stage, tmp_path, saved / "epoch=1.ckpt")
    assert_close({**got[0], "norms": got[0]["norms"][-6:]}, {**wanted[0], "norms": wanted[0]["norms"][-6:]})


class Watching(Callback):
    """How much of the average a rank holds."""

    def __init__(self) -> None:
        self.numel = 0

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        average = next(each for each in trainer.callbacks if hasattr(each, "_average_model"))._average_model
        self.numel = sum(param.numel() for param in average.parameters())


class Late(PlainNet):
    """Makes its layers late, without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(16, 31), nn.Tanh(), nn.Linear(31, 4))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def averaged_on_meta(name: str, folder: Path) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(0)
    net, callback, watching = Late(), AVERAGING[name][1](), Watching()
    trainer(strategy_for(3), folder, max_epochs=2, callbacks=[callback, watching]).fit(net)
    return parameters(net), parameters(callback._average_model), watching.numel


@pytest.mark.parametrize("name", ["equal", "stochastic"])
def test_a_rank_holds_its_shards_of_the_average_even_of_a_model_made_on_meta(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, averaged_on_meta, name, tmp_path)
    for net, average, numel in (first, second):
        assert torch.equal(net, average)
        assert torch.equal(net, first[0])
        assert 0 < numel < 0.6 * net.numel()


class Backbone(PlainNet):
    """Frozen at first, then a param group added late. ``n_ranks`` in one process: their batches at once."""

    def __init__(self, n_ranks: int = 1) -> None:
        super().__init__()
        self.n_ranks = n_ranks
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([self.backbone(batch[0]), batch[1]], batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def data(self) -> DataLoader[Any]:
        first = self.trainer.global_rank
        of_ranks = [random_data(rank, self.n_batches) for rank in range(first, first + self.n_ranks)]
        x, y = (torch.stack(each, 1).flatten(0, 1) for each in zip(*of_ranks, strict=True))
        return DataLoader(TensorDataset(x, y), batch_size=4 * self.n_ranks)

    train_dataloader = val_dataloader = data


def finetuned(stage: int, folder: Path, from_file: Path | None = None) -> tuple[Tensor, list[int]]:
    alone = stage == 0
    net = Backbone(n_ranks=2 if alone else 1)
    callbacks = [
        BackboneFinetuning(1, backbone_initial_ratio_lr=0.1),
        ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
    ]
    fit = trainer(strategy_for(stage), folder, max_epochs=4, enable_checkpointing=True, callbacks=callbacks)
    fit.fit(net, ckpt_path=from_file)
    return parameters(net), [len(each["params"]) for each in fit.optimizers[0].param_groups]


def finetuned_and_resumed(stage: int, folder: Path, others: Path | None = None) -> list[tuple[Tensor, list[int]]]:
    """The whole of it; and what is left after each of the first epochs, by its own checkpoints and another's."""
    results = [finetuned(stage, folder)]
    for saved in (folder, *([others] if others is not None else [])):
        for epoch in range(3):
            results.append(finetuned(stage, folder / f"{saved.name} {epoch}", saved / f"epoch={epoch}.ckpt"))
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Tensor, list[int]]]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_ranks(1, finetuned_and_resumed, 0, folder)[0]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("stage", STAGES)
def test_layers_unfrozen_on_the_way_are_trained_as_on_one_device_also_when_resumed(
    stage: int, alone: tuple[Path, list[tuple[Tensor, list[int]]]], tmp_path: Path
) -> None:
    # Not as with DDP, which never averages the gradients of what was frozen when it began.
    folder, (wanted, *resumed) = alone
    first, second = run_ranks(2, finetuned_and_resumed, stage, tmp_path, folder)
    for (got, groups), (of_the_other, _), (its, its_groups) in zip(
        first, second, [wanted, *resumed, *resumed], strict=True
    ):
        assert torch.equal(got, of_the_other)
        assert_close(got, its)
        assert groups == its_groups
    assert wanted[1] == [6, 2]


class UnfreezesItself(Backbone):
    """Without a callback, and after a validation; parameters that no block has."""

    def __init__(self, n_ranks: int = 1) -> None:
        super().__init__(n_ranks)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0], batch[1] / self.scale], batch_idx)

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            self.scale.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [self.scale]})


def unfroze_itself(stage: int, folder: Path) -> Tensor:
    net = UnfreezesItself(n_ranks=1 if stage else 2)
    trainer(strategy_for(stage), folder, max_epochs=3).fit(net)
    return torch.cat([parameters(net), net.scale.detach()])


@pytest.mark.parametrize("stage", STAGES)
def test_what_the_module_unfreezes_after_a_validation_is_trained(stage: int, tmp_path: Path) -> None:
    first, second = run_ranks(2, unfroze_itself, stage, tmp_path)
    assert torch.equal(first, second)
    assert not torch.equal(first[-4:], torch.ones(4))
    assert_close(first, run_ranks(1, unfroze_itself, 0, tmp_path)[0])

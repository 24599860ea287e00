"""A checkpoint of a pipe is an ordinary one: any number of stages, ``ddp`` and one device open it, and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_distkit import PipeStrategy
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import Net, metrics, one_device, trainer, weights
from tests.strategies.test_pipeline import Averaged, Plain, Scheduled


def make_trainer(stages: bool, folder: Path, **arguments: Any) -> pl.Trainer:
    arguments = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, **arguments}
    return trainer(PipeStrategy(chunks=3), folder, **arguments) if stages else one_device(folder, **arguments)


def first_half(stages: bool, folder: Path) -> None:
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit = make_trainer(
        stages, folder, max_epochs=2, callbacks=[keep, EarlyStopping("val_loss")], enable_checkpointing=True
    )
    fit.fit(Scheduled())
    fit.save_checkpoint(folder / "half.ckpt")
    fit.save_checkpoint(folder / "weights.ckpt", weights_only=True)


class SaveAtStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, "again.ckpt"))


def second_half(stages: bool, path: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, float], list[float]]:
    net = Scheduled()
    fit = make_trainer(stages, folder, max_epochs=4, callbacks=[EarlyStopping("val_loss"), SaveAtStart()])
    fit.fit(net, ckpt_path=path)
    assert fit.current_epoch == 4
    return weights(net), metrics(fit), net.norms


def resumed_from(paths: list[Path], folder: Path) -> list[Any]:
    return [second_half(True, path, folder) for path in paths]


def same_state(got: Any, wanted: Any) -> None:
    """To the last bit, and in the same order."""
    assert list(got["state_dict"]) == list(wanted["state_dict"])
    torch.testing.assert_close(got["state_dict"], wanted["state_dict"], rtol=0, atol=0)
    [ours], [theirs] = got["optimizer_states"], wanted["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    assert got["lr_schedulers"] == wanted["lr_schedulers"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, float]]:
    net = Scheduled()
    folder = tmp_path_factory.mktemp("undisturbed")
    fit = make_trainer(False, folder, max_epochs=4, callbacks=[EarlyStopping("val_loss")])
    fit.fit(net)
    return weights(net), metrics(fit)


@pytest.fixture(scope="module")
def of_three_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    run_ranks(3, first_half, True, folder)
    return folder


@pytest.mark.parametrize("n_stages", [0, 1, 2, 3])
def test_a_checkpoint_of_three_stages_resumes_on_any_number_exactly(
    n_stages: int, of_three_stages: Path, undisturbed: Any, tmp_path: Path
) -> None:
    for name in ("half.ckpt", "step=3.ckpt"):
        # Lightning itself goes on from the middle of an epoch with other batches together than without a break.
        wanted = undisturbed if name == "half.ckpt" else second_half(False, of_three_stages / name, tmp_path)
        if n_stages:
            results = [each[0] for each in run_ranks(n_stages, resumed_from, [of_three_stages / name], tmp_path)]
        else:  # one device, without us
            results = [second_half(False, of_three_stages / name, tmp_path)]
        for got in results:
            torch.testing.assert_close(got[0], wanted[0], rtol=1e-6, atol=1e-6)
            assert got[1] == pytest.approx(wanted[1], rel=1e-5)
        saved, again = (
            torch.load(each, weights_only=True) for each in (of_three_stages / name, tmp_path / "again.ckpt")
        )
        same_state(again, saved)


def test_the_file_says_what_one_device_would(of_three_stages: Path, tmp_path: Path) -> None:
    first_half(False, tmp_path)
    for name in ("half.ckpt", "weights.ckpt"):
        got, wanted = (torch.load(folder / name, weights_only=True) for folder in (of_three_stages, tmp_path))
        assert got.keys() == wanted.keys()
        assert list(got["state_dict"]) == list(wanted["state_dict"])
        torch.testing.assert_close(got["state_dict"], wanted["state_dict"], rtol=1e-6, atol=1e-6)
    got, wanted = (torch.load(folder / "half.ckpt", weights_only=True) for folder in (of_three_stages, tmp_path))
    [ours], [theirs] = got["optimizer_states"], wanted["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-6, atol=1e-6)
    Net().load_state_dict(got["state_dict"], strict=True)


def test_a_checkpoint_of_one_device_resumes_on_stages(tmp_path: Path, undisturbed: Any) -> None:
    first_half(False, tmp_path)
    for got in run_ranks(2, resumed_from, [tmp_path / "half.ckpt"], tmp_path):
        torch.testing.assert_close(got[0][0], undisturbed[0], rtol=1e-6, atol=1e-6)


def under_ddp(folder: Path) -> dict[str, Tensor]:
    """Opens what a pipe has saved, and saves."""
    net = Scheduled()
    fit = trainer("ddp", folder, max_epochs=3, callbacks=[SaveAtStart()])
    fit.fit(net, ckpt_path=folder / "half.ckpt")
    fit.save_checkpoint(folder / "ddp.ckpt")
    return weights(net)


def opened_again(folder: Path) -> dict[str, Tensor]:
    net = Scheduled()
    fit = trainer("pipe", folder, max_epochs=4, callbacks=[SaveAtStart()])
    fit.validate(net, ckpt_path=folder / "ddp.ckpt", verbose=False)
    loaded = weights(net)
    fit.fit(net, ckpt_path=folder / "ddp.ckpt")
    return loaded


def test_ddp_opens_it_and_the_other_way_round(of_three_stages: Path) -> None:
    trained = run_ranks(2, under_ddp, of_three_stages)[0]
    same_state(*(torch.load(of_three_stages / each, weights_only=True) for each in ("again.ckpt", "half.ckpt")))
    for loaded in run_ranks(2, opened_again, of_three_stages):
        torch.testing.assert_close(loaded, trained, rtol=0, atol=0)
    same_state(*(torch.load(of_three_stages / each, weights_only=True) for each in ("again.ckpt", "ddp.ckpt")))


def best_and_last(stages: bool, folder: Path) -> tuple[list[str], float, dict[str, Any]]:
    net = Net()
    keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last="link")
    fit = make_trainer(stages, folder, max_epochs=3, callbacks=[keep, Averaged()], enable_checkpointing=True)
    fit.fit(net)
    best = float(fit.validate(net, ckpt_path="best", verbose=False)[0]["val_loss"])
    assert best == pytest.approx(float(keep.best_model_score), rel=1e-5)
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    names = ("state_dict", "current_model_state", "averaging_state")
    return sorted(path.name for path in folder.glob("*.ckpt")), best, {name: saved[name] for name in names}


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_best_and_last_are_kept_and_averages_are_saved_whole(tmp_path: Path) -> None:
    wanted = best_and_last(False, tmp_path / "one")
    for got in run_ranks(2, best_and_last, True, tmp_path / "pipe"):
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], rel=1e-5)
        torch.testing.assert_close(got[2], wanted[2], rtol=1e-6, atol=1e-6)


def averaged(stages: bool, folder: Path, ckpt_path: Path | None = None) -> dict[str, Tensor]:
    net = Plain()
    arguments = {"callbacks": [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], "max_epochs": 4}
    fit = make_trainer(stages, folder, **arguments)
    if ckpt_path is None:
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        fit = make_trainer(stages, folder, enable_checkpointing=True, **arguments)
        fit.callbacks.append(keep)
    fit.fit(net, ckpt_path=ckpt_path)
    return weights(net)


def test_averaging_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    wanted = averaged(False, tmp_path / "one")
    run_ranks(3, averaged, True, tmp_path / "three")
    for got in run_ranks(2, averaged, True, tmp_path / "two", tmp_path / "three" / "epoch=2.ckpt"):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


class Other(Net):
    """Another model than the checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Linear(16, 17)
        self.layers[5] = nn.Linear(17, 8)


def refused(folder: Path) -> str:
    with pytest.raises(RuntimeError) as error:
        trainer("pipe", folder).fit(Other(), ckpt_path=folder / "half.ckpt")
    return str(error.value)


def test_a_foreign_checkpoint_is_the_usual_error_on_every_rank(of_three_stages: Path) -> None:
    for said in run_ranks(2, refused, of_three_stages):
        assert "size mismatch for layers.2.weight" in said


def in_a_folder(folder: Path, path: Path | None, save_as: str) -> tuple[dict[str, Tensor], int]:
    """Trains an epoch more, and saves in parts at the start and at the end: what it held of the file."""
    net = Scheduled()
    strategy = PipeStrategy(3, save_distributed_checkpoint=True)
    arguments = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "callbacks": [SaveAtStart()]}
    fit = trainer(strategy, folder, max_epochs=4 if path else 2, **arguments)
    read = 0

    class Reads(pl.Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            nonlocal read
            read = sum(value.nbytes for value in checkpoint["state_dict"].values() if not value.is_meta)

    fit.callbacks.append(Reads())
    fit.fit(net, ckpt_path=path)
    fit.save_checkpoint(folder / save_as)
    return weights(net), read


def opened_whole(path: Path, folder: Path) -> dict[str, Tensor]:
    """By a strategy that writes files."""
    net = Scheduled()
    trainer("pipe", folder).validate(net, ckpt_path=path, verbose=False)
    return weights(net)


def test_a_folder_is_written_and_read_by_each_rank_in_part_on_any_number_of_stages(
    tmp_path: Path, undisturbed: Any
) -> None:
    run_ranks(3, in_a_folder, tmp_path, None, "half")
    assert (tmp_path / "half" / "meta.pt").is_file()
    results = run_ranks(2, in_a_folder, tmp_path, tmp_path / "half", "end")
    whole = sum(value.nbytes for value in undisturbed[0].values())
    for got, read in results:
        torch.testing.assert_close(got, undisturbed[0], rtol=1e-6, atol=1e-6)
        assert 0 < read < 0.8 * whole
    for got in run_ranks(2, opened_whole, tmp_path / "end", tmp_path):
        torch.testing.assert_close(got, results[0][0], rtol=0, atol=0)

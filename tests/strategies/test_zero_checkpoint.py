"""A checkpoint of ZeRO is an ordinary one: every strategy and number of ranks opens it, and training goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import run_ranks
from tests.strategies.modules import Net as PlainNet
from tests.strategies.modules import parameters, trainer
from tests.strategies.test_zero import STAGES, strategy_for


class Net(PlainNet):
    """The same global batches for every number of ranks that divides 12; AdamW with two interleaved groups."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    def data(self) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(1)
        x, y = (torch.randn(6, 12, n, generator=random) for n in (16, 4))
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        mine = [each.chunk(world_size, 1)[rank].flatten(0, 1) for each in (x, y)]
        return DataLoader(TensorDataset(*mine), batch_size=12 // world_size)

    train_dataloader = val_dataloader = data


def first_half(stage: int, folder: Path) -> None:
    fit = trainer(strategy_for(stage), folder)
    fit.fit(Net())
    fit.save_checkpoint(folder / "half.ckpt")


def folder_of(stage: int, folder: Path) -> Path:
    return folder / f"stage {stage}"


def first_halves(stages: list[int], folder: Path) -> None:
    for stage in stages:
        first_half(stage, folder_of(stage, folder))


def second_half(stage: int, folder: Path) -> tuple[list[float], Tensor]:
    net = Net()
    fit = trainer(strategy_for(stage), folder, max_epochs=2)
    fit.fit(net, ckpt_path=folder / "half.ckpt")
    assert fit.global_step == 12
    return net.losses, parameters(net)


def second_halves(stages: list[int], saved_at: list[int], folder: Path) -> list[tuple[list[float], Tensor]]:
    return [second_half(stage, folder_of(first, folder)) for stage in stages for first in saved_at]


def undisturbed(folder: Path) -> tuple[list[float], Tensor]:
    net = Net()
    trainer(strategy_for(0), folder, max_epochs=2).fit(net)
    return net.losses[6:], parameters(net)


def saved_by_a_plain_optimizer(folder: Path) -> dict[str, Any]:
    """The same half of the training in one process: what the file should say."""
    first_half(0, folder)
    return torch.load(folder / "half.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Tensor]:
    return run_ranks(2, undisturbed, tmp_path_factory.mktemp("undisturbed"))[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By two ranks at each stage; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, first_halves, [0, *STAGES], folder)
    return folder


def assert_goes_on(got: tuple[list[float], Tensor], wanted: tuple[list[float], Tensor]) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=1e-6)


def test_n_ranks_to_m_ranks_under_any_strategy_with_moments(wanted: tuple[list[float], Tensor], tmp_path: Path) -> None:
    run_ranks(4, first_halves, STAGES, tmp_path)
    for world_size, others in ((1, [0, 1]), (2, [0, 3]), (3, [2, 3])):
        for got in run_ranks(world_size, second_halves, others, STAGES, tmp_path)[0]:
            assert_goes_on(got, wanted)


def test_a_checkpoint_of_ddp_opens_here(wanted: tuple[list[float], Tensor], saved: Path) -> None:
    for got in run_ranks(3, second_halves, STAGES, [0], saved)[0]:
        assert_goes_on(got, wanted)


def test_the_file_says_what_the_plain_optimizers_would(tmp_path: Path) -> None:
    [wanted] = run_ranks(1, saved_by_a_plain_optimizer, tmp_path)
    run_ranks(3, first_halves, STAGES, tmp_path)
    for stage in STAGES:
        got = torch.load(folder_of(stage, tmp_path) / "half.ckpt", weights_only=True)
        assert got["state_dict"].keys() == wanted["state_dict"].keys()
        [ours], [plains] = got["optimizer_states"], wanted["optimizer_states"]
        assert ours["param_groups"] == plains["param_groups"]
        assert ours["state"].keys() == plains["state"].keys()
        for number, state in plains["state"].items():
            assert ours["state"][number].keys() == state.keys()
            torch.testing.assert_close(ours["state"][number], state, rtol=1e-5, atol=1e-7)


def resumed_from(name: str, stage: int, folder: Path) -> tuple[str, bool]:
    net = Net()
    before = parameters(net)
    fit = trainer(strategy_for(stage), folder, max_epochs=2)
    with pytest.raises(Exception) as error:  # noqa: PT011  which one is the test's to say
        fit.fit(net, ckpt_path=folder / name)
    # After an exception nothing that needs the other ranks may follow by itself, so stage 3 leaves the module sharded.
    after = torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in net.parameters()])
    return str(error.value), bool(torch.equal(after, before))


def resumed_from_each(name: str, folder: Path) -> list[tuple[str, bool]]:
    return [resumed_from(name, stage, folder_of(stage, folder)) for stage in STAGES]


def test_a_truncated_checkpoint_is_one_clear_error_and_changes_nothing(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for stage in STAGES:
        whole = (folder_of(stage, tmp_path) / "half.ckpt").read_bytes()
        (folder_of(stage, tmp_path) / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    for results in run_ranks(2, resumed_from_each, "cut.ckpt", tmp_path):
        for said, unchanged in results:
            assert "cut.ckpt cannot be read as a checkpoint; it may be truncated" in said
            assert unchanged


def test_a_foreign_optimizers_state_is_one_clear_error(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for stage in STAGES:
        checkpoint = torch.load(folder_of(stage, tmp_path) / "half.ckpt", weights_only=True)
        [state] = checkpoint["optimizer_states"]
        state["state"][0]["exp_avg"] = torch.zeros(3, 3)
        torch.save(checkpoint, folder_of(stage, tmp_path) / "foreign.ckpt")
    for results in run_ranks(2, resumed_from_each, "foreign.ckpt", tmp_path):
        for said, _ in results:
            assert "'exp_avg' of parameter 0 must fit the parameter's shape (32, 16), got (3, 3)" in said


def best_and_last(stage: int, folder: Path) -> tuple[list[str], float]:
    net = Net()
    keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last="link")
    fit = trainer(strategy_for(stage), folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    fit.fit(net)
    best = float(fit.validate(net, ckpt_path="best", verbose=False)[0]["val_loss"])
    assert best == pytest.approx(float(keep.best_model_score), rel=1e-5)
    return sorted(path.name for path in folder.glob("*.ckpt")), best


def best_and_last_of_each(folder: Path) -> list[tuple[list[str], float]]:
    return [best_and_last(stage, folder_of(stage, folder)) for stage in (0, *STAGES)]


def test_best_and_last_are_kept_and_validated(tmp_path: Path) -> None:
    wanted, *results = run_ranks(2, best_and_last_of_each, tmp_path)[0]
    for got in results:
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_without_us_loads_it_strictly(stage: int, saved: Path) -> None:
    net, other = Net(), Net()
    checkpoint = torch.load(folder_of(stage, saved) / "half.ckpt", weights_only=True)
    net.load_state_dict(checkpoint["state_dict"], strict=True)
    assert parameters(net).isfinite().all()
    assert not torch.equal(parameters(net), parameters(other))


class Longer(Net):
    """Has a layer that the checkpoint has not."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)
        self.strict_loading = False


def loaded_in_part(folder: Path) -> list[bool]:
    loaded = []
    for stage in STAGES:
        net = Longer()
        path = folder_of(stage, folder) / "half.ckpt"
        trainer(strategy_for(stage), folder).validate(net, ckpt_path=path, verbose=False)
        saved = torch.load(path, weights_only=True)["state_dict"]
        loaded.append(all(torch.equal(net.state_dict()[name], value) for name, value in saved.items()))
    return loaded


def test_a_checkpoint_may_be_loaded_in_part(saved: Path) -> None:
    assert run_ranks(2, loaded_in_part, saved) == [[True] * 3] * 2

"""A checkpoint of ZeRO is an ordinary one: every strategy and number of ranks opens it, and training goes on."""

from __future__ import annotations

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


def second_half(stage: int, folder: Path) -> tuple[list[float], Tensor]:
    net = Net()
    fit = trainer(strategy_for(stage), folder, max_epochs=2)
    fit.fit(net, ckpt_path=folder / "half.ckpt")
    assert fit.global_step == 12
    return net.losses, parameters(net)


def undisturbed(folder: Path) -> tuple[list[float], Tensor]:
    net = Net()
    trainer(strategy_for(0), folder, max_epochs=2).fit(net)
    return net.losses[6:], parameters(net)


def saved_by_a_plain_optimizer(folder: Path) -> dict[str, Any]:
    """The same half of the training in one process: what the file should say."""
    first_half(0, folder)
    return torch.load(folder / "half.ckpt", weights_only=True)


@pytest.mark.parametrize("stage", STAGES)
def test_n_ranks_to_m_ranks_under_any_strategy_with_moments(stage: int, tmp_path: Path) -> None:
    wanted = run_ranks(2, undisturbed, tmp_path)[0]
    run_ranks(4, first_half, stage, tmp_path)
    for world_size, other in ((1, 0), (1, 1), (2, 0), (2, 3), (3, 2), (3, 3)):
        losses, weights = run_ranks(world_size, second_half, other, tmp_path)[0]
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        torch.testing.assert_close(weights, wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_ddp_opens_here(stage: int, tmp_path: Path) -> None:
    wanted = run_ranks(2, undisturbed, tmp_path)[0]
    run_ranks(2, first_half, 0, tmp_path)
    losses, weights = run_ranks(3, second_half, stage, tmp_path)[0]
    assert losses == pytest.approx(wanted[0], rel=1e-5)
    torch.testing.assert_close(weights, wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_the_file_says_what_the_plain_optimizers_would(stage: int, tmp_path: Path) -> None:
    wanted = run_ranks(1, saved_by_a_plain_optimizer, tmp_path)[0]
    run_ranks(3, first_half, stage, tmp_path)
    got = torch.load(tmp_path / "half.ckpt", weights_only=True)
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


@pytest.mark.parametrize("stage", STAGES)
def test_a_truncated_checkpoint_is_one_clear_error_and_changes_nothing(stage: int, tmp_path: Path) -> None:
    run_ranks(2, first_half, stage, tmp_path)
    whole = (tmp_path / "half.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    for said, unchanged in run_ranks(2, resumed_from, "cut.ckpt", stage, tmp_path):
        assert "cut.ckpt cannot be read as a checkpoint; it may be truncated" in said
        assert unchanged


@pytest.mark.parametrize("stage", STAGES)
def test_a_foreign_optimizers_state_is_one_clear_error(stage: int, tmp_path: Path) -> None:
    run_ranks(2, first_half, stage, tmp_path)
    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=True)
    [state] = checkpoint["optimizer_states"]
    state["state"][0]["exp_avg"] = torch.zeros(3, 3)
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    for said, _ in run_ranks(2, resumed_from, "foreign.ckpt", stage, tmp_path):
        assert "'exp_avg' of parameter 0 must fit the parameter's shape (32, 16), got (3, 3)" in said


def best_and_last(stage: int, folder: Path) -> tuple[list[str], float]:
    net = Net()
    keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last="link")
    fit = trainer(strategy_for(stage), folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    fit.fit(net)
    best = float(fit.validate(net, ckpt_path="best", verbose=False)[0]["val_loss"])
    assert best == pytest.approx(float(keep.best_model_score), rel=1e-5)
    return sorted(path.name for path in folder.glob("*.ckpt")), best


@pytest.mark.parametrize("stage", STAGES)
def test_best_and_last_are_kept_and_validated(stage: int, tmp_path: Path) -> None:
    wanted = run_ranks(2, best_and_last, 0, tmp_path / "ddp")
    got = run_ranks(2, best_and_last, stage, tmp_path / "zero")
    assert got[0][0] == wanted[0][0]
    assert got[0][1] == pytest.approx(wanted[0][1], rel=1e-5)


def plainly_loaded(path: Path) -> Tensor:
    net = Net()
    net.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    return parameters(net)


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_without_us_loads_it_strictly(stage: int, tmp_path: Path) -> None:
    run_ranks(2, first_half, stage, tmp_path)
    assert plainly_loaded(tmp_path / "half.ckpt").isfinite().all()


class Longer(Net):
    """Has a layer that the checkpoint has not."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)
        self.strict_loading = False


def loaded_in_part(stage: int, folder: Path) -> bool:
    net = Longer()
    fit = trainer(strategy_for(stage), folder)
    fit.validate(net, ckpt_path=folder / "half.ckpt", verbose=False)
    saved = torch.load(folder / "half.ckpt", weights_only=True)["state_dict"]
    return all(torch.equal(net.state_dict()[name], value) for name, value in saved.items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_may_be_loaded_in_part(stage: int, tmp_path: Path) -> None:
    run_ranks(2, first_half, stage, tmp_path)
    assert run_ranks(2, loaded_in_part, stage, tmp_path) == [True, True]

"""The Trainer saves sharded checkpoints, also while it trains, and resumes from them in any stage on any ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_distkit import ZeroStrategy
from lightning_distkit.core.zero import convert_sharded_checkpoint, read_sharded_checkpoint, sharded_checkpoint
from tests.ranks import RankDied, run_ranks
from tests.strategies.modules import parameters, trainer
from tests.strategies.test_zero import STAGES, strategy_for
from tests.strategies.test_zero_callbacks import Averaged
from tests.strategies.test_zero_checkpoint import Net, best_and_last, resumed_from, undisturbed


def sharding(stage: int, asynchronous: bool = False) -> ZeroStrategy:
    return ZeroStrategy(
        stage,  # type: ignore[arg-type]
        bucket_cap_mb=None if stage == 3 else 1e-3,
        save_distributed_checkpoint=True,
        asynchronous_checkpoint=asynchronous,
    )


class MuonNet(Net):
    """Muon for the matrices, on whole ones, and AdamW with two groups for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        both = self.optimizers()
        self.manual_backward(loss)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": biases[:1], "weight_decay": 0.1}, {"params": biases[1:]}]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(groups, lr=1e-2)


def saved_both_ways(cls: type[Net], stage: int, folder: Path) -> None:
    """In the fit by a callback, and whole after it, which is the same."""
    every = ModelCheckpoint(folder, filename="sharded")
    fit = trainer(sharding(stage), folder, callbacks=[every], enable_checkpointing=True)
    fit.fit(cls())
    fit.save_checkpoint(folder / "after.ckpt")
    fit.strategy._sharded = None
    fit.save_checkpoint(folder / "whole.ckpt")


def resumed(cls: type[Net], stage: int, folder: Path, names: tuple[str, ...]) -> list[tuple[list[float], Tensor]]:
    ends = []
    for name in names:
        net = cls()
        fit = trainer(strategy_for(stage), folder, max_epochs=2)
        fit.fit(net, ckpt_path=folder / name)
        ends.append((net.losses, parameters(net)))
    return ends


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Tensor]:
    return run_ranks(2, undisturbed, tmp_path_factory.mktemp("undisturbed"))[0]


@pytest.mark.parametrize(("stage", "first", "second"), [(1, 2, 3), (2, 3, 1), (3, 1, 2)])
def test_saved_in_one_stage_it_goes_on_in_any_on_any_ranks_as_from_the_whole_file(
    stage: int, first: int, second: int, wanted: tuple[list[float], Tensor], tmp_path: Path
) -> None:
    run_ranks(3, saved_both_ways, Net, stage, tmp_path)
    for world_size, other, name in ((2, first, "sharded.ckpt"), (1, second, "after.ckpt")):
        sharded, whole = run_ranks(world_size, resumed, Net, other, tmp_path, (name, "whole.ckpt"))[0]
        assert sharded[0] == whole[0]
        assert torch.equal(sharded[1], whole[1])
        assert sharded[0] == pytest.approx(wanted[0], rel=1e-5)
        torch.testing.assert_close(sharded[1], wanted[1], rtol=1e-5, atol=1e-6)


def test_muon_and_another_optimizer_with_two_groups(tmp_path: Path) -> None:
    run_ranks(3, saved_both_ways, MuonNet, 2, tmp_path)
    for world_size, other in ((2, 1), (1, 2)):
        sharded, whole = run_ranks(world_size, resumed, MuonNet, other, tmp_path, ("sharded.ckpt", "whole.ckpt"))[0]
        assert sharded[0] == whole[0]
        assert torch.equal(sharded[1], whole[1])


@pytest.mark.parametrize("stage", STAGES)
def test_a_converted_one_is_the_ordinary_file(stage: int, tmp_path: Path) -> None:
    run_ranks(2, saved_both_ways, Net, stage, tmp_path)
    convert_sharded_checkpoint(tmp_path / "after.ckpt", tmp_path / "half.ckpt")
    ours, whole = (torch.load(tmp_path / name, weights_only=True) for name in ("half.ckpt", "whole.ckpt"))
    assert ours.keys() == whole.keys()
    for key in whole.keys() - {"state_dict", "optimizer_states"}:
        assert ours[key] == whole[key]
    torch.testing.assert_close(ours["state_dict"], whole["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(ours["optimizer_states"], whole["optimizer_states"], rtol=0, atol=0)
    net = Net()
    net.load_state_dict(ours["state_dict"], strict=True)
    optimizer = net.configure_optimizers()
    optimizer.load_state_dict(ours["optimizer_states"][0])
    net.net(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    by_ddp, from_whole = run_ranks(2, resumed, Net, 0, tmp_path, ("half.ckpt", "whole.ckpt"))[0]
    assert by_ddp[0] == from_whole[0]


def kept(stage: int, asynchronous: bool, folder: Path) -> tuple[list[str], float, list[int]]:
    """As `best_and_last`; and how many complete ones there were whenever one was about to take its place."""
    complete: list[int] = []
    finish = sharded_checkpoint._Writer.finish

    def slow(self: Any, **arguments: Any) -> None:
        time.sleep(0.2)  # so that whatever comes next in the training comes first
        complete.append(len([each for each in folder.glob("epoch*.ckpt") if (each / ".metadata").exists()]))
        finish(self, **arguments)

    sharded_checkpoint._Writer.finish = slow  # type: ignore[method-assign]
    net = Net()
    keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last="link")
    fit = trainer(sharding(stage, asynchronous), folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    fit.fit(net)
    best = float(fit.validate(net, ckpt_path="best", verbose=False)[0]["val_loss"])
    fit.fit_loop.max_epochs = 4
    fit.fit(net, ckpt_path="last")
    return sorted(path.name for path in folder.iterdir()), best, complete


@pytest.mark.parametrize(("stage", "asynchronous"), [(1, True), (2, False), (3, True)])
def test_old_ones_go_when_the_new_one_is_in_its_place(stage: int, asynchronous: bool, tmp_path: Path) -> None:
    names, best, complete = run_ranks(2, kept, stage, asynchronous, tmp_path)[0]
    assert names == ["epoch=3-step=24.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").resolve() == (tmp_path / names[0]).resolve()
    assert complete == [0, 1, 1, 1]
    assert best > 0


def test_best_and_last_are_those_of_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run_ranks(2, best_and_last, 2, tmp_path / "whole")
    got = run_ranks(2, best_and_last_sharded, tmp_path / "sharded")
    assert got == wanted


def best_and_last_sharded(folder: Path) -> tuple[list[str], float]:
    from tests.strategies import test_zero_checkpoint

    test_zero_checkpoint.strategy_for = sharding
    return best_and_last(2, folder)


def cannot_write(asynchronous: bool, when: int, folder: Path) -> tuple[str, int]:
    write = sharded_checkpoint._Writer.write_data
    n_saves = 0

    def full(self: Any, *args: Any) -> Any:
        nonlocal n_saves
        n_saves += 1
        if n_saves == when and os.environ["RANK"] == "1":
            raise OSError("No space left on device")
        return write(self, *args)

    sharded_checkpoint._Writer.write_data = full  # type: ignore[method-assign]
    keep = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    fit = trainer(sharding(2, asynchronous), folder, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="could not be written") as error:
        fit.fit(Net())
    return str(error.value), fit.global_step


@pytest.mark.parametrize(("asynchronous", "when", "noticed"), [(False, 2, 12), (True, 2, 18), (True, 3, 18)])
def test_what_goes_wrong_is_raised_on_every_rank_and_the_one_before_is_kept(
    asynchronous: bool, when: int, noticed: int, tmp_path: Path
) -> None:
    for said, step in run_ranks(2, cannot_write, asynchronous, when, tmp_path):
        assert "rank 1 says OSError('No space left on device')" in said
        assert step == noticed  # asynchronously at the next one, or at the end
    [left] = tmp_path.glob("*.ckpt")
    assert read_sharded_checkpoint(left)["global_step"] == 6 * (when - 1)


def killed(stage: int, asynchronous: bool, folder: Path) -> str:
    write = sharded_checkpoint._Writer.write_data

    def dying(self: Any, *args: Any) -> Any:
        if os.environ["RANK"] == "1" and "step=3" in str(self.path):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)

    sharded_checkpoint._Writer.write_data = dying  # type: ignore[method-assign]
    every = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    fit = trainer(sharding(stage, asynchronous), folder, enable_checkpointing=True, callbacks=[every])
    with pytest.raises(RuntimeError) as error:
        fit.fit(Net())
    return str(error.value)


@pytest.mark.parametrize(("stage", "asynchronous"), [(2, False), (3, True)])
def test_a_rank_killed_in_mid_save_is_an_error_that_says_so_and_the_one_before_loads(
    stage: int, asynchronous: bool, tmp_path: Path
) -> None:
    said, died = run_ranks(2, killed, stage, asynchronous, tmp_path, return_exceptions=True, pg_timeout=20)
    assert isinstance(died, RankDied)
    assert "another rank died" in said
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=2.ckpt"]
    assert len(run_ranks(1, resumed, Net, stage, tmp_path, ("step=2.ckpt",))[0][0][0]) == 10


def refused(stage: int, folder: Path) -> list[tuple[str, bool]]:
    said = [resumed_from(name, stage, folder) for name in ("cut.ckpt", "no meta.ckpt", "foreign.ckpt")]
    net = Net()
    net.net[2] = torch.nn.Linear(32, 32, bias=False)
    before = parameters(net)
    fit = trainer(strategy_for(stage), folder)
    with pytest.raises(Exception) as error:  # noqa: PT011  which one is the test's to say
        fit.validate(Wider(), ckpt_path=folder / "good.ckpt", verbose=False)
    return [*said, (str(error.value), torch.equal(before, parameters(net)))]


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[4] = torch.nn.Linear(32, 5)


def first_half_sharded(stage: int, folder: Path, name: str = "good.ckpt") -> None:
    fit = trainer(sharding(stage), folder)
    fit.fit(Net())
    fit.save_checkpoint(folder / name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_truncated_or_foreign_one_is_one_clear_error_on_every_rank_and_changes_nothing(
    stage: int, tmp_path: Path
) -> None:
    for name in ("good.ckpt", "cut.ckpt", "no meta.ckpt"):
        run_ranks(2, first_half_sharded, stage, tmp_path, name)
    shard = tmp_path / "cut.ckpt" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    (tmp_path / "no meta.ckpt" / "meta.pt").unlink()
    torch.distributed.checkpoint.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "foreign.ckpt", no_dist=True)
    torch.save({"epoch": 1}, tmp_path / "foreign.ckpt" / "meta.pt")
    for said in run_ranks(2, refused, stage, tmp_path):
        (cut, first), (no_meta, second), (foreign, third), (other, _) = said
        assert "but it has 1000: the checkpoint is truncated" in cut
        assert "lacks meta.pt: it is none, or was not copied completely" in no_meta
        assert "something else has written it" in foreign
        assert "net.4.weight must be of shape (5, 32), got (4, 32)" in other
        assert first
        assert second
        assert third


def tuned_and_replaced(stage: int, folder: Path) -> tuple[list[str], Any]:
    strategy = sharding(stage, asynchronous=True)

    class Tuned(Net):
        lr = 1e-2

    net = Tuned()
    fit = trainer(strategy, folder)
    Tuner(fit).lr_find(net, num_training=4)
    fit = trainer(sharding(stage), folder)
    fit.fit(net)
    for sharded in (fit.strategy._sharded, None, fit.strategy._sharded):  # each over the one before, of another kind
        fit.strategy._sharded = sharded
        fit.save_checkpoint(folder / "last.ckpt", weights_only=sharded is not None)
        kind = "folder" if (folder / "last.ckpt").is_dir() else "file"
        assert kind == ("file" if sharded is None else "folder")
    return sorted(path.name for path in folder.iterdir()), fit.validate(
        net, ckpt_path=folder / "last.ckpt", verbose=False
    )


def test_lr_find_leaves_nothing_and_a_folder_replaces_a_file_and_the_other_way_round(tmp_path: Path) -> None:
    for names, [losses] in run_ranks(2, tuned_and_replaced, 2, tmp_path):
        assert names == ["last.ckpt"]
        assert losses.keys() == {"val_loss"}


def averaged(stage: int, folder: Path) -> bool:
    ends = []
    for strategy in (sharding(stage), strategy_for(stage)):
        fit = trainer(strategy, folder, callbacks=[Averaged()])
        fit.fit(Net())
        path = folder / type(strategy).__name__ / str(len(ends)) / "averaged.ckpt"
        fit.save_checkpoint(path)
        net = Net()
        trainer(strategy_for(stage), folder, max_epochs=2, callbacks=[Averaged()]).fit(net, ckpt_path=path)
        ends.append(parameters(net))
    return torch.equal(*ends)


@pytest.mark.parametrize("stage", [2, 3])
def test_averaged_weights_are_saved_and_resumed_as_in_whole_checkpoints(stage: int, tmp_path: Path) -> None:
    assert run_ranks(2, averaged, stage, tmp_path) == [True, True]


def with_a_checkpoint_io(folder: Path) -> None:
    strategy = ZeroStrategy(2, save_distributed_checkpoint=True)
    with pytest.raises(ValueError, match="writes without a checkpoint_io"):
        trainer(strategy, folder, plugins=[AsyncCheckpointIO()]).fit(Net())


def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asynchronous_checkpoint needs save_distributed_checkpoint=True"):
        ZeroStrategy(2, asynchronous_checkpoint=True)
    run_ranks(1, with_a_checkpoint_io, tmp_path)

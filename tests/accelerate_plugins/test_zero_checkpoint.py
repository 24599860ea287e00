"""A folder of ZeroPlugin is an ordinary one of Accelerate: every plugin and number of ranks opens it, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accelerate_plugins import Accelerator, ZeroPlugin
from tests.accelerate_plugins.training import STAGES, Net, Run
from tests.ranks import run_ranks

MADE: dict[str, dict[str, Any]] = {
    "adamw": {"net": lambda: Net(tied=True)},
    "sgd": {"optimizer": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), "gradient_accumulation_steps": 2},
    "adafactor": {"optimizer": lambda params: torch.optim.Adafactor(params, 1e-2)},
}


def resumed(stage: str, path: Path) -> dict[str, tuple[bool, bool, int]]:
    results = {}
    for name, made in MADE.items():
        run = Run.of(stage, n_rows=80, shuffle=True, **made).train(10, save={4: path / name}, clip=0.5)
        again = Run.of(stage, n_rows=80, shuffle=True, **made)
        again.accelerator.load_state(str(path / name))
        again.train(6, skip=4, clip=0.5)
        results[name] = torch.equal(run.weights(), again.weights()), run.losses[4:] == again.losses, len(again.losses)
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_resumed_in_mid_epoch_is_the_same_to_the_last_bit(stage: str, tmp_path: Path) -> None:
    for results in run_ranks(2, resumed, stage, tmp_path):
        assert results == dict.fromkeys(MADE, (True, True, 6))


# Accelerate steps a schedule once for each process, so the rate must not change where their number does.
SAME: dict[str, Any] = {"net": lambda: Net(tied=True), "decay": 1.0}


def undisturbed(path: Path) -> tuple[list[float], Tensor]:
    """Plain Accelerate, and its own checkpoint at half."""
    run = Run.of("none", n_rows=96, batch=24 // 2, **SAME).train(save={2: path})
    return run.losses[2:], run.weights()


def first_half(stage: str, batch: int, path: Path) -> None:
    Run.of(stage, n_rows=96, batch=batch, **SAME).train(2, save={2: path})


def second_half(stage: str, batch: int, path: Path) -> tuple[list[float], Tensor]:
    run = Run.of(stage, n_rows=96, batch=batch, **SAME)
    with torch.no_grad():
        for param in run.model.parameters():
            param.zero_()
    run.accelerator.load_state(str(path))
    run.train(2, skip=2)
    return run.losses, run.weights()


def test_n_ranks_to_m_ranks_under_any_stage_and_plain_accelerate(tmp_path: Path) -> None:
    losses, weights = run_ranks(2, undisturbed, tmp_path / "plain")[0]
    run_ranks(3, first_half, "zero_2", 8, tmp_path / "zero_2")
    run_ranks(2, first_half, "zero_3", 12, tmp_path / "zero_3")
    for world_size, stage, source in (
        (2, "none", "zero_2"),
        (2, "none", "zero_3"),
        (3, "zero_1", "plain"),
        (3, "zero_3", "plain"),
        (2, "zero_3", "zero_2"),
        (3, "zero_2", "zero_3"),
        (1, "zero_3", "zero_3"),
    ):
        got, its = run_ranks(world_size, second_half, stage, 24 // world_size, tmp_path / source)[0]
        assert got == pytest.approx(losses, rel=1e-5), (world_size, stage, source)
        torch.testing.assert_close(its, weights, rtol=1e-5, atol=1e-6)


def written(stage: str, path: Path) -> None:
    Run.of(stage, net=lambda: Net(tied=True)).train(3, save={3: path})


def test_the_files_are_those_of_plain_accelerate(tmp_path: Path) -> None:
    for name in ("none", *STAGES):
        run_ranks(2, written, name, tmp_path / name)
    wanted = torch.load(tmp_path / "none" / "optimizer.bin", weights_only=True)
    weights = load_file(tmp_path / "none" / "model.safetensors")
    for stage in STAGES:
        folder = tmp_path / stage
        assert {each.name for each in folder.iterdir()} == {each.name for each in (tmp_path / "none").iterdir()}
        got = torch.load(folder / "optimizer.bin", weights_only=True)
        assert got["param_groups"] == wanted["param_groups"]
        torch.testing.assert_close(got["state"], wanted["state"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(load_file(folder / "model.safetensors"), weights, rtol=1e-5, atol=1e-6)


def exported(stage: str, path: Path) -> tuple[set[str], bool]:
    run = Run.of(stage, net=lambda: Net(tied=True)).train(2)
    run.accelerator.save_model(run.model, str(path))
    unwrapped = run.accelerator.unwrap_model(run.model)
    state = run.accelerator.get_state_dict(run.model)
    run.accelerator.save(state, str(path / "state.bin"))
    run.accelerator.wait_for_everyone()
    plain = Net(tied=True)
    plain.load_state_dict(torch.load(path / "state.bin", weights_only=True))
    return set(state), isinstance(unwrapped, Net) and torch.isfinite(plain(torch.ones(1, 16))).all().item()


@pytest.mark.parametrize("stage", STAGES)
def test_the_whole_model_can_be_had_and_saved(stage: str, tmp_path: Path) -> None:
    (first, can_use), _ = run_ranks(2, exported, stage, tmp_path)
    assert first == set(Net(tied=True).state_dict())
    assert can_use
    saved = load_file(tmp_path / "model.safetensors")
    whole = torch.load(tmp_path / "state.bin", weights_only=True)
    for name, value in saved.items():
        assert torch.equal(value, whole[name])


def accumulating(world_size: int, path: Path) -> list[bool]:
    """A rank that was not there when it was saved has no file of where it stood, and must not go out of step."""
    run = Run.of("zero_2", n_rows=72, batch=4, gradient_accumulation_steps=3)
    if world_size == 2:
        run.train(2, save={2: path})
        return []
    run.accelerator.load_state(str(path))
    synced = []
    for x, _ in run.loader:
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(run.model(x).square().mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
        synced.append(run.accelerator.sync_gradients)
    return synced


def test_new_ranks_accumulate_in_step_with_the_others(tmp_path: Path) -> None:
    run_ranks(2, accumulating, 2, tmp_path)
    for synced in run_ranks(3, accumulating, 3, tmp_path):
        assert synced == [True, False, False, True, False, True]


def on_each_node() -> str:
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        plugin=ZeroPlugin(stage=1), cpu=True, project_config=ProjectConfiguration(save_on_each_node=True)
    )
    with pytest.raises(ValueError, match="save to a folder that all machines share") as error:
        accelerator.save_state("state")
    return str(error.value)


def named_by_accelerate(path: Path) -> tuple[list[str], bool]:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(path), automatic_checkpoint_naming=True, total_limit=2)
    run = Run.of("zero_3", project_config=project)
    for _ in range(3):
        run.train(2)
        run.accelerator.save_state()
    weights = run.weights()
    run.train(2)
    run.accelerator.load_state()
    return sorted(each.name for each in (path / "checkpoints").iterdir()), torch.equal(weights, run.weights())


def test_folders_named_by_accelerate_and_those_that_cannot_be(tmp_path: Path) -> None:
    run_ranks(2, on_each_node)
    for names, same in run_ranks(2, named_by_accelerate, tmp_path):
        assert names == ["checkpoint_1", "checkpoint_2"]
        assert same

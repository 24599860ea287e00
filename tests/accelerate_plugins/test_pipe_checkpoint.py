"""A folder of PipePlugin is an ordinary one of Accelerate: any number of stages opens it, and plain Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accelerate_plugins import Accelerator, PipePlugin
from tests.accelerate_plugins.like_transformers import LanguageModel
from tests.accelerate_plugins.training import Run
from tests.ranks import run_ranks


class Dropping(nn.Module):
    """Random in and around the pipe, and tied within it, over its stages."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(dropout)) for _ in range(4)))
        self.layers[3][0].weight = self.layers[0][0].weight
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.drop(self.first(x))))  # type: ignore[no-any-return]


MADE: dict[str, dict[str, Any]] = {
    "adamw": {"net": Dropping},
    "sgd": {
        "net": Dropping,
        "optimizer": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        "gradient_accumulation_steps": 2,
    },
}


def resumed(plugin: str, path: Path) -> dict[str, tuple[bool, bool, int]]:
    results = {}
    for name, made in MADE.items():
        run = Run.of(plugin, n_rows=80, shuffle=True, **made).train(6, save={2: path / name}, clip=0.5)
        again = Run.of(plugin, n_rows=80, shuffle=True, **made)
        torch.manual_seed(7)
        again.accelerator.load_state(str(path / name))
        again.train(4, skip=2, clip=0.5)
        results[name] = torch.equal(run.weights(), again.weights()), run.losses[2:] == again.losses, len(again.losses)
    return results


@pytest.mark.parametrize(("plugin", "n_ranks"), [("pipe", 2), ("pipes", 4)])
def test_a_run_resumed_in_mid_epoch_is_the_same_to_the_last_bit(plugin: str, n_ranks: int, tmp_path: Path) -> None:
    for results in run_ranks(n_ranks, resumed, plugin, tmp_path):
        assert results == dict.fromkeys(MADE, (True, True, 4))


# Accelerate steps a schedule once for each batch of the world, so the rate must not change where their number does.
SAME: dict[str, Any] = {"net": lambda: Dropping(0.0), "n_rows": 96, "decay": 1.0}


def first_half(plugin: str, batch: int, path: Path) -> None:
    Run.of(plugin, batch=batch, **SAME).train(2, save={2: path})


def undisturbed(batch: int, path: Path) -> tuple[list[float], Tensor]:
    """Plain Accelerate, and its own checkpoint at half."""
    run = Run.of("none", batch=batch, **SAME).train(4, save={2: path})
    return run.losses[2:], run.weights()


def second_half(plugin: str, batch: int, path: Path) -> tuple[list[float], Tensor]:
    run = Run.of(plugin, batch=batch, **SAME)
    with torch.no_grad():
        for param in run.model.parameters():
            if not param.is_meta:
                param.zero_()
    run.accelerator.load_state(str(path))
    run.train(2, skip=2)
    return run.losses, run.weights()


def test_n_stages_to_m_stages_and_plain_accelerate(tmp_path: Path) -> None:
    losses, weights = run_ranks(1, undisturbed, 12, tmp_path / "none 1")[0]
    run_ranks(2, first_half, "pipe", 12, tmp_path / "pipe 2")
    run_ranks(3, first_half, "pipe", 12, tmp_path / "pipe 3")
    for plugin, world_size, batch, source in (
        ("pipe", 3, 12, "pipe 2"),
        ("pipe", 2, 12, "pipe 3"),
        ("none", 2, 6, "pipe 3"),
        ("pipe", 3, 12, "none 1"),
        ("pipes", 4, 6, "pipe 2"),
        ("zero_2", 2, 6, "pipe 2"),
    ):
        got, its = run_ranks(world_size, second_half, plugin, batch, tmp_path / source)[0]
        assert got == pytest.approx(losses, rel=1e-5), (plugin, world_size, source)
        torch.testing.assert_close(its, weights, rtol=1e-5, atol=1e-6)
    wanted = torch.load(tmp_path / "none 1" / "optimizer.bin", weights_only=True)
    got = torch.load(tmp_path / "pipe 2" / "optimizer.bin", weights_only=True)
    assert got["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(got["state"], wanted["state"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        load_file(tmp_path / "pipe 2" / "model.safetensors"),
        load_file(tmp_path / "none 1" / "model.safetensors"),
        rtol=1e-5,
        atol=1e-6,
    )
    names = {each.name for each in (tmp_path / "none 1").iterdir()}
    assert {each.name for each in (tmp_path / "pipe 2").iterdir()} == names | {
        "random_states_1.pkl",
        "pipe_random_states.bin",
    }


def exported(path: Path) -> set[str]:
    accelerator: Any = Accelerator(plugin=PipePlugin(), cpu=True)
    models = [accelerator.prepare(made()) for made in (LanguageModel, Dropping)]
    for number, model in enumerate(models):
        accelerator.save_model(model, str(path / str(number)))
    accelerator.save(accelerator.get_state_dict(models[0]), str(path / "state.bin"))
    accelerator.wait_for_everyone()
    return {name for name, each in models[0].named_parameters() if each.is_meta}


def test_the_whole_model_can_be_had_and_saved(tmp_path: Path) -> None:
    first, second = run_ranks(2, exported, tmp_path)
    assert first
    assert second
    assert not first & second  # each is on one rank
    plain = LanguageModel()
    assert torch.load(tmp_path / "state.bin", weights_only=True).keys() == plain.state_dict().keys()
    for number, made in enumerate((plain, Dropping())):
        saved = load_file(tmp_path / str(number) / "model.safetensors")
        missing, unexpected = made.load_state_dict(saved, strict=False)
        assert len(missing) == 1  # what is tied is there once
        assert not unexpected
        fresh = (LanguageModel() if number == 0 else Dropping()).state_dict()
        assert all(torch.equal(value, fresh[name]) for name, value in saved.items())

"""Unmodified scripts with Transformers under the runner, with a loop and with Trainer: DDP's losses; they resume."""

from __future__ import annotations

import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate_plugins.__main__ import main
from tests.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is no dependency of the tests; install it to run these")

SCRIPT = str(Path(__file__).with_name("trainer_script.py"))
LOOP = str(Path(__file__).with_name("nlp_script.py"))


def run(options: list[str], arguments: list[str], script: str = SCRIPT) -> None:
    warnings.simplefilter("ignore")  # transformers' own
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options:
        main([*options, script, *arguments])
    else:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


def losses(folder: Path, name: str = "loss") -> list[float]:
    said = json.loads((folder / "said.json").read_text())
    assert said["num_processes"] == 2
    return [row[name] for row in said["log"] if name in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    run_ranks(2, run, [], [str(folder), "--use_cpu"], timeout=150)
    return folder


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_trains_evaluates_saves_and_resumes_as_with_ddp(stage: int, plain: Path, tmp_path: Path) -> None:
    options = ["--plugin", f"zero_stage_{stage}"]
    run_ranks(2, run, options, [str(tmp_path)], timeout=150)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert losses(tmp_path, name) == pytest.approx(losses(plain, name), rel=1e-4)
    for folder in ("final", "checkpoint-3", "checkpoint-6"):
        close(load_file(tmp_path / folder / "model.safetensors"), load_file(plain / folder / "model.safetensors"))
    ours, theirs = (torch.load(each / "checkpoint-3" / "optimizer.pt") for each in (tmp_path, plain))
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-3, atol=1e-5)
    run_ranks(2, run, options, [str(plain), "--resume"], timeout=150)  # what plain DDP has saved
    assert losses(plain)[-3:] == pytest.approx(losses(tmp_path)[-3:], rel=1e-4)


def test_through_two_pipes_it_does_what_it_does_with_ddp(plain: Path, tmp_path: Path) -> None:
    options = ["--plugin", "pipe", "--pipeline_parallel_size", "2"]
    run_ranks(4, run, options, [str(tmp_path)], timeout=150)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert losses(tmp_path, name) == pytest.approx(losses(plain, name), rel=1e-4)
    for folder in ("final", "checkpoint-3", "checkpoint-6"):
        close(load_file(tmp_path / folder / "model.safetensors"), load_file(plain / folder / "model.safetensors"))
    ours, theirs = (torch.load(each / "checkpoint-3" / "optimizer.pt") for each in (tmp_path, plain))
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-3, atol=1e-5)
    wanted = losses(tmp_path)
    run_ranks(4, run, options, [str(tmp_path), "--resume"], timeout=150)
    assert losses(tmp_path)[-3:] == pytest.approx(wanted[-3:], rel=1e-4)


PLUGINS = {
    "zero_stage_2": (2, []),
    "zero_stage_3": (2, []),
    "powersgd": (2, ["--start_powerSGD_iter", "100"]),
    "pipe": (4, ["--pipeline_parallel_size", "2"]),
}


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twice")
    run_ranks(2, run, [], [str(folder), "--use_cpu", "--max_steps", "3", "--fits", "2"], timeout=150)
    return folder


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_second_fit_of_one_trainer_goes_on_as_with_ddp(plugin: str, twice: Path, tmp_path: Path) -> None:
    n_ranks, options = PLUGINS[plugin]
    arguments = [str(tmp_path), "--max_steps", "3", "--fits", "2"]
    run_ranks(n_ranks, run, ["--plugin", plugin, *options], arguments, timeout=150)
    for name in ("loss", "grad_norm"):
        assert losses(tmp_path, name) == pytest.approx(losses(twice, name), rel=1e-4)
    close(load_file(tmp_path / "final" / "model.safetensors"), load_file(twice / "final" / "model.safetensors"))


def test_powersgd_resumes_with_each_ranks_error(tmp_path: Path) -> None:
    options = ["--plugin", "powersgd", "--start_powerSGD_iter", "2", "--min_compression_rate", "1"]
    run_ranks(2, run, options, [str(tmp_path)], timeout=150)
    wanted = losses(tmp_path)
    state = torch.load(tmp_path / "checkpoint-3" / "powersgd_1.bin", weights_only=True)
    assert state["models"][0]["shared"]["iter"] == 3
    assert any(error.abs().max() > 0 for error in state["models"][0]["error"].values())
    run_ranks(2, run, options, [str(tmp_path), "--resume"], timeout=150)
    assert losses(tmp_path)[-3:] == wanted[-3:]


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("looped") / "said.json"
    run_ranks(2, run, [], [str(output), "--cpu"], LOOP, timeout=150)
    said: dict[str, Any] = json.loads(output.read_text())
    return said


@pytest.mark.parametrize("plugin", ["zero_stage_1", "zero_stage_2", "zero_stage_3", "powersgd"])
def test_a_loop_with_a_transformers_model_trains_as_with_ddp(
    plugin: str, looped: dict[str, Any], tmp_path: Path
) -> None:
    options = ["--plugin", plugin]
    if plugin == "powersgd":
        options += ["--start_powerSGD_iter", "5", "--matrix_approximation_rank", "4", "--min_compression_rate", "1"]
    run_ranks(2, run, options, [str(tmp_path / "said.json")], LOOP, timeout=150)
    got = json.loads((tmp_path / "said.json").read_text())
    assert got["n"] == 2
    assert got["seen"] == looped["seen"] == 40  # each row once, though 40 rows are no whole batches for two ranks
    if plugin != "powersgd":
        assert got["losses"] == pytest.approx(looped["losses"], rel=1e-5)
        assert got["accuracies"] == looped["accuracies"]
    else:
        n_before = 2 * 5  # micro-steps of the steps before compression
        assert got["losses"][:n_before] == pytest.approx(looped["losses"][:n_before], rel=1e-5)
        assert got["losses"] != looped["losses"]
        assert sum(got["losses"][-10:]) == pytest.approx(sum(looped["losses"][-10:]), rel=0.2)


def test_a_loop_with_a_transformers_model_trains_through_two_pipes_as_with_ddp(
    looped: dict[str, Any], tmp_path: Path
) -> None:
    options = ["--plugin", "pipe", "--chunks", "3", "--pipeline_parallel_size", "2"]
    run_ranks(4, run, options, [str(tmp_path / "said.json")], LOOP, timeout=150)
    got = json.loads((tmp_path / "said.json").read_text())
    assert got["n"] == 2
    assert got["seen"] == 40
    assert got["losses"] == pytest.approx(looped["losses"], rel=1e-5)
    assert got["accuracies"] == looped["accuracies"]


def test_a_loop_with_a_transformers_model_trains_through_one_pipe_as_in_one_process(tmp_path: Path) -> None:
    run_ranks(1, run, [], [str(tmp_path / "one.json"), "--cpu"], LOOP, timeout=150)
    run_ranks(2, run, ["--plugin", "pipe"], [str(tmp_path / "two.json")], LOOP, timeout=150)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert one["n"] == two["n"] == 1
    assert two["seen"] == one["seen"] == 40
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["accuracies"] == one["accuracies"]

"""The runner: a plugin before an unmodified script, however it is launched; and the traps of launching on a CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from accelerate_plugins import Accelerator, ZeroPlugin
from accelerate_plugins.__main__ import main
from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("script.py")


def plain(output: Path) -> None:
    import runpy

    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerate.Accelerator.end_training = lambda self: None  # on gloo it may hang: see `PluginMethods.end_training`
    sys.argv = [str(SCRIPT), str(output)]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def under_the_runner(argv: list[str]) -> None:
    main(argv)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("plain") / "said.json"
    run_ranks(2, plain, output)
    said: dict[str, Any] = json.loads(output.read_text())
    return said


def check(said: dict[str, Any], wanted: dict[str, Any], plugin: str, n: int = 2) -> None:
    assert said["plugin"] == plugin
    assert said["num_processes"] == n
    assert said["pickles"]
    if plugin != "PowerSGDPlugin":
        assert said["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for ours, theirs in zip(said["weights"], wanted["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
    else:
        assert said["losses"] == pytest.approx(wanted["losses"], rel=0.2)
        assert said["losses"] != wanted["losses"]


@pytest.mark.parametrize(
    ("options", "made_by", "plugin"),
    [
        (["--plugin", "zero_stage_1"], "", "ZeroPlugin"),
        (["--plugin_config", "zero2.yaml"], "subclass", "ZeroPlugin"),
        (["--plugin=zero", "--stage=3"], "state_first", "ZeroPlugin"),
        (["--plugin", "powersgd", "--start_powerSGD_iter", "2", "--min_compression_rate", "1"], "", "PowerSGDPlugin"),
        (["--plugin_config", "zero2.yaml", "-m"], "", "ZeroPlugin"),
    ],
)
def test_an_unmodified_script_trains_as_with_ddp(
    options: list[str], made_by: str, plugin: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "zero2.yaml").write_text("plugin: zero\nstage: 2\nbucket_cap_mb: 0.002\n")
    options = [str(tmp_path / each) if each.endswith(".yaml") else each for each in options]
    target = "tests.accelerate_plugins.script" if options[-1] == "-m" else str(SCRIPT)
    arguments = [str(tmp_path / "said.json"), *(["--made_by", made_by] if made_by else [])]
    run_ranks(2, under_the_runner, [*options, target, *arguments])
    said = json.loads((tmp_path / "said.json").read_text())
    check(said, wanted, plugin)
    assert said["argv"] == arguments
    assert said["class"] == ("Mine" if made_by == "subclass" else "Accelerator")
    assert said["own"] == (2 if made_by == "subclass" else None)


def test_a_pipe_trains_as_one_process(tmp_path: Path) -> None:
    run_ranks(1, plain, tmp_path / "one.json")
    argv = ("-m", "accelerate_plugins", "--plugin", "pipe", "--chunks", "4", str(SCRIPT), str(tmp_path / "said.json"))
    done = launch(*TWO, *argv)
    assert done.returncode == 0, done.stderr
    said, one = (json.loads((tmp_path / name).read_text()) for name in ("said.json", "one.json"))
    check(said, one, "PipePlugin", n=1)


def test_two_pipes_train_as_two_processes_with_ddp(wanted: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text("plugin: pipe\nchunks: 4\npipeline_parallel_size: 2\n")
    output = tmp_path / "said.json"
    run_ranks(4, under_the_runner, ["--plugin_config", str(tmp_path / "pipe.yaml"), str(SCRIPT), str(output)])
    check(json.loads(output.read_text()), wanted, "PipePlugin")


def launch(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A real launcher; what it starts finds neither the tests' warnings filters nor their world."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST_"))},
            "PYTHONPATH": root,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HOME": "/nonexistent",
            **environment,
        },
    )


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_machines", "1", "--mixed_precision", "no")
TWO = (*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "--dynamo_backend", "no")


def test_accelerate_launch_without_a_gpu_trains_together(wanted: dict[str, Any], tmp_path: Path) -> None:
    output = str(tmp_path / "said.json")
    done = launch(*TWO, "-m", "accelerate_plugins", "--plugin", "zero_stage_2", str(SCRIPT), output)
    assert done.returncode == 0, done.stderr
    check(json.loads((tmp_path / "said.json").read_text()), wanted, "ZeroPlugin")


def test_torchrun_with_settings_in_the_environment_only(wanted: dict[str, Any], tmp_path: Path) -> None:
    output = str(tmp_path / "said.json")
    done = launch(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", _free_port()),
        *("-m", "accelerate_plugins", str(SCRIPT), output),
        ACCELERATE_PLUGINS_PLUGIN="zero",
        ACCELERATE_PLUGINS_STAGE="3",
    )
    assert done.returncode == 0, done.stderr
    check(json.loads((tmp_path / "said.json").read_text()), wanted, "ZeroPlugin")


def test_a_wrong_file_ends_the_launch_at_once_with_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("plugin: zero\nstage: 4\n")
    argv = ("-m", "accelerate_plugins", "--plugin_config", str(tmp_path / "wrong.yaml"), str(SCRIPT), "never")
    done = launch(*TWO, *argv)
    assert done.returncode != 0
    assert f"accelerate_plugins: {tmp_path / 'wrong.yaml'}: stage must be one of 1, 2, 3, got 4" in done.stderr


def test_one_process_where_several_were_asked_for_is_said() -> None:
    argv = ("--cpu", "--num_processes", "2", "--dynamo_backend", "no", "-m", "accelerate_plugins", "--plugin", "zero")
    done = launch(*ACCELERATE, *argv, str(SCRIPT), "never")
    assert done.returncode != 0
    assert "accelerate launch was asked for several processes and has started one" in done.stderr
    assert "--multi_gpu in place of --cpu" in done.stderr


def test_one_process_where_one_was_asked_for_is_right(tmp_path: Path) -> None:
    output = tmp_path / "said.json"
    argv = ("--cpu", "--num_processes", "1", "--dynamo_backend", "no", "-m", "accelerate_plugins", "--plugin", "zero")
    done = launch(*ACCELERATE, *argv, str(SCRIPT), str(output), MASTER_ADDR="somewhere", MASTER_PORT="1234")
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["num_processes"] == 1


def trained_alone() -> str:
    """As with TrainingArguments() before any plugin, or a state that somebody else has made."""
    accelerate.PartialState()
    with pytest.raises(RuntimeError, match="so each would train alone") as error:
        Accelerator(plugin=ZeroPlugin(stage=2))
    return str(error.value)


def test_ranks_that_would_train_alone_are_refused() -> None:
    for said in run_ranks(2, trained_alone):
        assert "the launcher has started 2 processes, but Accelerate sees 1" in said


def without_being_told() -> int:
    return int(Accelerator(plugin=ZeroPlugin(stage=2)).num_processes)


def test_without_an_accelerator_the_ranks_meet_on_the_cpu() -> None:
    assert run_ranks(2, without_being_told) == [2, 2]

"""Settings: from a file, the environment and the command line the same ones, and one clear error for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from accelerate_plugins import PipePlugin, PowerSGDPlugin, ZeroPlugin, config
from accelerate_plugins.__main__ import main
from accelerate_plugins.plugin import PLUGINS, Plugin, load
from accelerate_plugins.schema import schema, settings
from lightning_distkit.core.compression import PowerSGDState
from lightning_distkit.core.pipeline import DistributedPipe
from lightning_distkit.core.zero import ZeroOptimizer, shard_parameters
from lightning_distkit.strategies import NAMES
from tests.ranks import run_ranks


def read(text: str | None, path: Path, overrides: dict[str, str] | None = None) -> Plugin | None:
    if text is None:
        return config.plugin_of(config.gathered(None, overrides or {}))
    (path / "plugin.yaml").write_text(text)
    return config.plugin_of(config.gathered(path / "plugin.yaml", overrides or {}))


WAYS: dict[str, tuple[str, Plugin]] = {
    "plugin: zero\nstage: 2\nbucket_cap_mb: 4": "ZeroPlugin(stage=2, bucket_cap_mb=4)",
    "plugin: zero_stage_3\npolicy: torch.nn.Linear\nmixed_precision: {param_dtype: bf16}": (
        "ZeroPlugin(stage=3, policy='torch.nn.Linear', mixed_precision={'param_dtype': 'bf16'})"
    ),
    "plugin: acp_sgd\nmatrix_approximation_rank: {'*first*': 0, '*': {0: 1, 50: 2}}": (
        "PowerSGDPlugin(hook='acp_sgd', matrix_approximation_rank={'*first*': 0, '*': {0: 1, 50: 2}})"
    ),
    "plugin: powersgd\northogonalization_epsilon: 1e-8\nwire_dtype: bf16\nuse_error_feedback: false": (
        "PowerSGDPlugin(orthogonalization_epsilon=1e-8, wire_dtype='bf16', use_error_feedback=False)"
    ),
    "plugin: pipe\nchunks: 4\nbalance: [2, 3]\nschedule: 1f1b\nmodule: model.layers\ntimeout: 60": (
        "PipePlugin(chunks=4, balance=[2, 3], schedule='1f1b', module='model.layers', timeout=60)"
    ),
}  # type: ignore[assignment]


@pytest.mark.parametrize("text", WAYS)
def test_file_environment_and_command_line_say_the_same(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = eval(str(WAYS[text]), {each.__name__: each for each in (PipePlugin, PowerSGDPlugin, ZeroPlugin)})
    by_key = {key: yaml.safe_dump(value).removesuffix("...\n") for key, value in yaml.safe_load(text).items()}
    assert read(text, tmp_path) == wanted
    assert read(None, tmp_path, by_key) == wanted
    for key, value in by_key.items():
        monkeypatch.setenv(f"ACCELERATE_PLUGINS_{key.upper()}", value)
    assert config.from_environment() == wanted
    monkeypatch.setenv("ACCELERATE_PLUGINS_CONFIG", str(tmp_path / "plugin.yaml"))
    assert config.from_environment() == wanted


def test_the_command_line_is_over_the_environment_which_is_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_PLUGINS_RANDOM_SEED", "2")
    monkeypatch.setenv("ACCELERATE_PLUGINS_MATRIX_APPROXIMATION_RANK", "2")
    text = "plugin: powersgd\nmatrix_approximation_rank: 1\nrandom_seed: 1\nstart_powerSGD_iter: 7"
    plugin = read(text, tmp_path, {"random_seed": "3"})
    assert plugin == PowerSGDPlugin(matrix_approximation_rank=2, random_seed=3, start_powerSGD_iter=7)


WRONG: dict[str, str] = {
    "plugin: zero\nstagee: 2": "reshard_after_forward; did you mean stage?",
    "plugin: zero\nmatrix_approximation_rank: 2": "matrix_approximation_rank is no key of plugin zero, which takes",
    "plugin: zero\nstage: 4": "stage must be one of 1, 2, 3, got 4",
    "plugin: zero\nstage: '2'": "stage must be one of 1, 2, 3, got '2'",
    "plugin: zero\nstage: 3\nbucket_cap_mb: 4": "bucket_cap_mb says nothing in stage 3; leave it out",
    "plugin: zero\nbucket_cap_mb: 0": "bucket_cap_mb must be above 0, got 0",
    "plugin: zero\nelementwise: maybe": "elementwise must be true or false or null, got 'maybe'",
    "plugin: zero_stage_2\nstage: 3": "stage is 2 by the name of plugin zero_stage_2, got 3",
    "plugin: zero_stage_3\nmixed_precision: {param_dtype: int8}": "mixed_precision must be a mapping or null, got",
    "plugin: zero_stage_3\nmixed_precision: {dtype: bf16}": "mixed_precision must have keys of param_dtype",
    "plugin: powersgd\nmatrix_approximation_rank: 0": "matrix_approximation_rank must be a whole number of at least 1",
    "plugin: powersgd\nmatrix_approximation_rank: many": "must be a whole number or a mapping, got 'many'",
    "plugin: powersgd\nmatrix_approximation_rank: {'*': {5: 1}}": "what holds from iteration 0 on",
    "plugin: powersgd\nuse_error_feedback: 1": "use_error_feedback must be true or false, got 1",
    "plugin: powersgd\nwire_dtype: int8": "wire_dtype must be one of bf16, fp16, bfloat16, float16 or null, got 'int8'",
    "plugin: powersgd\nstart_powerSGD_iter: 1": "start_powerSGD_iter must be at least 2",
    "plugin: powersg": "plugin must be one of powersgd, batched_powersgd, acp_sgd, pipe, zero,",
    "plugin: pipe\nchunk: 4": "timeout; did you mean chunks?",
    "plugin: pipe\nchunks: many": "chunks must be a whole number, got 'many'",
    "plugin: pipe\nchunks: 0": "chunks must be a positive integer, got 0",
    "plugin: pipe\nschedule: zb": "schedule must be one of gpipe, 1f1b, interleaved_1f1b, got 'zb'",
    "plugin: pipe\nn_stages_per_rank: 2\nschedule: 1f1b": "n_stages_per_rank: 1f1b has one stage a rank, got 2",
    "plugin: pipe\nbalance: [2, a]": "balance must be one of auto, size or a list, got [2, 'a']",
    "plugin: pipe\ndata_parallel_size: 0": 'data_parallel_size must be a whole number of at least 1, or "auto", got 0',
    "plugin: pipe\ntimeout: -1": "timeout must be positive, got -1 seconds",
    "stage: 2": "plugin is missing; it must be one of",
    "- plugin": "the file must be a mapping of keys to values",
    "plugin: [": "this is no YAML file that can be read",
    "": "the file must be a mapping of keys to values",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_said_with_file_and_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError) as error:
        read(text, tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'plugin.yaml'}: ")
    assert WRONG[text] in str(error.value)


def test_what_is_wrong_in_the_environment_is_said_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_PLUGINS_PLUGIN", "zero")
    monkeypatch.setenv("ACCELERATE_PLUGINS_STAGE", "4")
    with pytest.raises(config.ConfigError, match=r"^ACCELERATE_PLUGINS_STAGE: stage must be one of 1, 2, 3, got 4"):
        config.from_environment()
    monkeypatch.setenv("ACCELERATE_PLUGINS_STAG", "2")
    with pytest.raises(config.ConfigError, match=r"ACCELERATE_PLUGINS_STAG: no plugin .*mean ACCELERATE_PLUGINS_STAGE"):
        config.from_environment()


def exits(argv: list[str], environment: dict[str, str]) -> tuple[Any, str]:
    import contextlib
    import io
    import os

    os.environ.update(environment)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(argv)
        except SystemExit as end:
            return end.code, said.getvalue()
    return 0, said.getvalue()


COMMANDS: dict[str, tuple[Callable[[Path], list[str]], dict[str, str], str]] = {
    "unknown option": (lambda _: ["--stagee", "2", "train.py"], {}, "--stagee: no plugin has such a setting; did you"),
    "unknown key": (lambda path: ["--plugin_config", str(path / "unknown.yaml"), "train.py"], {}, "unknown.yaml: stag"),
    "rank 0": (
        lambda _: ["--plugin", "powersgd", "--matrix_approximation_rank", "0", "train.py"],
        {},
        "--matrix_approximation_rank: matrix_approximation_rank must be a whole number of at least 1, got 0",
    ),
    "stage 4": (lambda _: ["--plugin=zero", "--stage=4", "train.py"], {}, "--stage: stage must be one of 1, 2, 3, got"),
    "no file": (lambda _: ["--plugin_config", "gone.yaml", "train.py"], {}, "gone.yaml: there is no such file"),
    "no plugin": (lambda _: ["train.py"], {}, "no plugin is named"),
    "no script": (lambda _: ["--plugin", "zero"], {}, "no script is given to run"),
    "no value": (lambda _: ["--plugin"], {}, "--plugin: expected one argument"),
    "deepspeed": (
        lambda path: ["--plugin_config", str(path / "good.yaml"), "train.py"],
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        "good.yaml: ZeroPlugin cannot be had beside DeepSpeed (ACCELERATE_USE_DEEPSPEED=true, set by the launcher",
    ),
    "fsdp": (
        lambda path: ["--plugin_config", str(path / "good.yaml"), "train.py"],
        {"ACCELERATE_USE_FSDP": "true"},
        "good.yaml: ZeroPlugin cannot be had beside FSDP",
    ),
    "tpu": (
        lambda path: ["--plugin_config", str(path / "good.yaml"), "train.py"],
        {"PJRT_DEVICE": "TPU"},
        "good.yaml: ZeroPlugin cannot be had beside a TPU",
    ),
}


for _name, _environment, _words in (
    ("deepspeed", {"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed (ACCELERATE_USE_DEEPSPEED=true"),
    ("fsdp", {"ACCELERATE_USE_FSDP": "true"}, "FSDP"),
    ("tpu", {"PJRT_DEVICE": "TPU"}, "a TPU"),
):
    COMMANDS[f"pipe and {_name}"] = (
        lambda path: ["--plugin_config", str(path / "pipe.yaml"), "train.py"],
        _environment,
        f"pipe.yaml: PipePlugin cannot be had beside {_words}",
    )


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_rank_says_the_same_and_exits_before_anything_is_run(kind: str, tmp_path: Path) -> None:
    (tmp_path / "unknown.yaml").write_text("plugin: zero\nstag: 2\n")
    (tmp_path / "good.yaml").write_text("plugin: zero\nstage: 2\n")
    (tmp_path / "pipe.yaml").write_text("plugin: pipe\nchunks: 2\n")
    argv, environment, wanted = COMMANDS[kind]
    first, second = run_ranks(2, exits, argv(tmp_path), environment)
    assert first == second
    assert first[0] == 2
    assert wanted in first[1]
    assert first[1].count("\n") == 1  # one error, no traceback


def test_every_argument_of_the_core_objects_is_a_setting_with_its_default() -> None:
    ours = {each.name: each.default for each in fields(PowerSGDPlugin)}
    theirs = {name: each.default for name, each in signature(PowerSGDState).parameters.items()}
    del theirs["process_group"]
    assert theirs.items() <= ours.items()
    known = {*signature(ZeroOptimizer).parameters, *signature(shard_parameters).parameters}
    for each in fields(ZeroPlugin):
        assert each.name in {*known, "stage"}
        if each.name in known and each.name != "policy":
            assert each.default is None  # the core object's own default is taken
    theirs = {name: each.default for name, each in signature(DistributedPipe).parameters.items()}
    for name, default in PipePlugin().pipe_arguments().items():
        assert name == "chunks" or default == theirs.pop(name)
    left = (
        "module",
        "chunks",
        "sample",
        "outputs",
        "group",
        "mesh",
        "device",
    )  # what no file can say, and what is fixed
    assert set(theirs) == set(left)
    assert ZeroPlugin().policy == signature(shard_parameters).parameters["policy"].default


def test_the_names_are_those_of_the_lightning_strategies() -> None:
    assert set(NAMES) - {"ddp_noop"} == set(PLUGINS) - {"zero"}  # of the first no plugin is made


@pytest.mark.parametrize("name", PLUGINS)
def test_every_setting_is_explained_and_has_a_schema(name: str) -> None:
    for key, its in settings(load(PLUGINS[name][0])).items():
        assert its["description"], key
        assert {"type", "enum", "anyOf"} & its.keys(), key


def test_validate_config_and_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["zer", "zero", "5", "2", "", "", "", "", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    main(["config", str(tmp_path / "zero2.yaml")])
    assert yaml.safe_load((tmp_path / "zero2.yaml").read_text()) == {"plugin": "zero", "stage": 2}
    assert "stage must be one of 1, 2, 3, got 5" in capsys.readouterr().out
    main(["validate", str(tmp_path / "zero2.yaml")])
    assert "ZeroPlugin(stage=2" in capsys.readouterr().out
    (tmp_path / "bad.yaml").write_text("plugin: zero\nstage: 5\n")
    with pytest.raises(SystemExit) as end:
        main(["validate", str(tmp_path / "bad.yaml")])
    assert end.value.code == 1
    assert "bad.yaml: stage must be one of 1, 2, 3, got 5" in capsys.readouterr().err
    main(["schema"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema()))


def test_two_different_plugins_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate_plugins import Accelerator

    monkeypatch.setenv("ACCELERATE_PLUGINS_PLUGIN", "zero_stage_2")
    with pytest.raises(ValueError, match="two plugins are asked for"):
        Accelerator(plugin=ZeroPlugin(stage=1))
    monkeypatch.delenv("ACCELERATE_PLUGINS_PLUGIN")
    with pytest.raises(TypeError, match="plugin must be a PipePlugin, a PowerSGDPlugin or a ZeroPlugin, got 'zero'"):
        Accelerator(plugin="zero")  # type: ignore[arg-type]


TIMED = """
import sys, time
import accelerate
begin = time.process_time()
import accelerate_plugins
accelerate_plugins.Accelerator, accelerate_plugins.PowerSGDPlugin, accelerate_plugins.ZeroPlugin
accelerate_plugins.PipePlugin
print(time.process_time() - begin, [name for name in {names} if name in sys.modules])
"""


def test_importing_it_imports_no_lightning_and_takes_hardly_longer_than_accelerate() -> None:
    names = ["lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "torch.distributed.fsdp"]
    code = TIMED.replace("{names}", repr(names))
    took = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, _, loaded = done.stdout.partition(" ")
        assert loaded.strip() == "[]"
        took.append(float(seconds))
    assert min(took) < 0.3


def test_dtypes_of_a_mixed_precision_by_name() -> None:
    plugin = ZeroPlugin(stage=3, mixed_precision={"param_dtype": "bf16", "reduce_dtype": "float32"})
    assert plugin.mixed_precision.param_dtype is torch.bfloat16  # type: ignore[union-attr]
    assert plugin.mixed_precision.reduce_dtype is torch.float32  # type: ignore[union-attr]


WITHOUT_LIGHTNING = """
import sys
for name in ("lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"):
    sys.modules[name] = None  # as if it were not installed
import torch, accelerate_plugins
from accelerate_plugins import __main__, accelerator, install, trainer, zero_methods, compression_methods, pipe_methods
from accelerate_plugins import PipePlugin, PowerSGDPlugin, ZeroPlugin
for plugin in (ZeroPlugin(stage=2), PowerSGDPlugin(), PipePlugin()):
    ours = accelerate_plugins.Accelerator(plugin=plugin, cpu=True)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model, optimizer = ours.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    ours.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
print("trained")
"""


def test_it_works_where_lightning_is_not_installed() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIGHTNING], capture_output=True, text=True, check=False)
    assert done.stdout == "trained\n", done.stderr

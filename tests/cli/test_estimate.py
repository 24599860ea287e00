"""``distkit estimate``: every form of model it takes, what it says of them, and that nothing is made."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_distkit
from lightning_distkit.cli.checkpoint import module_like
from lightning_distkit.cli.estimate import estimate
from lightning_distkit.cli.shapes import load
from lightning_distkit.core.zero.policy import find_blocks

MODELS = """
from torch import nn

WIDTH = 8

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

def with_loss():
    return net(), lambda module: 0

def huge():
    return nn.ModuleList(nn.Linear(30_000, 30_000) for _ in range(80))

def module():
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def configure_model(self):
            self.net = net()

    return Module()

def nothing():
    return None

def needs(one):
    return net()
"""
NUMEL = 8 * 16 + 16 + 16 * 8 + 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_to_estimate.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delitem(sys.modules, "models_to_estimate", raising=False)
    return tmp_path


def net(tied: bool = False) -> nn.Module:
    """With all that a state dict may hold."""
    module = nn.Module()
    first, *others = (nn.Linear(4, 4) for _ in range(12))
    module.layers = nn.ModuleList([first, *others])
    module.norm = nn.BatchNorm1d(4)
    module.head = nn.Linear(4, 4, bias=False)
    if tied:
        module.head.weight = first.weight
    return module


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> list[dict[str, Any]]:
    estimate(*arguments, **{**options, "json_lines": True})
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        *(("7B", 7 * 10**9), ("7b", 7 * 10**9), ("7e9", 7 * 10**9), ("1.5B", 15 * 10**8), ("350M", 350 * 10**6)),
        *(("2k", 2000), ("1T", 10**12), ("7_000", 7000), ("123", 123)),
    ],
)
def test_a_number_may_be_written_as_people_do(text: str, numel: int) -> None:
    assert load(text).subject == numel


@pytest.mark.parametrize(
    "path",
    [
        *("models_to_estimate:net", "models_to_estimate.net", "models_to_estimate.py:net"),
        *("models_to_estimate:with_loss", "models_to_estimate:module"),
    ],
)
def test_a_callable_is_called_on_the_meta_device(path: str, folder: Path) -> None:
    module = load(path).subject
    assert isinstance(module, nn.Module)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in module.parameters()) == NUMEL


def test_a_model_larger_than_memory_takes_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, whole, *_ = lines_of(capsys, "models_to_estimate:huge")
    assert whole["parameters"] == 4 * 80 * (30_000**2 + 30_000)  # 288 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def same(found: Any, module: nn.Module) -> bool:
    """Whether names, shapes and dtypes of parameters and buffers are."""

    def of(each: nn.Module) -> list[dict[str, Any]]:
        pairs = (each.named_parameters(remove_duplicate=False), each.named_buffers())
        return [{name: (tensor.shape, tensor.dtype) for name, tensor in pair} for pair in pairs]

    return of(found) == of(module)


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "net.ckpt", "net.bin"])
@pytest.mark.parametrize("inside", [None, "state_dict", "model"])
def test_a_checkpoint_has_the_modules_shapes(name: str, inside: str | None, folder: Path) -> None:
    state: dict[str, Any] = net().to(torch.bfloat16).state_dict()
    if inside:
        state = {"epoch": 3, "optimizer_states": [{"state": {0: torch.ones(9)}}], inside: state}
    torch.save(state, name)
    found = load(name).subject
    assert same(found, net().to(torch.bfloat16))
    assert isinstance(found, nn.Module)
    assert list(find_blocks(found)) == [f"layers.{n}" for n in range(12)]


def nested(state: dict[str, Any]) -> dict[str, Any]:
    """As a pytree: a dict for each module."""
    tree: dict[str, Any] = {}
    for name, tensor in state.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = tensor
    return tree


STATE = {"state": {0: {"exp_avg": torch.ones(10**4)}}, "param_groups": [{"params": [0]}]}
OTHERS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "beside": (
        lambda state: {"model": state, "optimizer": STATE, "step": torch.tensor(3)},
        "of it 'model', without 'optimizer', 'step'",
    ),
    "lightning": (
        lambda state: {"state_dict": state, "optimizer_states": [STATE], "epoch": 3},
        "of it 'state_dict', without 'optimizer_states'",
    ),
    "twice": (lambda state: {"module": {"model": state}, "optim": STATE}, "of it 'module.model', without 'optim'"),
    "no word for it": (lambda state: {"generator": state, "optim_g": STATE}, "without 'optim_g'"),
    "another word": (lambda state: {"generator": state, "adam": STATE}, "without 'adam'"),
    "flat": (
        lambda state: {**{f"net.{n}": t for n, t in state.items()}, "optimizer.0.exp_avg": torch.ones(10**4)},
        "without 'optimizer'",
    ),
    "flat, by its state": (lambda state: {**state, "layers.0.weight.exp_avg": torch.ones(4, 4)}, "without 'exp_avg'"),
    "nested": (nested, ""),
    "alone": (lambda state: state, ""),
    "words that are not meant": (
        lambda state: {"state_dict": {**state, "optimizer.weight": torch.ones(4), "optimal.weight": torch.ones(4)}},
        "of it 'state_dict'",
    ),
}


@pytest.mark.parametrize("how", OTHERS)
def test_of_a_checkpoint_the_models_parameters_are_counted_and_what_is_taken_is_said(
    how: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, says = OTHERS[how]
    torch.save(make(dict(net().state_dict())), "net.pt")
    first, whole, *_ = lines_of(capsys, "net.pt")
    more = 8 if how == "words that are not meant" else 0
    assert whole["parameters"] == 4 * (sum(each.numel() for each in net().parameters()) + more)
    assert first["about"].startswith(f"net.pt ({says}): " if says else "net.pt: ")


def test_the_blocks_may_be_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unsharded = {
        policy: lines_of(capsys, "models_to_estimate:net", policy=policy, stage=3)[1]["unsharded"]
        for policy in ("auto", "torch.nn.Linear", 100)
    }
    assert unsharded["torch.nn.Linear"] == unsharded[100] == unsharded["auto"] > 0
    for policy, says in (("torch.nn.Conv2d", "must match at least one module"), ("torch.nn.Nothing", "Nothing")):
        with pytest.raises(SystemExit) as end:
            estimate("models_to_estimate:net", policy=policy)
        assert says in str(end.value)


def test_lightnings_own_checkpoint_opens(folder: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    module = Module()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint("lightning.ckpt")
    assert same(load("lightning.ckpt").subject, module)


def test_a_tied_parameter_is_tied_in_a_checkpoint_too(folder: Path) -> None:
    torch.save(net(tied=True).state_dict(), "net.pt")
    found = load("net.pt").subject
    assert isinstance(found, nn.Module)
    assert len(list(found.parameters())) == len(list(net(tied=True).parameters()))


def test_safetensors_are_read_by_their_header_alone(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(net().half().state_dict(), "net.safetensors", metadata={"format": "pt"})
    path = Path("net.safetensors")
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    path.write_bytes(path.read_bytes()[: 8 + length])  # without any tensor's memory
    found = load("net.safetensors").subject
    assert isinstance(found, nn.Module)
    # It sorts the names, but they are the same.
    parameters = {name: (p.shape, p.dtype) for name, p in found.named_parameters()}
    assert parameters == {name: (p.shape, p.dtype) for name, p in net().half().named_parameters()}
    assert {name for name, _ in found.named_buffers()} == {name for name, _ in net().named_buffers()}


def test_an_index_stands_for_all_its_files(folder: Path) -> None:
    from safetensors.torch import save_file

    state = net().state_dict()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, file)
    Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = load("model.safetensors.index.json").subject
    assert isinstance(found, nn.Module)
    assert found.state_dict().keys() == state.keys()


TRANSFORMERS = """
import json
from pathlib import Path
from types import SimpleNamespace
from torch import nn

class AutoConfig:
    @staticmethod
    def from_pretrained(path):
        return SimpleNamespace(**json.loads(Path(path).read_text()))

class AutoModel:
    @staticmethod
    def from_config(config):
        return nn.Linear(config.width, config.width)

class WithHead(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.body = AutoModel.from_config(config)
        self.head = nn.Linear(config.width, 2)
"""


@pytest.mark.parametrize(("architectures", "numel"), [(None, 20), (["WithHead"], 30), (["Unknown"], 20)])
def test_a_config_is_transformers_to_build(
    architectures: list[str] | None, numel: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    (folder / "config.json").write_text(json.dumps({"width": 4, "architectures": architectures}))
    try:
        module = load("config.json").subject
    finally:
        sys.modules.pop("transformers", None)
    assert isinstance(module, nn.Module)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in module.parameters()) == numel


def test_a_name_of_nn_modules_own_is_no_obstacle() -> None:
    weights = {"modules.0.half": torch.ones(2), "modules.1.half": torch.ones(2), "type": torch.ones(3)}
    module = module_like(weights)
    assert {name for name, _ in module.named_parameters()} == set(weights)


def test_the_json_is_the_seeds_table(capsys: pytest.CaptureFixture[str]) -> None:
    first, *stages = lines_of(capsys, "7B")
    assert first["world_size"] == 8
    assert [each["model_state"] for each in stages] == [112e9, 63e9, 38.5e9, 14e9]
    assert all(each["total"] >= each["model_state"] for each in stages)


def test_one_stage_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"precision": "bf16-true", "master_weights": True, "world_size": 4, "fits": "80GB"}
    _, only, last = lines_of(capsys, "7B", stage=2, **options)
    assert (only["stage"], only["model_state"]) == (2, 14e9 + (14e9 + 28e9 + 56e9) / 4)
    assert last["world_sizes"].keys() == {"2"}


@pytest.mark.parametrize(
    ("model", "options", "world_sizes", "says"),
    [
        ("7B", {"fits": "24GB"}, {"0": None, "1": None, "2": None, "3": 8}, "Take stage 3 on 8 ranks"),
        ("7B", {"fits": "40 GB"}, {"0": None, "1": None, "2": 8, "3": 4}, "Take stage 2 on 8 ranks"),
        (
            *("7B", {"fits": "24gb", "world_size": 4}, {"0": None, "1": None, "2": None, "3": 8}),
            "On 4 ranks nothing fits. Take stage 3 on 8 ranks.",
        ),
        ("7B", {"fits": "1GB"}, dict.fromkeys("0123"), "Nothing fits. Take lower precision"),
        ("1M", {"fits": "1GiB"}, dict.fromkeys("0123", 1), "Take DDP on 8 ranks"),
        ("1M", {"fits": "16MB", "world_size": 1}, dict.fromkeys("0123", 1), "Take DDP on 1 rank:"),
    ],
)
def test_fits_answers_which_stage_and_how_many_ranks(
    model: str,
    options: dict[str, Any],
    world_sizes: dict[str, int | None],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    *_, last = lines_of(capsys, model, **options)
    assert last["world_sizes"] == world_sizes
    assert says in last["verdict"][-1]


def test_the_units_are_of_1000_or_of_1024(capsys: pytest.CaptureFixture[str]) -> None:
    limits = [lines_of(capsys, "7B", fits=fits)[-1]["fits"] for fits in ("24GB", "24GiB", "1.5TB", "5B")]
    assert limits == [24e9, 24 * 2**30, 1.5e12, 5]


def test_the_bars_read_without_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    estimate("7B", fits="24GB")
    out = capsys.readouterr().out
    assert "\x1b[3" not in out
    bars = [line for line in out.splitlines() if line.startswith(("DDP", "stage"))]
    assert [bar.split()[-2:] for bar in bars] == [["140.00", "GB"], ["66.60", "GB"], ["38.62", "GB"], ["17.39", "GB"]]
    counts = [{letter: bar.count(letter) for letter in "PGOIRU"} for bar in bars]
    width = 76  # 100 columns less name and number, for 140 GB
    for count, (p, g, o) in zip(counts, [(28, 28, 56), (28, 28, 7), (28, 3.5, 7), (3.5, 3.5, 7)], strict=True):
        for letter, size in zip("PGO", (p, g, o), strict=True):
            assert abs(count[letter] - size / 140 * width) <= 2
    assert {bar.index("|") for bar in bars} == {8 + round(24 / 140 * width)}
    for word in ("P parameters", "G gradients", "O optimizer state", "U unsharded", "model state", "112.00", "38.50"):
        assert word in out


def test_colours_tell_the_kinds_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    estimate("7B")
    out = capsys.readouterr().out
    assert "\x1b[1;37;44mP" in out
    assert "\x1b[1;37;42mG" in out


def test_the_figure_is_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate("7B", fits="24GB", figure="memory.png", json_lines=True)
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("models_to_estimate:missing", {}, 'must be "package.module:name" or "file.py:name" of a callable'),
        ("models_to_estimate:WIDTH", {}, "must be a callable without arguments, got 8"),
        ("models_to_estimate:needs", {}, "must be callable without arguments, under torch.device('meta')"),
        ("models_to_estimate:nothing", {}, "must return an nn.Module, or a tuple that begins with one, got None"),
        ("7 apples", {}, "of a callable"),
        ("missing.ckpt", {}, "missing.ckpt must be a file, and there is none"),
        ("broken.pt", {}, "broken.pt must be a file of torch.save"),
        ("broken.safetensors", {}, "broken.safetensors must be a safetensors file"),
        ("empty.pt", {}, "empty.pt must hold a dict of tensors"),
        ("broken.json", {}, "broken.json must be JSON"),
        ("config.json", {}, "needs transformers: pip install transformers"),
        ("7B", {"fits": "24"}, 'fits must be a size above 0 as "24GB" or "24GiB"'),
        ("7B", {"fits": "0GB"}, "got '0GB'"),
        ("7B", {"fits": "24 parsecs"}, "got '24 parsecs'"),
        ("7B", {"optimizer": "newton"}, "optimizer must be one of"),
        ("7B", {"precision": "8"}, "precision must be one of"),
        ("7B", {"world_size": 0}, "world_size must be at least 1, got 0"),
        ("7B", {"figure": "memory.nonsense"}, "--figure must be where a picture can be written"),
        ("7B", {"figure": "nowhere/memory.png"}, "--figure must be where a picture can be written"),
    ],
)
def test_what_cannot_be_estimated_is_said(
    model: str, options: dict[str, Any], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("broken.pt", "broken.safetensors", "broken.json"):
        Path(name).write_text("not what it says it is")
    Path("config.json").write_text("{}")
    torch.save({"epoch": 3}, "empty.pt")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as end:
        estimate(model, **options)
    assert says in str(end.value)


def test_it_is_a_command(folder: Path) -> None:
    arguments = ["7e9", "--world_size=8", "--optimizer=adam", "--stage=3", "--fits=24GB", "--json_lines=true"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_distkit.cli", "estimate", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "PYTHONPATH": str(Path(lightning_distkit.__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    _, stage, last = (json.loads(line) for line in done.stdout.splitlines())
    assert stage["model_state"] == 14e9
    assert last["world_sizes"] == {"3": 8}

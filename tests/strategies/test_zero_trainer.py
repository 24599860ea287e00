"""The Trainer's other doors: names, launchers, command line, evaluation, meta device, tuning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

import lightning_distkit
from lightning_distkit import ZeroStrategy
from tests.ranks import run_ranks
from tests.strategies.modules import ZERO_NAMES, parameters, trainer
from tests.strategies.test_zero import STAGES, Net, strategy_for
from tests.strategies.test_zero_checkpoint import Net as Resumable


def by_name(name: str, folder: Path) -> tuple[str, int, bool, bool]:
    net = Net()
    before = parameters(net)
    fit = trainer(name, folder)
    fit.fit(net)
    assert all(type(p) is nn.Parameter for p in net.parameters())  # whole and plain again
    return (
        type(fit.strategy).__name__,
        fit.strategy.stage,
        bool((parameters(net) != before).all()),
        fit.strategy.ledger.n_steps == 6,
    )


def by_each_name(folder: Path) -> list[tuple[str, int, bool, bool]]:
    return [by_name(name, folder) for name in ZERO_NAMES]


def test_a_name_is_enough_and_every_parameter_moves(tmp_path: Path) -> None:
    wanted = [("ZeroStrategy", int(name[-1]), True, True) for name in ZERO_NAMES]
    assert run_ranks(2, by_each_name, tmp_path) == [wanted, wanted]


@pytest.mark.parametrize("suffix", ["_spawn", "_fork"])
def test_processes_may_be_spawned_or_forked_in_stage_3(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        dedent(
            """
            import sys
            import lightning_distkit
            import lightning.pytorch as pl
            from lightning.pytorch.demos.boring_classes import BoringModel
            if __name__ == "__main__":
                fit = pl.Trainer(accelerator="cpu", devices=2, strategy="zero_stage_3" + sys.argv[1], max_steps=4,
                                 logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                 default_root_dir=sys.argv[2])
                net = BoringModel()
                before = net.layer.weight.clone()
                fit.fit(net)
                print("trained", bool((net.layer.weight != before).all()), type(net.layer.weight).__name__)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", suffix, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(lightning_distkit.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert "trained True Parameter" in done.stdout, done.stdout + done.stderr


YAML = """
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_distkit.ZeroStrategy
    init_args:
      stage: 2
      bucket_cap_mb: 4
"""


@pytest.mark.filterwarnings("ignore")  # how Lightning's own CLI calls jsonargparse
@pytest.mark.parametrize("how", ["name", "class_path", "yaml"])
def test_the_command_line_takes_names_classes_and_yaml(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["script.py"])
    (tmp_path / "c.yaml").write_text(YAML)
    arguments = {
        "name": ["--trainer.strategy=zero_stage_2"],
        "class_path": ["--trainer.strategy=lightning_distkit.ZeroStrategy", "--trainer.strategy.stage=2"],
        "yaml": [f"--config={tmp_path / 'c.yaml'}"],
    }[how]
    cli = LightningCLI(Net, run=False, args=arguments, save_config_callback=None, seed_everything_default=False)
    assert isinstance(cli.trainer.strategy, ZeroStrategy)
    assert cli.trainer.strategy.stage == 2


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"stage": 4}, ValueError, "stage must be 1, 2 or 3, got 4"),
        ({"stage": "2"}, ValueError, "stage must be 1, 2 or 3, got '2'"),
        ({"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb must be above 0, got -1"),
        ({"stage": 1, "policy": nn.Linear}, ValueError, "policy says nothing in stage 1; leave it out"),
        ({"stage": 3, "bucket_cap_mb": 4}, ValueError, "bucket_cap_mb says nothing in stage 3; leave it out"),
        ({"bucket_cap": 4}, TypeError, "unexpected keyword argument 'bucket_cap'"),
    ],
)
def test_wrong_arguments_are_refused_before_any_process_starts(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        ZeroStrategy(**arguments)
    assert says in str(caught.value)


class TiedOnMeta(Net):
    """And nobody says which of the two gives it its values."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        self.net[1].weight = self.net[0].weight


class Closure(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refused(kind: str, stage: int, folder: Path) -> str:
    strategy = ZeroStrategy(stage, policy=nn.Conv2d) if kind == "policy" else strategy_for(stage)
    with pytest.raises(Exception) as error:  # noqa: PT011  the test asks for its text
        trainer(strategy, folder).fit({"closure": Closure, "tied": TiedOnMeta}.get(kind, Net)())
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "stage", "says"),
    [
        ("closure", 1, "ZeRO cannot shard LBFGS"),
        ("closure", 3, "ZeRO cannot shard LBFGS"),
        ("tied", 2, "net.0.weight and net.1.weight are the same one, and which was made last cannot be seen"),
        ("tied", 3, "net.0.weight and net.1.weight are the same one, and which was made last cannot be seen"),
        ("policy", 3, "the policy must match at least one module below the root"),
    ],
)
def test_what_cannot_work_is_one_error_on_every_rank(kind: str, stage: int, says: str, tmp_path: Path) -> None:
    for said in run_ranks(2, refused, kind, stage, tmp_path):
        assert says in said


class Evaluated(Resumable):
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    test_dataloader = predict_dataloader = Resumable.data


def evaluated(stage: int, folder: Path) -> tuple[float, float, Tensor, float]:
    """Validate before any fit; fit twice; test and predict after."""
    net = Evaluated()
    fit = trainer(strategy_for(stage), folder)
    before = float(fit.validate(net, verbose=False)[0]["val_loss"])
    fit.fit(net)
    fit.fit_loop.max_epochs = 2
    fit.fit(net)
    test = float(fit.test(net, verbose=False)[0]["test_loss"])
    return before, test, torch.cat(fit.predict(net)), float(parameters(net).norm())


def evaluated_by_each(folder: Path) -> list[tuple[float, float, Tensor, float]]:
    return [evaluated(stage, folder) for stage in (0, *STAGES)]


def test_validate_fit_twice_test_and_predict_equal_ddps(tmp_path: Path) -> None:
    for wanted, *results in run_ranks(2, evaluated_by_each, tmp_path):
        for got in results:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


class OnMeta(Net):
    """Makes its layers late, without memory."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


class OnCpu(OnMeta):
    """The same, on a real device."""

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def resumed(cls: type[OnMeta], stage: int, folder: Path) -> list[Tensor]:
    """After an epoch; after another one from its checkpoint; and the loss that the checkpoint itself has."""
    net, resumed, loaded = cls(), cls(), cls()
    fit = trainer(strategy_for(stage), folder)
    fit.fit(net)
    fit.save_checkpoint(path := folder / f"{cls.__name__} {stage}.ckpt")
    trainer(strategy_for(stage), folder, max_epochs=2).fit(resumed, ckpt_path=path)
    [losses] = trainer(strategy_for(stage), folder).validate(loaded, ckpt_path=path, verbose=False)
    return [parameters(net), parameters(resumed), torch.tensor(losses["val_loss"])]


def resumed_in_each(folder: Path) -> list[list[Tensor]]:
    return [resumed(OnCpu, 0, folder), *(resumed(OnMeta, stage, folder) for stage in STAGES)]


def test_a_model_made_on_the_meta_device_is_initialised_trained_and_resumed(tmp_path: Path) -> None:
    (wanted, *first), (_, *second) = run_ranks(2, resumed_in_each, tmp_path)
    for got, its in zip(first, second, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(*each) for each in zip(got[:2], its[:2], strict=True))


def monitored(stage: int, folder: Path) -> tuple[list[str], float]:
    net = Net()
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    fit = trainer(
        strategy_for(stage), folder, logger=logger, callbacks=[LearningRateMonitor("step")], log_every_n_steps=1
    )
    fit.fit(net)
    found = Tuner(trainer(strategy_for(stage), folder)).lr_find(Found(), num_training=6, min_lr=1e-4, max_lr=1e-1)
    assert found is not None
    return sorted(logger.experiment.metrics_keys) if fit.is_global_zero else [], float(found.results["loss"][-1])


class Found(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def monitored_by_each(folder: Path) -> list[tuple[list[str], float]]:
    return [monitored(stage, folder / str(stage)) for stage in (0, *STAGES)]


@pytest.mark.filterwarnings("ignore")
def test_learning_rates_are_monitored_and_found_as_with_ddp(tmp_path: Path) -> None:
    wanted, *results = run_ranks(2, monitored_by_each, tmp_path)[0]
    for got in results:
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], rel=1e-4)

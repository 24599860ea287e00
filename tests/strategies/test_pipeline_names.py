"""Names, arguments, the command line, how processes are started, and modules on the meta device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_distkit import PipeStrategy
from lightning_distkit.callbacks import MemoryMonitor
from lightning_distkit.strategies import NAMES, START_METHODS
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import Net, one_device, trainer, weights
from tests.strategies.test_compression_names import script


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PipeStrategy(0), "chunks must be a positive integer, got 0"),
        (lambda: PipeStrategy(checkpoint="sometimes"), "checkpoint must be one of 'always', 'except_last', 'never'"),
        (lambda: PipeStrategy(schedule="pipedream"), "schedule must be one of 'gpipe', '1f1b', 'interleaved_1f1b'"),
        (lambda: PipeStrategy(schedule="1f1b", n_stages_per_rank=2), "1f1b has one stage a rank, got 2"),
        (lambda: PipeStrategy(outputs="first"), "outputs must be one of 'all', 'last', got 'first'"),
        (lambda: PipeStrategy(data_parallel_size=0), "data_parallel_size must be a whole number of at least 1"),
        (lambda: PipeStrategy(data_parallel_hook="powrsgd"), "data_parallel_hook must be one of allreduce, noop"),
        (
            lambda: PipeStrategy(
                data_parallel_hook="powersgd", data_parallel_hook_arguments={"matrix_approximation_rank": 0}
            ),
            "must be a whole number of at least 1, got 0",
        ),
        (lambda: PipeStrategy(data_parallel_hook=lambda bucket: None), "must take (state, bucket)"),
    ],
)
def test_a_wrong_argument_is_refused_before_any_process_starts(make: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert says in str(raised.value)


def test_the_names_are_registered() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    assert "pipe" in NAMES
    for suffix in START_METHODS:
        assert isinstance(StrategyRegistry.get(f"pipe{suffix}"), PipeStrategy)


@pytest.mark.parametrize("suffix", ["_spawn", "_fork"])
def test_processes_may_be_spawned_or_forked_and_the_module_is_whole_afterwards(suffix: str, tmp_path: Path) -> None:
    code = """
        import sys
        import torch
        import lightning_distkit
        import lightning.pytorch as pl
        from torch.utils.data import DataLoader
        from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

        class Net(BoringModel):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

        def fitted(**arguments):
            net = Net()
            before = [p.clone() for p in net.parameters()]
            torch.manual_seed(1)
            rows = DataLoader(RandomDataset(32, 8))
            fit = pl.Trainer(accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False,
                             enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[2],
                             **arguments)
            fit.fit(net, rows, rows)
            assert all((p != b).any() for p, b in zip(net.parameters(), before))
            return net, fit

        if __name__ == "__main__":
            net, fit = fitted(devices=2, strategy="pipe" + sys.argv[1])
            other, one = fitted(devices=1)
            for a, b in zip(net.parameters(), other.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            for name, value in one.callback_metrics.items():
                torch.testing.assert_close(fit.callback_metrics[name], value)
            print("as on one device", type(fit.strategy).__name__)
        """
    done = script(code, tmp_path, suffix, str(tmp_path))
    assert "as on one device PipeStrategy" in done.stdout, done.stdout + done.stderr


YAML = """
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_distkit.PipeStrategy
    init_args:
      chunks: 4
      module: layers
      balance: [4, 2]
"""


def from_the_command_line(how: str, folder: Path) -> tuple[int, Any, int]:
    from lightning.pytorch.cli import LightningCLI

    (folder / "c.yaml").write_text(YAML)
    sys.argv = ["script.py"]
    arguments = {
        "name": ["--trainer.strategy=pipe", "--trainer.accelerator=cpu"],
        "class_path": [
            "--trainer.accelerator=cpu",
            "--trainer.strategy=lightning_distkit.PipeStrategy",
            "--trainer.strategy.chunks=4",
            "--trainer.strategy.balance=[4,2]",
        ],
        "yaml": [f"--config={folder / 'c.yaml'}"],
    }[how]
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    rest = ["--trainer.max_epochs=1", "--trainer.devices=2", *quiet]
    cli = LightningCLI(Net, args=["fit", *arguments, *rest], save_config_callback=None, seed_everything_default=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, PipeStrategy)
    return strategy._pipe_arguments["chunks"], strategy._balance, cli.trainer.global_step


@pytest.mark.filterwarnings("ignore")  # how Lightning's own CLI calls jsonargparse
@pytest.mark.parametrize("how", ["name", "class_path", "yaml"])
def test_the_command_line_takes_names_classes_and_yaml_and_trains(how: str, tmp_path: Path) -> None:
    wanted = (8, "auto", 3) if how == "name" else (4, [4, 2], 3)
    assert run_ranks(2, from_the_command_line, how, tmp_path) == [wanted] * 2


class OnMeta(Net):
    """Makes all its layers late, without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.is_made = False

    def configure_model(self) -> None:
        if not self.is_made:
            self.is_made = True
            with torch.device("meta"):
                self.embedding = nn.Embedding(11, 8)
                self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 8))


def on_meta(folder: Path) -> dict[str, Any]:
    net = OnMeta()
    monitor = MemoryMonitor(every_n_steps=1, figure=False)
    fit = trainer("pipe", folder, callbacks=[monitor])
    fit.fit(net)
    held = sum(p.nbytes for p in net.layers.parameters() if not p.is_meta)
    fit.save_checkpoint(folder / "meta.ckpt")
    tested = fit.test(net, verbose=False)[0]["test_loss"]
    fit.fit_loop.max_epochs = 2
    fit.fit(net)
    again = OnMeta()
    fit = trainer("pipe", folder)
    loaded = fit.test(again, ckpt_path=folder / "meta.ckpt", verbose=False)[0]["test_loss"]
    return {"held": held, "ranks": monitor.ranks, "tested": tested, "loaded": loaded}


def test_a_module_made_on_the_meta_device_never_exists_whole_on_one_rank(tmp_path: Path) -> None:
    results = run_ranks(2, on_meta, tmp_path)
    layers = [4 * (8 * 16 + 16), 4 * (16 * 16 + 16), 4 * (16 * 8 + 8)]
    assert sum(each["held"] for each in results) == sum(layers)
    assert max(each["held"] for each in results) < sum(layers)
    saved = torch.load(tmp_path / "meta.ckpt", weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in saved.values())
    outside = 4 * (11 * 8 + 8 * 4 + 4)
    for each in results:
        for rank, held in enumerate(each["ranks"]):
            assert held["gradients"] == results[rank]["held"] + outside
        assert each["tested"] == results[0]["tested"]
        assert each["loaded"] == pytest.approx(each["tested"], rel=1e-6)


def one_rank(folder: Path) -> dict[str, Tensor]:
    net = Net()
    trainer("pipe", folder, gradient_clip_val=0.1).fit(net)
    return weights(net)


def test_one_rank_is_a_pipe_too(tmp_path: Path) -> None:
    net = Net()
    one_device(tmp_path, gradient_clip_val=0.1).fit(net)
    torch.testing.assert_close(run_ranks(1, one_rank, tmp_path)[0], weights(net), rtol=1e-6, atol=1e-6)

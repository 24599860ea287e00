"""Names, arguments, the command line, and how processes are started."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import lightning_distkit
from lightning_distkit import CommHookDDPStrategy, PowerSGDDDPStrategy
from lightning_distkit.core.compression import PowerSGDState
from tests.ranks import run_ranks
from tests.strategies.modules import NAMES, ZERO_NAMES, Net


def test_the_arguments_are_those_of_the_state() -> None:
    state = inspect.signature(PowerSGDState.__init__).parameters
    strategy = inspect.signature(PowerSGDDDPStrategy.__init__).parameters
    for name in state.keys() - {"self", "process_group"}:
        assert strategy[name].default == state[name].default
        assert strategy[name].annotation == state[name].annotation


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PowerSGDDDPStrategy(matrix_approximation_rank=0), "must be a whole number of at least 1, got 0"),
        (lambda: PowerSGDDDPStrategy(start_powerSGD_iter=1), "start_powerSGD_iter must be at least 2"),
        (lambda: PowerSGDDDPStrategy(matrix_aproximation_rank=2), "did you mean matrix_approximation_rank?"),
        (lambda: PowerSGDDDPStrategy(find_unused_parameter=True), "did you mean find_unused_parameters?"),
        (lambda: PowerSGDDDPStrategy(hook="noop"), 'must be "powersgd", "batched_powersgd" or "acp_sgd", got \'noop\''),
        (lambda: PowerSGDDDPStrategy(ddp_comm_hook=print), "takes hook in place of ddp_comm_hook"),
        (lambda: CommHookDDPStrategy(None), "a hook must be callable as hook(state, bucket), got None"),
        (lambda: CommHookDDPStrategy(lambda bucket: None), "must take (state, bucket)"),
        (lambda: CommHookDDPStrategy("powersgd", state=5), "must be registered with a PowerSGDState, got builtins.int"),
        (lambda: CommHookDDPStrategy("powrsgd"), "hook must be one of allreduce, noop"),
    ],
)
def test_a_wrong_argument_is_refused_before_any_process_starts(make: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert says in str(raised.value)


def test_arguments_of_ddp_pass_through() -> None:
    strategy = PowerSGDDDPStrategy(find_unused_parameters=True, bucket_cap_mb=3, process_group_backend="gloo")
    given = {"find_unused_parameters": True, "bucket_cap_mb": 3}
    assert strategy._ddp_kwargs == given | {"gradient_as_bucket_view": True}


def script(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the code as a user's script, in a process of its own."""
    (folder / "script.py").write_text(textwrap.dedent(code))
    root = Path(lightning_distkit.__file__).parent.parent
    return subprocess.run(
        [sys.executable, folder / "script.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo"},
    )


def test_importing_the_package_is_light(tmp_path: Path) -> None:
    code = (
        "import lightning_distkit, sys; print([m for m in ('torch', 'lightning', 'torchmetrics') if m in sys.modules])"
    )
    done = script(code, tmp_path)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("first", ["lightning_distkit", "lightning.pytorch"])
def test_names_are_registered_in_either_order_of_import(first: str, tmp_path: Path) -> None:
    second = {"lightning_distkit": "lightning.pytorch", "lightning.pytorch": "lightning_distkit"}[first]
    done = script(
        f"""
        import {first}
        import {second}
        from lightning.pytorch.strategies import StrategyRegistry
        print(sorted(n for n in StrategyRegistry if n.startswith(("powersgd", "batched", "acp", "ddp_noop", "zero"))))
        print(sorted(n for n in StrategyRegistry if n == "ddp"))
        """,
        tmp_path,
    )
    expected = sorted(name + suffix for name in NAMES + ZERO_NAMES for suffix in ("", "_spawn", "_fork", "_notebook"))
    assert done.stdout.splitlines() == [str(expected), "['ddp']"]


@pytest.mark.parametrize("how", ['"powersgd"', "lightning_distkit.PowerSGDDDPStrategy()"])
def test_the_mirror_package_is_told_what_to_import(how: str, tmp_path: Path) -> None:
    done = script(
        f"""
        import pytorch_lightning as pl
        import lightning_distkit
        pl.Trainer(strategy={how})
        """,
        tmp_path,
    )
    assert "write `import lightning.pytorch as pl`" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("suffix", ["_spawn", "_fork"])
def test_processes_may_be_spawned_or_forked(suffix: str, tmp_path: Path) -> None:
    code = """
        import sys
        import lightning_distkit
        import lightning.pytorch as pl
        from lightning.pytorch.demos.boring_classes import BoringModel
        if __name__ == "__main__":
            fit = pl.Trainer(accelerator="cpu", devices=2, strategy="powersgd" + sys.argv[1], max_steps=4, logger=False,
                             enable_checkpointing=False, enable_progress_bar=False, default_root_dir=sys.argv[2])
            net = BoringModel()
            before = net.layer.weight.clone()
            fit.fit(net)
            print("trained", bool((net.layer.weight != before).all()), type(fit.strategy).__name__)
        """
    done = script(code, tmp_path, suffix, str(tmp_path))
    assert "trained True PowerSGDDDPStrategy" in done.stdout, done.stdout + done.stderr


YAML = """
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_distkit.PowerSGDDDPStrategy
    init_args:
      matrix_approximation_rank: 8
      start_powerSGD_iter: 5
      find_unused_parameters: true
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
        "name": ["--trainer.strategy=powersgd"],
        "class_path": [
            "--trainer.strategy=lightning_distkit.PowerSGDDDPStrategy",
            "--trainer.strategy.matrix_approximation_rank=8",
            "--trainer.strategy.find_unused_parameters=true",
        ],
        "yaml": [f"--config={tmp_path / 'c.yaml'}"],
    }[how]
    cli = LightningCLI(Net, run=False, args=arguments, save_config_callback=None, seed_everything_default=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, PowerSGDDDPStrategy)
    assert strategy._make_state(None).matrix_approximation_rank == (1 if how == "name" else 8)
    assert strategy._ddp_kwargs.get("find_unused_parameters") is (None if how == "name" else True)


def from_the_command_line(folder: Path) -> tuple[int, int]:
    from lightning.pytorch.cli import LightningCLI

    (folder / "c.yaml").write_text(YAML)
    sys.argv = ["script.py"]
    arguments = ["fit", f"--config={folder / 'c.yaml'}", "--trainer.max_epochs=1", "--trainer.devices=2"]
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    cli = LightningCLI(Net, args=[*arguments, *quiet], save_config_callback=None, seed_everything_default=False)
    return cli.trainer.strategy.powersgd_state.iter, cli.trainer.strategy.ledger.n_steps


@pytest.mark.filterwarnings("ignore")  # how Lightning's own CLI calls jsonargparse
def test_the_command_line_trains(tmp_path: Path) -> None:
    assert run_ranks(2, from_the_command_line, tmp_path) == [(3, 3), (3, 3)]  # Lightning shares the batches out

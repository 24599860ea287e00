"""Lightning trains with compressed gradients: really attached, resumable, and clear where it cannot."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_distkit
from lightning_distkit import CommHookDDPStrategy, PowerSGDDDPStrategy
from lightning_distkit.core.compression import HOOKS, PowerSGDState
from tests.ranks import RankDied, run_ranks
from tests.strategies.modules import Net, parameters, trainer

EARLY = {"start_powerSGD_iter": 2, "min_compression_rate": 1}
NAMES = ["powersgd", "batched_powersgd", "ddp_noop"]


def bytes_a_step(strategy: Any, folder: Path) -> tuple[int, list[int], Tensor]:
    net = Net()
    fit = trainer(strategy, folder)
    fit.fit(net)
    return fit.strategy.ledger.last_step.nbytes, net.matrix_ranks, parameters(net)


def test_powersgd_sends_what_its_formula_predicts_and_ddp_what_it_has(tmp_path: Path) -> None:
    matrices, vectors = [(32, 16), (32, 32), (4, 32)], 32 + 32 + 4
    whole = 4 * (sum(n * m for n, m in matrices) + vectors)
    factors = 4 * (sum(n + m for n, m in matrices) + vectors)
    for nbytes, ranks, _ in run_ranks(2, bytes_a_step, CommHookDDPStrategy("allreduce"), tmp_path):
        assert nbytes == whole
        assert ranks == [8, 8, 4]  # two ranks with batches of 4 rows; the output has 4 columns
    results = run_ranks(2, bytes_a_step, PowerSGDDDPStrategy(**EARLY), tmp_path)
    for nbytes, ranks, _ in results:
        assert nbytes == factors
        assert ranks == [1, 1, 1]
    assert torch.equal(results[0][2], results[1][2])


def by_name(name: str, folder: Path) -> tuple[str, int, int]:
    fit = trainer(name, folder)
    fit.fit(Net())
    return type(fit.strategy).__name__, fit.strategy.ledger.total.nbytes, fit.strategy.ledger.n_steps


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_enough(name: str, tmp_path: Path) -> None:
    for cls, nbytes, n_steps in run_ranks(2, by_name, name, tmp_path):
        assert cls == ("CommHookDDPStrategy" if name == "ddp_noop" else "PowerSGDDDPStrategy")
        assert (nbytes == 0) == (name == "ddp_noop")
        assert n_steps == 6


def test_a_training_too_short_to_compress_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, by_name, "powersgd", tmp_path)
    assert "PowerSGD has compressed nothing yet: 6 steps are done, and it starts after 1000" in capfd.readouterr().out
    run_ranks(2, bytes_a_step, PowerSGDDDPStrategy(**EARLY), tmp_path)
    assert "compressed nothing" not in capfd.readouterr().out


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_of_the_table_can_be_named(hook: str, tmp_path: Path) -> None:
    (first, _, a), (second, _, b) = run_ranks(2, bytes_a_step, CommHookDDPStrategy(hook), tmp_path)
    assert first == second
    assert torch.equal(a, b) == (hook != "noop")


def encode_and_decode(state: Any, bucket: Any) -> Any:
    state.append(bucket.index())
    future = dist.all_reduce(bucket.buffer().half() / 2, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].float())


def own_hook(folder: Path) -> int:
    calls: list[int] = []
    fit = trainer(CommHookDDPStrategy(encode_and_decode, calls), folder)
    fit.fit(Net())
    return len(calls)


def test_a_users_own_hook_runs_on_cpu(tmp_path: Path) -> None:
    assert run_ranks(2, own_hook, tmp_path) == [6, 6]


TRAININGS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "clip norm": {"gradient_clip_val": 0.1},
    "clip value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "checkpointing": {"enable_checkpointing": True, "max_epochs": 2},
}


class Precise(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([each.to(self.dtype) for each in batch], batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step([each.to(self.dtype) for each in batch], batch_idx)


def training(arguments: dict[str, Any], folder: Path) -> tuple[Tensor, int, int]:
    net = Precise()
    fit = trainer(PowerSGDDDPStrategy(**EARLY), folder, **arguments)
    fit.fit(net)
    return parameters(net), fit.strategy.powersgd_state.iter, fit.global_step


@pytest.mark.parametrize("kind", TRAININGS)
def test_every_kind_of_training(kind: str, tmp_path: Path) -> None:
    (first, iteration, n_steps), (second, _, _) = run_ranks(2, training, TRAININGS[kind], tmp_path)
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert iteration == n_steps > 0


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def manual(folder: Path) -> tuple[Tensor, list[int]]:
    net = Manual()
    trainer(PowerSGDDDPStrategy(**EARLY), folder).fit(net)
    return parameters(net), net.matrix_ranks


def test_manual_optimisation_synchronises_too(tmp_path: Path) -> None:
    (first, ranks), (second, _) = run_ranks(2, manual, tmp_path)
    assert torch.equal(first, second)
    assert ranks == [1, 1, 1]


def fit_twice(folder: Path) -> tuple[Tensor, int]:
    net = Net()
    fit = trainer(PowerSGDDDPStrategy(**EARLY), folder)
    fit.fit(net)
    fit.fit_loop.max_epochs = 2
    fit.fit(net)
    return parameters(net), fit.strategy.powersgd_state.iter


def test_a_trainer_fits_twice(tmp_path: Path) -> None:
    (first, iteration), (second, _) = run_ranks(2, fit_twice, tmp_path)
    assert torch.equal(first, second)
    assert iteration == 6


# Checkpoints


def uninterrupted(folder: Path, arguments: dict[str, Any]) -> Tensor:
    net = Net()
    trainer(PowerSGDDDPStrategy(**EARLY, **arguments), folder, max_epochs=2).fit(net)
    return parameters(net)


def first_half(folder: Path, strategy: Any) -> dict[str, Tensor]:
    net = Net()
    fit = trainer(strategy, folder)
    fit.fit(net)
    fit.save_checkpoint(folder / "half.ckpt")
    fit.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    state = getattr(fit.strategy, "powersgd_state", None)
    names = {p: name for name, p in net.named_parameters()}
    return {names[p]: error for p, error in state.error_dict.items()} if state is not None else {}


def second_half(folder: Path, strategy: Any, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    net = Net()
    errors: dict[str, Tensor] = {}

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            state = getattr(trainer.strategy, "powersgd_state", None)
            if state is not None:
                names = {p: name for name, p in module.named_parameters()}
                errors.update({names[p]: error.clone() for p, error in state.error_dict.items()})
                errors["iter"] = torch.tensor(state.iter)

    fit = trainer(strategy, folder, max_epochs=2, callbacks=[Watch()], **arguments)
    fit.fit(net, ckpt_path=folder / "half.ckpt")
    assert fit.global_step == 12
    return parameters(net), errors


def second_half_alone(folder: Path) -> None:
    second_half(folder, "auto", limit_val_batches=0)


@pytest.mark.parametrize("arguments", [{"matrix_approximation_rank": 2}, {"warm_start": False}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(arguments: dict[str, Any], tmp_path: Path) -> None:
    whole = run_ranks(2, uninterrupted, tmp_path, arguments)
    strategy = PowerSGDDDPStrategy(**EARLY, **arguments)
    run_ranks(2, first_half, tmp_path, strategy)
    for expected, (again, _) in zip(whole, run_ranks(2, second_half, tmp_path, strategy), strict=True):
        assert torch.equal(again, expected)


def test_each_rank_gets_its_own_error_back(tmp_path: Path) -> None:
    saved = run_ranks(2, first_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    loaded = run_ranks(2, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    for before, (_, after) in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys() - {"iter"}
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(saved[0]["net.0.weight"], saved[1]["net.0.weight"])


def test_another_number_of_ranks_keeps_the_sum_of_the_errors(tmp_path: Path) -> None:
    saved = run_ranks(2, first_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    loaded = run_ranks(3, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    for name in saved[0]:
        before = sum(errors[name] for errors in saved)
        after = sum(errors[name] for _, errors in loaded)
        torch.testing.assert_close(after, before)


def test_the_checkpoint_opens_under_ddp_and_on_one_device(tmp_path: Path) -> None:
    run_ranks(2, first_half, tmp_path, PowerSGDDDPStrategy(**EARLY))
    a, b = run_ranks(2, second_half, tmp_path, "ddp")
    assert torch.equal(a[0], b[0])
    run_ranks(1, second_half_alone, tmp_path)
    Net.load_from_checkpoint(tmp_path / "half.ckpt", weights_only=True)
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "PowerSGDDDPStrategy" not in weights


def test_a_checkpoint_of_plain_ddp_opens_and_counts_as_warm_up(tmp_path: Path) -> None:
    run_ranks(2, first_half, tmp_path, "ddp")
    for _, at_start in run_ranks(2, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY)):
        assert at_start == {"iter": torch.tensor(6)}


# A lost rank


def killed(folder: Path) -> str:
    class Dies(Net):
        def fail(self) -> None:
            if self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    fit = trainer(PowerSGDDDPStrategy(**EARLY), folder, enable_checkpointing=True, callbacks=[_every_step(folder)])
    try:
        fit.fit(Dies(fail_at=4))
    except RuntimeError as error:
        return str(error)
    return "no error"


def _every_step(folder: Path) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def test_a_killed_rank_is_an_error_that_says_so_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    said, died = run_ranks(2, killed, tmp_path, return_exceptions=True, pg_timeout=20)
    assert isinstance(died, RankDied)
    assert "rank 0 of 2 could not finish a collective: another rank died" in said
    (tmp_path / "step=4.ckpt").rename(tmp_path / "half.ckpt")
    for _, at_start in run_ranks(2, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY)):
        assert at_start["iter"] == 4


def raises_on_one_rank(rank: int, strategy: Any, folder: Path) -> str:
    class Raises(Net):
        def fail(self) -> None:
            if self.global_rank == rank:
                super().fail()

    saving = pl.callbacks.OnExceptionCheckpoint(folder, filename="half")
    try:
        fit = trainer(strategy, folder, callbacks=[saving], enable_checkpointing=True)
        fit.fit(Raises(fail_at=4))
    except Exception as error:
        return repr(error)
    return "no error"


@pytest.mark.filterwarnings("ignore")  # Lightning's, about a checkpoint callback of another kind than usual
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_still_leaves_its_checkpoint(rank: int, tmp_path: Path) -> None:
    # What the ranks end with depends, as under plain ddp, on whose wait times out first: Lightning itself has a barrier
    # at the end of each save.
    said = run_ranks(2, raises_on_one_rank, rank, PowerSGDDDPStrategy(**EARLY), tmp_path, pg_timeout=6)
    assert all(each.startswith(("ZeroDivisionError", "RuntimeError")) for each in said), said
    for _, at_start in run_ranks(2, second_half, tmp_path, PowerSGDDDPStrategy(**EARLY)):
        assert at_start == {"iter": torch.tensor(4)}


def other_module(folder: Path) -> bool:
    fit = trainer(PowerSGDDDPStrategy(**EARLY), folder)
    fit.fit(Net())
    fit.validate(Net(width=16), verbose=False)
    fit.save_checkpoint(folder / "other.ckpt")
    return "PowerSGDDDPStrategy" in torch.load(folder / "other.ckpt", weights_only=True)


def test_another_module_is_saved_without_the_fitted_ones_state(tmp_path: Path) -> None:
    assert run_ranks(2, other_module, tmp_path) == [False, False]


# Names, arguments, the command line


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
        (lambda: PowerSGDDDPStrategy(hook="noop"), 'must be "powersgd" or "batched_powersgd", got \'noop\''),
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
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 3}


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
        print(sorted(n for n in StrategyRegistry if "powersgd" in n or "noop" in n))
        print(sorted(n for n in StrategyRegistry if n == "ddp"))
        """,
        tmp_path,
    )
    expected = sorted(name + suffix for name in NAMES for suffix in ("", "_spawn", "_fork", "_notebook"))
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


def alone(folder: Path) -> tuple[int, int]:
    fit = trainer("powersgd", folder)
    fit.fit(Net())
    return fit.world_size, fit.strategy.ledger.total.nbytes


def test_one_device_trains_and_sends_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, alone, tmp_path) == [(1, 0)]

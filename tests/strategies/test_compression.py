"""Lightning trains with compressed gradients: the hook is really attached, in every kind of training."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distkit import CommHookDDPStrategy, PowerSGDDDPStrategy
from lightning_distkit.core.compression import HOOKS
from tests.ranks import RankDied, run_ranks
from tests.strategies.modules import EARLY, NAMES, Net, parameters, second_half, trainer


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


def views_of_buckets(ddp_kwargs: dict[str, Any], folder: Path) -> bool:
    class Seeing(Net):
        def on_train_start(self) -> None:
            self.seen = self.trainer.strategy.model.gradient_as_bucket_view

    net = Seeing()
    trainer(PowerSGDDDPStrategy(**EARLY, **ddp_kwargs), folder).fit(net)
    return net.seen


@pytest.mark.parametrize(("ddp_kwargs", "expected"), [({}, True), ({"gradient_as_bucket_view": False}, False)])
def test_gradients_are_views_of_buckets_unless_told_otherwise(
    ddp_kwargs: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    assert run_ranks(2, views_of_buckets, ddp_kwargs, tmp_path) == [expected, expected]


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


def alone(folder: Path) -> tuple[int, int]:
    fit = trainer("powersgd", folder)
    fit.fit(Net())
    return fit.world_size, fit.strategy.ledger.total.nbytes


def test_one_device_trains_and_sends_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, alone, tmp_path) == [(1, 0)]


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

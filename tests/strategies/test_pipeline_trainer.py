"""The Trainer's other doors: batches by chance, evaluation, what is refused, tuning, exceptions, a lost rank."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_distkit import PipeStrategy
from lightning_distkit.core.pipeline.placeholder import Placeholder
from tests.ranks import RankDied, run_ranks
from tests.strategies.pipe_modules import Net, loader, metrics, one_device, trainer, weights


class ByChance(Net):
    """Every rank begins with other random numbers; rows are shuffled, augmented and mixed by all generators in use."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.seen: list[Tensor] = []

    def on_train_start(self) -> None:
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(100 + self.global_rank)

    def train_dataloader(self) -> Any:
        torch.manual_seed(200 + self.global_rank)
        return loader(self.n_rows, shuffle=True)

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> dict[str, Any]:
        if isinstance(batch, dict):
            return batch
        noise = torch.rand(len(batch[0]), 30000)  # large enough to travel by itself
        return {"words": batch[0], "classes": batch[1], "noise": noise, "name": f"of rank {self.global_rank}"}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        assert batch["name"] == "of rank 0"
        share = random.random() * np.random.beta(1, 1)
        x = F.dropout(self.embedding(batch["words"]).mean(1), 0.3)
        mixed = share * F.cross_entropy(self.head(self.layers(x)), batch["classes"])
        self.seen += [batch["words"], batch["noise"], torch.tensor(share), torch.rand(1)]
        self.log("loss", mixed)
        return mixed

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def by_chance(folder: Path) -> tuple[list[Tensor], dict[str, Tensor], dict[str, float]]:
    net = ByChance()
    fit = trainer("pipe", folder, max_epochs=2, gradient_clip_val=1.0)
    fit.fit(net)
    return net.seen, weights(net), metrics(fit)


def test_all_stages_see_the_first_ones_batch_and_draw_its_random_numbers(tmp_path: Path) -> None:
    first, second, third = run_ranks(3, by_chance, tmp_path)
    for other in (second, third):
        torch.testing.assert_close(other[0], first[0], rtol=0, atol=0)
        torch.testing.assert_close(other[1], first[1], rtol=0, atol=0)
        assert other[2] == first[2]
    assert not torch.equal(first[0][1], first[0][5])


class Marked(list[Tensor]):
    """A batch that tells whose it is."""

    rank: int


class Told(Net):
    """Loads the same batches on every rank itself, and shows that none was sent."""

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> Marked:
        marked = Marked(batch)
        marked.rank = self.global_rank
        return marked

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch.rank == self.global_rank
        return super().training_step(batch, batch_idx)


def told_otherwise(folder: Path) -> dict[str, Tensor]:
    net = Told()
    trainer(PipeStrategy(3, share_batches=False), folder).fit(net)
    return weights(net)


def test_batches_are_not_sent_where_one_says_so(tmp_path: Path) -> None:
    net = Net()
    one_device(tmp_path).fit(net)
    for got in run_ranks(2, told_otherwise, tmp_path):
        torch.testing.assert_close(got, weights(net), rtol=1e-6, atol=1e-6)


def evaluated(stages: bool, folder: Path) -> dict[str, Any]:
    """Validate, fit, test, predict, fit again: with other numbers of rows each, fewer than chunks among them."""
    net = Net()
    make = (
        (lambda **its: trainer(PipeStrategy(chunks=4), folder, **its))
        if stages
        else (lambda **its: one_device(folder, **its))
    )
    fit = make()
    before = fit.validate(net, loader(13, batch_size=5), verbose=False)
    fit.fit(net, loader(11, batch_size=4), loader(7, batch_size=7))
    tested = fit.test(net, loader(9, batch_size=3), verbose=False)
    fit.fit_loop.max_epochs = 2
    fit.fit(net, loader(5, batch_size=2), loader(2, batch_size=1))
    predicted = fit.predict(net, loader(10, batch_size=6))
    return {"before": before, "test": tested, "predicted": torch.cat(predicted), "weights": weights(net)}


def test_validate_fit_test_predict_with_any_number_of_rows_in_any_order(tmp_path: Path) -> None:
    wanted = evaluated(False, tmp_path)
    for got in run_ranks(3, evaluated, True, tmp_path):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(16))


def normalised(folder: Path) -> list[tuple[Any, int, dict[str, Tensor]]]:
    result = []
    for deferred in (True, False):
        net = Normalised()
        strategy = PipeStrategy(2, deferred_batch_norm=deferred)
        trainer(strategy, folder, num_sanity_val_steps=0).fit(net, loader(16, batch_size=8))
        result.append((type(net.layers[1]), int(net.layers[1].num_batches_tracked), weights(net)))
    return result


def test_batch_norm_counts_batches_if_deferred_and_is_a_plain_layer_afterwards(tmp_path: Path) -> None:
    first, second = run_ranks(2, normalised, tmp_path)
    assert [each[:2] for each in first] == [(nn.BatchNorm1d, 2), (nn.BatchNorm1d, 4)]
    assert [each[:2] for each in second] == [each[:2] for each in first]
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=0)


class TwoParts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.tail(self.layers(self.embedding(words).mean(1))))


class Configured(TwoParts):
    def configure_pipeline(self) -> nn.Sequential:
        return self.tail


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 16)
        self.other.weight = self.layers[0].weight


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NotInIt(TwoParts):
    def configure_pipeline(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


REFUSED: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any], str]] = {
    "several": (TwoParts, {}, {}, "one alone if it is not named, found 'layers', 'tail'"),
    "nothing there": (TwoParts, {"module": "layer"}, {}, "nothing is at 'layer'; found 'layers', 'tail'"),
    "no Sequential": (TwoParts, {"module": "head"}, {}, "must be an nn.Sequential, got Linear at 'head'"),
    "not in it": (NotInIt, {}, {}, "that is in it, got a Sequential that is not; found 'layers', 'tail'"),
    "shared": (Shared, {}, {}, "layers.0.weight is other.weight as well; put both layers into the nn.Sequential"),
    "too few layers": (TwoParts, {"module": "tail", "balance": [3, 1]}, {}, "balance"),
    "sizes": (Net, {"pipeline_parallel_size": 3}, {}, "must be the number of processes, 2, got auto and 3"),
    "closure": (Lbfgs, {}, {}, "LBFGS needs all parameters at once"),
    "pruning": (Net, {}, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning compares"),
}


def refused(folder: Path) -> dict[str, str]:
    said = {}
    for kind, (cls, its, arguments, _) in REFUSED.items():
        with pytest.raises(Exception) as error:  # noqa: PT011  the test asks for its text
            trainer(PipeStrategy(**its), folder, **arguments).fit(cls())
        said[kind] = str(error.value)
    with pytest.raises(Exception, match="runs the module on rank 0 alone"):
        trainer("pipe", folder, logger=TensorBoardLogger(folder, log_graph=True)).fit(Net())
    for cls, given in ((TwoParts, "tail"), (Configured, None)):  # and what would help, does
        net = cls()
        fit = trainer(PipeStrategy(2, module=given), folder, fast_dev_run=1)
        fit.fit(net)
    return said


def test_what_cannot_work_is_refused_on_every_rank_with_the_way_out(tmp_path: Path) -> None:
    for said in run_ranks(2, refused, tmp_path):
        for kind, (_, _, _, text) in REFUSED.items():
            assert text in said[kind], kind


class Found(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def monitored(stages: bool, folder: Path) -> tuple[list[str], list[float], float, str, dict[str, Tensor]]:
    def make(**arguments: Any) -> pl.Trainer:
        return trainer("pipe", folder, **arguments) if stages else one_device(folder, **arguments)

    net = Found()
    fit = make()
    found = Tuner(fit).lr_find(net, num_training=6, min_lr=1e-4, max_lr=1e-1)
    assert found is not None
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    shown: list[str] = []

    class Shows(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *sizes: Any, **_: Any) -> None:  # type: ignore[override]
            shown.append(str((summary_data, sizes)))

    net.example_input_array = torch.zeros(2, 5, dtype=torch.int64)
    fit = make(logger=logger, callbacks=[LearningRateMonitor("step"), Shows(-1)], log_every_n_steps=1)
    fit.fit(net)
    keys = sorted(logger.experiment.metrics_keys) if fit.is_global_zero else []
    return keys, found.results["loss"], net.lr, "".join(shown), weights(net)


@pytest.mark.filterwarnings("ignore")
def test_learning_rates_are_found_and_monitored_and_the_summary_is_of_the_whole(tmp_path: Path) -> None:
    wanted = monitored(False, tmp_path / "one")
    first, second = run_ranks(2, monitored, True, tmp_path / "pipe")
    assert first[0] == wanted[0]
    for got in (first, second):
        assert got[1] == pytest.approx(wanted[1], rel=1e-4)
        assert got[2] == pytest.approx(wanted[2], rel=1e-4)
        torch.testing.assert_close(got[4], wanted[4], rtol=1e-4, atol=1e-5)
    for shown in (wanted[3], first[3]):
        assert "['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']" in shown
        sizes = "'88 ', '552 ', '144 ', '0 ', '272 ', '0 ', '0 ', '136 ', '36 '"
        assert sizes in " ".join(shown.split()).replace("  ", " ")


class Fails(Net):
    fail_on = (0, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2 and self.global_rank in self.fail_on:
            raise ZeroDivisionError("on purpose, in mid-epoch")
        return loss


class FailsInAStage(Net):
    """One layer raises: on the rank that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = Raises()


class Raises(nn.Module):
    n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        if self.n_calls == 10:
            raise KeyError("on purpose, in a layer")
        return x.relu()


def failed(folder: Path) -> dict[str, Any]:
    """Fit after an exception, with the same module."""
    said = {}
    for cls in (Fails, FailsInAStage):
        net = cls()
        saves = OnExceptionCheckpoint(folder, cls.__name__)
        with pytest.raises(Exception) as error:  # noqa: PT011  the test asks for its text
            trainer("pipe", folder, callbacks=[saves], enable_checkpointing=True).fit(net)
        assert any(isinstance(each, Placeholder) for each in net.parameters())
        Fails.fail_on = ()
        fit = trainer("pipe", folder)
        fit.fit(net)
        assert fit.global_step == 3
        assert all(type(each) is nn.Parameter and each.isfinite().all() for each in net.parameters())
        said[cls.__name__] = f"{type(error.value).__name__}: {error.value}", weights(net)
    return said


@pytest.mark.filterwarnings("ignore")
def test_an_exception_is_every_ranks_and_the_module_may_be_fitted_again(tmp_path: Path) -> None:
    first, second = run_ranks(2, failed, tmp_path)
    for said in (first, second):
        assert said["Fails"][0] == "ZeroDivisionError: on purpose, in mid-epoch"
        assert "stage 1 (rank 1) raised KeyError" in said["FailsInAStage"][0]
    for name in ("Fails", "FailsInAStage"):
        torch.testing.assert_close(first[name][1], second[name][1], rtol=0, atol=0)
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)  # whole, although in parts
        assert not any(value.is_meta for value in saved["state_dict"].values())


def killed(when: str, folder: Path) -> tuple[str, float]:
    class Dies(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.die("in its step")
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            self.die("between steps")

        def die(self, where: str) -> None:
            if where == when and self.global_step == 4:
                if self.global_rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                Path(f"{folder}/begin{self.global_rank}").write_text(str(time.time()))

    every = ModelCheckpoint(folder, filename="{step}", save_top_k=-1)  # at the end of each epoch
    try:
        trainer("pipe", folder, max_epochs=3, enable_checkpointing=True, callbacks=[every]).fit(Dies())
    except RuntimeError as error:
        return str(error), time.time() - float(Path(f"{folder}/begin{int(os.environ['RANK'])}").read_text())
    return "no error", 0.0


def goes_on(folder: Path) -> dict[str, Tensor]:
    net = Net()
    trainer("pipe", folder, max_epochs=3).fit(net, ckpt_path=folder / "step=3.ckpt")
    return weights(net)


def test_a_killed_stage_is_named_within_seconds_and_the_run_resumes_to_the_same_end(tmp_path: Path) -> None:
    net = Net()
    one_device(tmp_path, max_epochs=3).fit(net)
    for when in ("in its step", "between steps"):
        folder = tmp_path / when.replace(" ", "_")
        folder.mkdir()
        first, second, died = run_ranks(3, killed, when, folder, return_exceptions=True, pg_timeout=60)
        assert isinstance(died, RankDied)
        for said, seconds in (first, second):
            assert "stage 2 (rank 2)" in said
            assert seconds < 15
    for got in run_ranks(3, goes_on, folder):
        torch.testing.assert_close(got, weights(net), rtol=1e-6, atol=1e-6)

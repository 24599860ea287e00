"""What users of other pipelines ran into, in the Trainer: here it equals one device."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_distkit import PipeStrategy
from lightning_distkit.core.pipeline.skip import pop, skippable, stash
from tests.ranks import run_ranks
from tests.strategies.pipe_modules import CLASSES, WORDS, Net, metrics, one_device, trainer, weights
from tests.strategies.test_pipeline_replicas import Sampled

MODES = ("always", "except_last", "never")
Skips = Generator[Any, Any, Any]


@skippable(stash=["early"])
class Stashes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Skips:
        x = self.linear(x)
        yield stash("early", x)
        return {"x": x.tanh(), "mask": x > 0, "nothing": None, "number": 3, "name": "as it is", "nest": [x, (x, 1.5)]}


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, its: dict[str, Any]) -> dict[str, Any]:
        assert its["nothing"] is None
        assert its["mask"].dtype == torch.bool
        assert (its["name"], its["nest"][1][1]) == ("as it is", 1.5)
        x = self.linear(its["x"]) * its["mask"] + its["nest"][1][0]
        return {**its, "x": x.relu(), "number": its["number"] + 1}


@skippable(pop=["early"])
class Pops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, its: dict[str, Any]) -> Skips:
        early = yield pop("early")
        return {"x": self.linear(its["x"] + early), "number": its["number"]}


class Nested(Net):
    """A skip from the first stage to the last; dicts and plain values between; a dict as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Stashes(), Between(), Between(), Pops())

    def forward(self, words: Tensor) -> Tensor:
        output = self.layers(self.embedding(words).mean(1))
        numbers = output["number"]
        assert set(numbers if isinstance(numbers, list) else [numbers]) == {5}
        return self.head(output["x"])


class Batches:
    """Sentences of another length, and another number of them, each time."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        random = torch.Generator().manual_seed(2)
        for n_rows, length in ((8, 5), (3, 9), (10, 2), (1, 4), (7, 7)):
            words = torch.randint(WORDS, (n_rows, length), generator=random)
            yield [words, torch.randint(CLASSES, (n_rows,), generator=random)]

    def __len__(self) -> int:
        return 5


class Sentences(Net):
    """The pipe sees every word: its second dimension is the length."""

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(words))).mean(1)

    def train_dataloader(self) -> Any:
        return Batches()

    val_dataloader = train_dataloader


class Several(Sentences):
    """Micro-batches are averaged by their rows."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss


KINDS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    **{f"skips, {mode}": (Nested, {"checkpoint": mode, "balance": [1, 2, 1]}, {}) for mode in MODES},
    "skips, 1f1b": (Nested, {"schedule": "1f1b"}, {}),
    "skips, loss on the last stage": (Nested, {"outputs": "last"}, {}),
    "lengths, gpipe": (Several, {}, {}),
    "lengths, 1f1b": (Several, {"schedule": "1f1b"}, {}),
    "lengths, loss on the last stage": (Several, {"outputs": "last"}, {}),
    **{f"accumulation of {n}": (Net, {}, {"accumulate_grad_batches": n, "max_epochs": 2}) for n in (2, 3, 4)},
    **{
        f"accumulation of {n}, 1f1b": (Net, {"schedule": "1f1b"}, {"accumulate_grad_batches": n, "max_epochs": 2})
        for n in (2, 3, 4)
    },
}


def trained(make: Any, cls: type[Net], folder: Path, **arguments: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    net = cls()
    fit: pl.Trainer = make(folder, **{"max_epochs": 1, **arguments})
    fit.fit(net)
    return weights(net), metrics(fit)


def over_stages(folder: Path) -> dict[str, Any]:
    found = {}
    for kind, (cls, its, arguments) in KINDS.items():

        def make(folder: Path, its: dict[str, Any] = its, **arguments: Any) -> pl.Trainer:
            return trainer(PipeStrategy(**{"chunks": 3, **its}), folder, **arguments)

        found[kind] = trained(make, cls, folder, **arguments)
    return found


@pytest.fixture(scope="module")
def on_three_stages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(3, over_stages, tmp_path_factory.mktemp("cases"), timeout=170)


def equals_one_device(kind: str, ranks: list[dict[str, Any]], folder: Path) -> None:
    cls, _, arguments = KINDS[kind]
    wanted = trained(one_device, cls, folder, **arguments)
    for each in ranks:
        torch.testing.assert_close(each[kind][0], wanted[0], rtol=1e-5, atol=1e-6)
        assert each[kind][1] == pytest.approx(wanted[1], rel=1e-5)
        assert each[kind][1] == ranks[0][kind][1]


@pytest.mark.parametrize("kind", [each for each in KINDS if each.startswith("skips")])
def test_skips_to_a_stage_that_is_no_neighbour_and_any_nest_between_stages_train(
    kind: str, on_three_stages: list[dict[str, Any]], tmp_path: Path
) -> None:
    equals_one_device(kind, on_three_stages, tmp_path)


@pytest.mark.parametrize("kind", [each for each in KINDS if each.startswith("lengths")])
def test_lengths_and_rows_may_change_with_every_batch(
    kind: str, on_three_stages: list[dict[str, Any]], tmp_path: Path
) -> None:
    equals_one_device(kind, on_three_stages, tmp_path)


@pytest.mark.parametrize("kind", [each for each in KINDS if each.startswith("accumulation")])
def test_accumulation_gives_the_weights_of_one_device(
    kind: str, on_three_stages: list[dict[str, Any]], tmp_path: Path
) -> None:
    equals_one_device(kind, on_three_stages, tmp_path)


def in_mode(folder: Path, with_pipes: bool) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    strategies = [
        PipeStrategy(chunks=2, data_parallel_size=2, checkpoint=mode, schedule=schedule)
        for mode in MODES
        for schedule in ("gpipe", "1f1b")
    ]
    found = []
    for strategy in strategies if with_pipes else ["ddp"]:
        net = Sampled()
        fit = trainer(strategy, folder)
        fit.fit(net)
        found.append((weights(net), metrics(fit)))
    return found


def test_data_parallelism_works_in_all_checkpoint_modes(tmp_path: Path) -> None:
    [wanted] = run_ranks(2, in_mode, tmp_path, False)[0]
    for each in run_ranks(4, in_mode, tmp_path, True, timeout=90):
        assert len(each) == 6
        for got in each:
            torch.testing.assert_close(got[0], wanted[0], rtol=1e-6, atol=1e-6)

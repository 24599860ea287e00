"""What compression between pipes has left out is in checkpoints, and is nobody else's when it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_distkit import PipeStrategy, PowerSGDDDPStrategy
from lightning_distkit.strategies.pipeline_memory import CHECKPOINT_KEY
from tests.ranks import run_ranks
from tests.strategies.modules import EARLY
from tests.strategies.pipe_modules import trainer, weights
from tests.strategies.test_pipeline_replicas import Compressed

HOOKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "powersgd": ("powersgd", {"matrix_approximation_rank": {"layers.0.*": 1, "*": 2}}, {}),
    "powersgd, drawn anew": ("powersgd", {"warm_start": False}, {}),
    "powersgd, loss on the last stage": ("powersgd", {}, {"outputs": "last"}),
    "acp_sgd": ("acp_sgd", {}, {}),
}
PLACES = [(name, "file") for name in HOOKS] + [("powersgd", "folder")]
Errors = dict[str, Tensor]


class Around(Compressed):
    """Layers before and behind the pipe as well."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.behind = nn.Linear(32, 32)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([self.before(batch[0]), self.behind(batch[1])], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


def over_pipes(name: str = "powersgd", data_parallel_size: int = 2, **arguments: Any) -> PipeStrategy:
    hook, its, others = HOOKS[name]
    return PipeStrategy(
        2,
        data_parallel_size=data_parallel_size,
        data_parallel_hook=hook,
        data_parallel_hook_arguments=EARLY | its,
        **others,
        **arguments,
    )


def errors_of(fit: pl.Trainer, net: nn.Module) -> Errors:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return {names[parameter]: error for parameter, error in fit.strategy.comm_state.error_dict.items()}  # type: ignore[attr-defined]


def trained(strategy: Any, folder: Path, n_epochs: int, path: Path | None = None) -> tuple[Errors, Errors, Any]:
    """The errors at the start, those at the end, and the weights."""
    net = Around()
    errors: Errors = {}

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            errors.update(errors_of(trainer, module))

    fit = trainer(strategy, folder, max_epochs=n_epochs, accumulate_grad_batches=2, callbacks=[Watch()])
    fit.fit(net, ckpt_path=path)
    if path is None:
        fit.save_checkpoint(folder / f"{n_epochs}.ckpt")
        fit.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return errors, errors_of(fit, net), weights(net)


def halves(folder: Path) -> dict[str, list[tuple[Errors, Errors, Any]]]:
    found = {}
    for name, kind in PLACES:
        place = folder / name / kind
        make = {"name": name, "save_distributed_checkpoint": kind == "folder"}
        runs = [trained(over_pipes(**make), place, 4), trained(over_pipes(**make), place, 2)]
        found[f"{name} {kind}"] = [*runs, trained(over_pipes(**make), place, 4, place / "2.ckpt")]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipes")


@pytest.fixture(scope="module")
def of_two_pipes(folder: Path) -> list[dict[str, list[tuple[Errors, Errors, Any]]]]:
    return run_ranks(4, halves, folder, timeout=120)


@pytest.mark.parametrize(("name", "kind"), PLACES)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(name: str, kind: str, of_two_pipes: Any) -> None:
    ranks = [each[f"{name} {kind}"] for each in of_two_pipes]
    for rank, (undisturbed, half, resumed) in enumerate(ranks):
        assert half[1].keys() == resumed[0].keys()
        assert ("before.weight" in half[1]) == ("last stage" not in name or rank % 2 == 1)
        for error in half[1]:
            assert torch.equal(half[1][error], resumed[0][error])
            assert torch.equal(undisturbed[1][error], resumed[1][error])
        torch.testing.assert_close(resumed[2], undisturbed[2], rtol=0, atol=0)
    first, second = ranks[0][1][1], ranks[2][1][1]  # of one stage, in two pipes
    assert not torch.equal(first["layers.0.weight"], second["layers.0.weight"])
    other_stage = ranks[1][1][1]
    assert "layers.0.weight" not in other_stage
    assert "layers.3.weight" in other_stage


def resumed(make: Any, folder: Path, path: Path) -> tuple[Errors, Errors, Any]:
    return trained(make(), folder, 4, path)


def under_powersgd() -> PowerSGDDDPStrategy:
    return PowerSGDDDPStrategy(**EARLY, matrix_approximation_rank={"layers.0.*": 1, "*": 2})


def over_one_pipe() -> PipeStrategy:
    return over_pipes(data_parallel_size=1)


def over_three_pipes() -> PipeStrategy:
    return over_pipes(data_parallel_size=3)


def drawn_anew_and_cut_otherwise() -> PipeStrategy:
    return over_pipes("powersgd, drawn anew", balance=[1, 3])


def test_as_many_stages_that_are_cut_otherwise_draw_for_their_own_layers(
    of_two_pipes: Any, folder: Path, tmp_path: Path
) -> None:
    path = folder / "powersgd, drawn anew" / "file" / "2.ckpt"
    wanted = saved_errors([each["powersgd, drawn anew file"][1][1] for each in of_two_pipes])
    loaded = run_ranks(4, resumed, drawn_anew_and_cut_otherwise, tmp_path, path)
    for before, after in zip(wanted, saved_errors([each[0] for each in loaded]), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def saved_errors(ranks: list[Errors]) -> list[Errors]:
    """Of each pipe, by ranks of two stages."""
    return [ranks[0] | ranks[1], ranks[2] | ranks[3]]


@pytest.mark.parametrize("make", [over_pipes, under_powersgd])
def test_two_replicas_cut_otherwise_or_not_at_all_get_their_own_errors(
    make: Any, of_two_pipes: Any, folder: Path, tmp_path: Path
) -> None:
    path = folder / "powersgd" / "file" / "2.ckpt"
    wanted = saved_errors([each["powersgd file"][1][1] for each in of_two_pipes])
    loaded = run_ranks(2, resumed, make, tmp_path, path)
    for before, (after, _, values) in zip(wanted, loaded, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        torch.testing.assert_close(values, of_two_pipes[0]["powersgd file"][0][2], rtol=1e-4, atol=1e-5)


def test_another_number_of_pipes_keeps_the_sum_of_the_errors(
    of_two_pipes: Any, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "powersgd" / "file" / "2.ckpt"
    first, second = saved_errors([each["powersgd file"][1][1] for each in of_two_pipes])
    loaded = run_ranks(3, resumed, over_three_pipes, tmp_path, path)
    for name in first:
        torch.testing.assert_close(sum(each[0][name] for each in loaded), first[name] + second[name])
    assert "saved by 2 pipes and is loaded by 3: each takes an equal share" in capfd.readouterr().out
    for each in run_ranks(2, resumed, over_one_pipe, tmp_path, path):
        assert not torch.equal(each[2]["layers.0.weight"], of_two_pipes[0]["powersgd file"][1][2]["layers.0.weight"])
    assert "what compression had left out is lost" in capfd.readouterr().out


def saved_by_powersgd(folder: Path) -> Errors:
    return trained(under_powersgd(), folder, 2)[1]


def test_a_checkpoint_of_the_strategy_powersgd_goes_on_over_pipes(tmp_path: Path) -> None:
    saved = run_ranks(2, saved_by_powersgd, tmp_path)
    loaded = run_ranks(4, resumed, over_pipes, tmp_path, tmp_path / "2.ckpt")
    for rank, each in enumerate(loaded):
        for name, error in each[0].items():
            assert torch.equal(error, saved[rank // 2][name])
    assert loaded[0][0].keys() | loaded[1][0].keys() == saved[0].keys()


def saved_after_validation(folder: Path) -> tuple[int, int]:
    """Iterations that a file remembers, from right after a fit and from after a validation."""

    class Validates(Around):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    net = Validates()
    fit = trainer(over_pipes(), folder, max_epochs=1)
    fit.fit(net)
    fit.save_checkpoint(folder / "before.ckpt")
    fit.validate(net, net.train_dataloader(), verbose=False)
    fit.save_checkpoint(folder / "behind.ckpt")
    before, behind = (torch.load(folder / name, weights_only=True) for name in ("before.ckpt", "behind.ckpt"))
    for one, other in zip(before[CHECKPOINT_KEY]["errors"], behind[CHECKPOINT_KEY]["errors"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return before[CHECKPOINT_KEY]["shared"]["iter"], behind[CHECKPOINT_KEY]["shared"]["iter"]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_a_validation_between_a_fit_and_its_checkpoint_changes_nothing(tmp_path: Path) -> None:
    assert run_ranks(4, saved_after_validation, tmp_path) == [(4, 4)] * 4


def without_hook(folder: Path) -> int:
    net = Around()
    trainer(PipeStrategy(2, data_parallel_size=2), folder, max_epochs=1).fit(net)
    fit = trainer(PipeStrategy(2, data_parallel_size=2), folder, max_epochs=1)
    fit.fit(net)
    fit.save_checkpoint(folder / "plain.ckpt")
    fit = trainer(over_pipes(), folder, max_epochs=1)
    fit.fit(net, ckpt_path=folder / "plain.ckpt")
    return int(fit.strategy.comm_state.iter)  # type: ignore[attr-defined]


def test_a_checkpoint_without_it_counts_as_warm_up_and_weights_alone_have_none(of_two_pipes: Any, folder: Path) -> None:
    assert run_ranks(4, without_hook, folder) == [4] * 4
    for name in ("plain.ckpt", "powersgd/file/weights.ckpt"):
        assert CHECKPOINT_KEY not in torch.load(folder / name, weights_only=True)

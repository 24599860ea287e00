"""PowerSGDPlugin: the hook is really attached, starts when told, says what it does, and is there after a resume."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import nn

from accelerate_plugins import Accelerator, PowerSGDPlugin
from lightning_distkit.core.compression import PowerSGDState, attach, powerSGD_hook
from tests.accelerate_plugins.training import COMPRESSIONS, Net, Run
from tests.ranks import run_ranks


def bytes_of_plugins() -> dict[str, tuple[int, int]]:
    counted = {}
    for name in COMPRESSIONS:
        run = Run.of(name).train()
        counts = run.accelerator.ledger.last_step
        counted[name] = (counts.nbytes, counts.nbytes_whole)
        assert run.accelerator.powersgd_state.iter == 6
        assert run.accelerator.compression_stats()[0] > 1
    return counted


def test_the_hook_is_attached_on_a_cpu_as_the_bytes_say() -> None:
    for counted in run_ranks(2, bytes_of_plugins):
        for name in COMPRESSIONS:
            sent, whole = counted[name]
            assert 0 < sent < whole / 2
        assert counted["acp_sgd"][0] < counted["powersgd"][0]


def beside_plain_ddp_with_the_hook() -> tuple[list[float], list[float], bool]:
    run = Run.of("powersgd").train(clip=1.0)
    plain = Run.of("none")
    attach(plain.model, PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1), powerSGD_hook)
    plain.train(clip=1.0)
    return run.losses, plain.losses, torch.equal(run.weights(), plain.weights())


def test_it_trains_as_ddp_with_the_hook_in_plain_torch() -> None:
    for ours, plain, same in run_ranks(2, beside_plain_ddp_with_the_hook):
        assert ours == plain
        assert same


class Kept(GeneralTracker):
    """A tracker that keeps what it is given."""

    name = "kept"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, values))


def logged() -> list[tuple[int | None, dict[str, Any]]]:
    kept = Kept()
    plugin = PowerSGDPlugin(
        warmup_share=0.25, total_steps=12, min_compression_rate=1, stats_every_n_steps=4, stats_per_layer=True
    )
    accelerator = Accelerator(plugin=plugin, cpu=True, log_with=kept, gradient_accumulation_steps=2)
    accelerator.init_trackers("a project")
    run = Run(accelerator, *accelerator.prepare(model := Net(), torch.optim.SGD(model.parameters(), 0.1)), None, None)
    for _ in range(24):
        with accelerator.accumulate(run.model):
            accelerator.backward(run.model(torch.ones(2, 16)).square().mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
    accelerator.end_training()
    return kept.rows


def test_statistics_and_the_begin_after_a_share_of_the_steps_are_in_the_trackers() -> None:
    first, second = run_ranks(2, logged)
    assert second == []  # trackers are the main process's
    switches = [(step, values["powersgd/is_compressing"]) for step, values in first if len(values) == 1]
    assert switches == [(0, 0.0), (3, 1.0)]  # a quarter of 12
    numbers = [(step, values) for step, values in first if "compression/rate" in values]
    assert [step for step, _ in numbers] == [4, 8, 12]
    assert numbers[0][1]["compression/rate"] < 2 < numbers[1][1]["compression/rate"]
    for _, values in numbers:
        assert 0 < values["compression/relative_error"] < 1
        assert values["compression/relative_error/layers.0.0.weight"] > 0
        assert values["compression/nbytes"] * 12 > values["compression/total_nbytes"] / 3 > 0


WRONG: dict[str, dict[str, Any]] = {
    "warmup_share must be a share of all steps between 0 and 1, got 2": {"warmup_share": 2, "total_steps": 3},
    "whose number Accelerate cannot know: give total_steps": {"warmup_share": 0.1},
    "total_steps says nothing without warmup_share": {"total_steps": 3},
    "start_powerSGD_iter=7; give one of them": {"warmup_share": 0.1, "total_steps": 3, "start_powerSGD_iter": 7},
    "stats_every_n_steps must be a whole number of at least 1, got 0": {"stats_every_n_steps": 0},
    "matrix_approximation_rank must be a whole number of at least 1, got 0": {"matrix_approximation_rank": 0},
    'hook must be "powersgd", "batched_powersgd" or "acp_sgd", got \'noop\'': {"hook": "noop"},
    "must not depend on names": {"hook": "batched_powersgd", "matrix_approximation_rank": {"*": 1}},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_setting_raises_at_construction(said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        PowerSGDPlugin(**WRONG[said])


def resumed(name: str, path: Path) -> tuple[bool, bool, bool, int]:
    run = Run.of(name, n_rows=80, shuffle=True).train(9, save={5: path})
    again = Run.of(name, n_rows=80, shuffle=True)
    with torch.no_grad():
        for param in again.model.parameters():
            param.zero_()
    again.accelerator.load_state(str(path))
    errors = again.accelerator.powersgd_state.error_dict
    sums = again.accelerator.group.everyones(sum(float(each.sum()) for each in errors.values()), torch.device("cpu"))
    again.train(4, skip=5)
    return torch.equal(run.weights(), again.weights()), run.losses[5:] == again.losses, sums[0] != sums[1], len(errors)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_run_resumed_in_mid_epoch_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    for weights, losses, differs, n_errors in run_ranks(2, resumed, name, tmp_path):
        if name != "batched_powersgd":  # its first squares after a resume are those of other buckets
            assert weights
            assert losses
        assert differs  # each rank has its own error
        assert n_errors > 0
    assert {each.name for each in tmp_path.glob("powersgd_*")} == {"powersgd_0.bin", "powersgd_1.bin"}


def sum_of_errors(path: Path, save: bool) -> dict[str, torch.Tensor]:
    run = Run.of("powersgd", n_rows=72)
    if save:
        run.train(5)
        run.accelerator.save_state(str(path))
    else:
        run.accelerator.load_state(str(path))
    state = run.accelerator.powersgd_state
    names = {param: name for name, param in run.model.module.named_parameters()}
    errors = {names[param]: error for param, error in state.error_dict.items()}
    for error in errors.values():
        dist.all_reduce(error)
    assert state.iter == 5
    run.train(2)
    return errors


def test_another_number_of_ranks_keeps_the_sum_of_the_errors(tmp_path: Path) -> None:
    wanted = run_ranks(3, sum_of_errors, tmp_path, True)[0]
    assert any(error.abs().max() > 1e-4 for error in wanted.values())
    for got in run_ranks(2, sum_of_errors, tmp_path, False):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    (tmp_path / "powersgd_2.bin").unlink()
    for error in run_ranks(2, sum_of_errors, tmp_path, False, return_exceptions=True):
        assert "powersgd_2.bin is missing: each rank has saved what it alone knows" in str(error)


def to_and_from_plain_accelerate(path: Path) -> tuple[bool, int]:
    run = Run.of("powersgd").train(5)
    run.accelerator.save_state(str(path))
    plain = Run.of("none")
    plain.accelerator.load_state(str(path))
    plain.accelerator.save_state(str(path / "plain"))
    again = Run.of("powersgd")
    again.accelerator.load_state(str(path / "plain"))
    same = torch.equal(run.weights(), plain.weights()) and torch.equal(plain.weights(), again.weights())
    return same, again.accelerator.powersgd_state.iter


def test_the_same_files_open_in_plain_accelerate_and_its_files_here(tmp_path: Path) -> None:
    for same, steps in run_ranks(2, to_and_from_plain_accelerate, tmp_path):
        assert same
        assert steps == 0


def saved_by_fewer_ranks(path: Path) -> None:
    Run.of("powersgd", n_rows=72).train(3).accelerator.save_state(str(path))


def test_no_file_of_an_earlier_larger_world_is_left(tmp_path: Path) -> None:
    run_ranks(3, saved_by_fewer_ranks, tmp_path)
    run_ranks(2, saved_by_fewer_ranks, tmp_path)
    assert {each.name for each in tmp_path.glob("powersgd_*")} == {"powersgd_0.bin", "powersgd_1.bin"}


def two_models(path: Path) -> tuple[int, list[bool]]:
    def made() -> tuple[Any, list[Any], list[Any]]:
        accelerator = Accelerator(
            plugin=PowerSGDPlugin(start_powerSGD_iter=2, min_compression_rate=1), cpu=True, mixed_precision="no"
        )
        models = [Net(), Net(width=48)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        prepared = accelerator.prepare(*models, *optimizers)
        return accelerator, list(prepared[:2]), list(prepared[2:])

    def train(accelerator: Any, models: list[Any], optimizers: list[Any]) -> None:
        x = torch.ones(2, 16) * (1 + accelerator.process_index)
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    accelerator, models, optimizers = made()
    train(accelerator, models, optimizers)
    accelerator.save_state(str(path))
    train(accelerator, models, optimizers)
    again, others, their_optimizers = made()
    again.load_state(str(path))
    train(again, others, their_optimizers)
    alike = [
        torch.equal(a, b)
        for one, two in zip(models, others, strict=True)
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
    ]
    return len(accelerator.powersgd_states), alike


def test_several_models_have_a_compressor_each_and_all_are_saved(tmp_path: Path) -> None:
    for n_states, alike in run_ranks(2, two_models, tmp_path):
        assert n_states == 2
        assert all(alike)


def alone() -> None:
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    accelerator = Accelerator(plugin=PowerSGDPlugin(), cpu=True)
    model, optimizer = accelerator.prepare(net := nn.Linear(2, 2), torch.optim.SGD(net.parameters(), 0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert accelerator.powersgd_state is None
    assert accelerator.compression_stats() == (0, 0, 0)
    assert isinstance(accelerator, accelerate.Accelerator)


def test_one_process_trains_without_compression() -> None:
    run_ranks(1, alone)


def refusals() -> list[str]:
    def uneven() -> None:
        run = Run.of("powersgd")
        with run.accelerator.join_uneven_inputs([run.model], even_batches=False):
            run.train()

    def own_hook() -> None:
        kwargs = DistributedDataParallelKwargs(comm_hook="power_sgd")
        Accelerator(plugin=PowerSGDPlugin(), cpu=True, kwargs_handlers=[kwargs]).prepare(Net())

    def beside_fsdp() -> None:
        Accelerator(plugin=PowerSGDPlugin(), cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())

    said = []
    for body in (uneven, own_hook, beside_fsdp):
        with pytest.raises(ValueError, match="PowerSGDPlugin") as error:
            body()
        said.append(str(error.value))
    return said


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    for uneven, hook, fsdp in run_ranks(2, refusals):
        assert "join_uneven_inputs(even_batches=False) cannot work with PowerSGDPlugin" in uneven
        assert "cannot be had beside PowerSGDPlugin, which reduces the gradients itself" in hook
        assert "PowerSGDPlugin cannot be had beside FSDP (fsdp_plugin=), as its hook belongs to DDP" in fsdp


def even_join() -> int:
    run = Run.of("powersgd", n_rows=51)
    with run.accelerator.join_uneven_inputs([run.model]):
        run.train()
    return len(run.losses)


def test_joining_even_inputs_changes_nothing() -> None:
    assert run_ranks(2, even_join) == [7, 7]


def scaled() -> tuple[float, float]:
    accelerator = Accelerator(plugin=PowerSGDPlugin(start_powerSGD_iter=2, min_compression_rate=1), cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    model, optimizer = accelerator.prepare(net := Net(), torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(4):
        accelerator.backward(model(torch.ones(2, 16) * (1 + accelerator.process_index)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.powersgd_state.gradient_scale, accelerator.scaler.get_scale()


def test_the_error_follows_the_scale_of_the_loss() -> None:
    assert run_ranks(2, scaled) == [(128.0, 128.0)] * 2


def prepared_anew() -> tuple[int, int]:
    run = Run.of("powersgd").train(3)
    n_before = len(run.accelerator.powersgd_states)
    run.accelerator.free_memory()
    assert run.accelerator.powersgd_state is None
    model, optimizer = run.accelerator.prepare(net := Net(), torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(3):
        run.accelerator.backward(model(torch.ones(2, 16)).sum())
        optimizer.step()
    return n_before, run.accelerator.powersgd_state.iter


def test_after_free_memory_another_model_may_be_trained() -> None:
    assert run_ranks(2, prepared_anew) == [(1, 3)] * 2

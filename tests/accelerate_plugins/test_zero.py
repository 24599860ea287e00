"""ZeroPlugin: the losses, weights, norms and rates of plain Accelerate, which is DDP, in every stage."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn

from accelerate_plugins import Accelerator, ZeroPlugin
from tests.accelerate_plugins.training import STAGES, Net, Run
from tests.ranks import run_ranks

# What a loop does -> how the run is made, and how it is trained.
LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clipped by norm": ({}, {"clip": 0.5}),
    "clipped by value": ({}, {"value": 0.01}),
    "accumulated, with a short end": ({"n_rows": 56, "gradient_accumulation_steps": 3}, {"clip": 0.5}),
    "uneven last batch": ({"n_rows": 51, "batch": 5, "shuffle": True}, {}),
    "batch norm": ({"net": lambda: Net(norm=True)}, {}),
    "tied": ({"net": lambda: Net(tied=True)}, {"clip": 0.5}),
    "sgd, several groups": (
        {
            "optimizer": lambda params: torch.optim.SGD(
                [{"params": [p], "lr": 0.1 / (1 + n)} for n, p in enumerate(params)], momentum=0.9
            )
        },
        {},
    ),
    "whole matrices": ({"optimizer": lambda params: torch.optim.Adafactor(params, 1e-2)}, {}),
    "max norm": ({"optimizer": lambda params: torch.optim.Adamax(params, 1e-2)}, {"clip": 0.1}),
}


BF16 = {"bf16": ({"mixed_precision": "bf16"}, {"clip": 0.5})}  # Accelerate has one precision in a process


def every_loop(stage: str, loops: str) -> dict[str, tuple[Any, ...]]:
    results = {}
    for name, (made, trained) in {"LOOPS": LOOPS, "BF16": BF16}[loops].items():
        runs = []
        for plugin in ("none", stage):
            run = Run.of(plugin, **made).train(**trained)
            runs.append((run.losses, run.norms, run.rates, run.weights()))
        results[name] = tuple(runs)
    return results


@pytest.mark.parametrize("loops", ["LOOPS", "BF16"])
@pytest.mark.parametrize("stage", STAGES)
def test_losses_norms_rates_and_weights_are_those_of_ddp(stage: str, loops: str) -> None:
    for rank, results in enumerate(run_ranks(2, every_loop, stage, loops)):
        for name, (plain, ours) in results.items():
            # bf16 rounds what was computed in another order elsewhere.
            close = {"rtol": 2e-2, "atol": 2e-3} if name == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
            for wanted, got in zip(plain[:3], ours[:3], strict=True):
                assert len(got) == len(wanted), name
                torch.testing.assert_close(got, wanted, **close, msg=lambda said, name=name: f"{name}: {said}")
            if rank == 0:
                torch.testing.assert_close(ours[3], plain[3], **close, msg=lambda said, name=name: f"{name}: {said}")
            assert ours[2][-1] < ours[2][0]


def messages(stage: str) -> tuple[int, int, int]:
    counted = []
    for plugin in (
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)},
    ):
        run = Run.of(stage, n_rows=32, **plugin)
        before = run.accelerator.ledger.total.nbytes
        losses = run.train().losses
        assert len(losses) == 4
        counted.append(run.accelerator.ledger.total.nbytes - before)
    one = Run.of(stage, n_rows=8)
    before = one.accelerator.ledger.total.nbytes
    one.train()
    return counted[0], counted[1], one.accelerator.ledger.total.nbytes - before


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_sends_gradients_once_unless_each_batch_is_to_be_synchronised(stage: str) -> None:
    for accumulated, each, one in run_ranks(2, messages, stage):
        if stage == "zero_1":
            assert accumulated == each == one
        elif stage == "zero_2":
            assert accumulated == one < each
        else:  # parameters are gathered for every forward
            assert one < accumulated < each


def state_of_memory(stage: int) -> tuple[int, int, int, list[bool]]:
    run = Run.of(f"zero_{stage}", net=lambda: Net(width=64)).train(2)
    numel = sum(param.numel() for param in run.model.parameters())
    inner = run.optimizer.optimizer
    held = sum(
        (each.to_local() if hasattr(each, "to_local") else each).numel()
        for its in inner.state.values()
        for each in its.values()
        if each.numel() > 1
    )
    local = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in run.model.parameters())
    run.accelerator.backward(run.model(torch.ones(2, 16)).sum())
    return numel, held, local, [bool(param.grad.isnan().all()) for param in run.model.parameters() if stage == 2]


def test_each_rank_holds_its_share() -> None:
    for stage in (1, 2, 3):
        shares = run_ranks(2, state_of_memory, stage)
        for numel, held, local, gone in shares:
            assert held == pytest.approx(numel, rel=0.1)  # two moments of half of the elements
            assert (local < 0.6 * numel) == (stage == 3)
            assert all(gone)
            assert len(gone) == (8 if stage == 2 else 0)


def in_any_order(stage: str) -> list[torch.Tensor]:
    weights = []
    for order in ("together", "model last", "one by one", "model, then a new optimizer", "state before"):
        torch.manual_seed(0)
        accelerator = Accelerator(plugin=ZeroPlugin(stage=int(stage[-1])), cpu=True)
        model: Any = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
        if order == "state before":
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param, fresh in zip(model.parameters(), Net().parameters(), strict=True):
                    param.copy_(fresh)
        if order in ("together", "state before"):
            model, optimizer = accelerator.prepare(model, optimizer)
        elif order == "model last":
            optimizer, model = accelerator.prepare(optimizer, model)
        elif order == "one by one":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        else:
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 1e-2))
        for n in range(3):
            accelerator.backward(model(torch.full((2, 16), 1.0 + n + accelerator.process_index)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        weights.append(torch.cat([each.flatten() for each in state.values()]) if state else torch.empty(0))
        assert accelerator.unwrap_model(model) is model
    return weights


@pytest.mark.parametrize("stage", STAGES)
def test_model_and_optimizer_may_be_prepared_in_any_order(stage: str) -> None:
    first, *_ = run_ranks(2, in_any_order, stage)
    for same in first[1:4]:
        torch.testing.assert_close(same, first[0], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(first[4], first[0], rtol=1e-3)  # the moments that it had before count


def clips_of_parts(stage: str) -> list[Any]:
    """Two optimizers of one model, or a part of one's parameters: the norm is that of just these."""
    results = []
    for plugin in (None, ZeroPlugin(stage=int(stage[-1]))):
        torch.manual_seed(0)
        accelerator = Accelerator(plugin=plugin, cpu=True)
        net = Net()
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (net.first, net.layers)]
        optimizers.append(torch.optim.SGD(net.last.parameters(), 0.1))
        model, *prepared = accelerator.prepare(net, *optimizers)
        x = torch.ones(2, 16) * (1 + accelerator.process_index)
        norms = []
        for part in ("all", "head"):
            accelerator.backward(model(x).square().mean() * 10)
            inner = accelerator.unwrap_model(model)
            params = list(inner.parameters() if part == "all" else inner.last.parameters())
            norms.append(float(accelerator.clip_grad_norm_(params, 0.1)))
            norms.append(float(accelerator.clip_grad_norm_(params[:1], 1e9)))
            for optimizer in prepared:
                optimizer.step()
                optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        results.append((norms, [each.tolist() for each in state.values()]))
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_is_of_the_parameters_given_whichever_optimizers_step_them(stage: str) -> None:
    for rank, (plain, ours) in enumerate(run_ranks(2, clips_of_parts, stage)):
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)
        if rank == 0:
            for wanted, got in zip(plain[1], ours[1], strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def two_models(stage: str) -> list[Any]:
    """Each has an optimizer; both accumulate; one of them steps every other time only."""
    results = []
    for plugin in (None, ZeroPlugin(stage=int(stage[-1]))):
        accelerator = Accelerator(plugin=plugin, cpu=True, gradient_accumulation_steps=2)
        nets = [Net(), Net(width=24)]
        made = [torch.optim.AdamW(net.parameters(), 1e-2) for net in nets]
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in made]
        first, second, *rest = accelerator.prepare(*nets, *made, *schedules)
        optimizers, schedulers = rest[:2], rest[2:]
        losses = []
        for n in range(8):
            x = torch.full((2, 16), 0.1 * n + accelerator.process_index)
            with accelerator.accumulate(first, second):
                loss = (first(x) - second(x)).square().mean()
                accelerator.backward(loss)
                for at, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
                    if at == 0 or n % 4 == 3:
                        optimizer.step()
                        scheduler.step()
                    optimizer.zero_grad()
            losses.append(float(loss.detach()))
        results.append((losses, [each.param_groups[0]["lr"] for each in optimizers]))
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_several_models_accumulate_together(stage: str) -> None:
    for plain, ours in run_ranks(2, two_models, stage):
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)
        assert ours[1] == plain[1]


def scaled(stage: str) -> list[Any]:
    """Loss scaling, which Accelerate has for GPUs only: the same scaler on the CPU; one rank overflows in step 2."""
    results = []
    for plugin in (None, ZeroPlugin(stage=int(stage[-1]))):
        accelerator = Accelerator(plugin=plugin, cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        model, optimizer = accelerator.prepare(net := Net(), torch.optim.SGD(net.parameters(), 0.1))
        skipped = []
        for n in range(4):
            x = torch.ones(2, 16) * (1 + accelerator.process_index)
            loss = model(x).square().mean()
            bad = n == 1 and accelerator.process_index == 1
            accelerator.backward(loss * (float("inf") if bad else 1.0))
            accelerator.scaler.unscale_(optimizer.optimizer)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
        state = accelerator.get_state_dict(model)
        results.append((skipped, accelerator.scaler.get_scale(), [each.tolist() for each in state.values()]))
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: str) -> None:
    for rank, (plain, ours) in enumerate(run_ranks(2, scaled, stage)):
        assert ours[0] == plain[0] == [False, True, False, False]
        assert ours[1] == plain[1]
        if rank == 0:
            for wanted, got in zip(plain[2], ours[2], strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def evaluated_alone(stage: int) -> tuple[bool, bool]:
    """Stages 1 and 2: one rank may evaluate by itself, with rank 0's running statistics everywhere."""
    run = Run.of(f"zero_{stage}", net=lambda: Net(norm=True)).train()
    means = run.accelerator.gather(run.model.norm.running_mean[None])
    if run.accelerator.is_main_process:
        run.model.eval()
        with torch.no_grad():
            run.model(torch.ones(2, 16))
    run.accelerator.wait_for_everyone()
    kwargs = DistributedDataParallelKwargs(broadcast_buffers=False)
    own = Run.of(f"zero_{stage}", net=lambda: Net(norm=True), kwargs_handlers=[kwargs]).train()
    others = own.accelerator.gather(own.model.norm.running_mean[None])
    return bool((means[0] == means[1]).all()), bool((others[0] == others[1]).all())


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_may_evaluate_alone_with_the_statistics_of_rank_0(stage: int) -> None:
    assert run_ranks(2, evaluated_alone, stage) == [(True, False)] * 2


def metrics(stage: str) -> tuple[int, bool]:
    run = Run.of(stage, n_rows=51, batch=4).train()
    run.model.eval()
    seen = []
    with torch.no_grad():
        for x, _ in run.loader:
            out, its = run.accelerator.gather_for_metrics((run.model(x), x))
            assert out.shape[0] == its.shape[0]
            seen.append(its)
    run.model.train()
    run.train()
    return sum(map(len, seen)), len(run.losses) == 14


@pytest.mark.parametrize("stage", STAGES)
def test_every_row_is_evaluated_once_and_training_goes_on(stage: str) -> None:
    assert run_ranks(2, metrics, stage) == [(51, True)] * 2


def on_meta(stage: str) -> list[torch.Tensor]:
    results = []
    for device in ("cpu", "meta"):
        accelerator = Accelerator(plugin=ZeroPlugin(stage=int(stage[-1])), cpu=True)
        torch.manual_seed(accelerator.process_index)
        with torch.device(device):
            net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = accelerator.prepare(net)
        results.append(accelerator.get_state_dict(model))
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_has_the_values_of_the_plain_one_of_rank_0(stage: str) -> None:
    plain, meta = run_ranks(2, on_meta, stage)[0]
    torch.testing.assert_close(meta, plain, rtol=0, atol=0)


class Swapping(torch.optim.SGD):
    def train(self) -> None: ...
    def eval(self) -> None: ...


def clip_too_early(stage: int) -> None:
    run = Run.of(f"zero_{stage}", gradient_accumulation_steps=2)
    with run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.model(torch.ones(1, 16)).sum())
        run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)


def unprepared_gradient(stage: int) -> None:
    accelerator = Accelerator(plugin=ZeroPlugin(stage=stage), cpu=True)
    model, _ = accelerator.prepare(net := Net(), torch.optim.SGD(net.first.parameters(), 0.1))
    accelerator.backward(model(torch.ones(1, 16)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def other_shapes(stage: int) -> None:
    Accelerator(plugin=ZeroPlugin(stage=stage), cpu=True).prepare(nn.Linear(3, 2 + dist.get_rank()))


def other_plugins(stage: int) -> None:
    Accelerator(plugin=ZeroPlugin(stage=stage, elementwise=dist.get_rank() == 0), cpu=True)


def uneven(stage: int) -> None:
    run = Run.of(f"zero_{stage}")
    with run.accelerator.join_uneven_inputs([run.model], even_batches=False):
        run.train()


def hook(stage: int) -> None:
    kwargs = DistributedDataParallelKwargs(comm_hook="fp16")
    Accelerator(plugin=ZeroPlugin(stage=stage), cpu=True, kwargs_handlers=[kwargs]).prepare(Net())


def inference(stage: int) -> None:
    run = Run.of(f"zero_{stage}")
    with torch.inference_mode():
        run.model(torch.ones(1, 16))


def optimizer_first(stage: int) -> None:
    Accelerator(plugin=ZeroPlugin(stage=stage), cpu=True).prepare(torch.optim.SGD(Net().parameters(), 0.1))


def swapping(stage: int) -> None:
    Accelerator(plugin=ZeroPlugin(stage=stage), cpu=True).prepare(net := Net(), Swapping(net.parameters(), 0.1))


def lbfgs(stage: int) -> None:
    Accelerator(plugin=ZeroPlugin(stage=stage), cpu=True).prepare(net := Net(), torch.optim.LBFGS(net.parameters()))


REFUSED: dict[str, tuple[Callable[[int], None], tuple[int, ...], str]] = {
    "unprepared": (unprepared_gradient, (1, 2, 3), "have a gradient of this rank alone: give them to an optimizer"),
    "shapes": (other_shapes, (1, 2, 3), "alike on every rank"),
    "plugins": (other_plugins, (1, 3), "the Accelerator's plugin must be made alike on every rank, but elementwise"),
    "uneven": (uneven, (1, 3), "every rank has a part in every step, so one that is out of data"),
    "hook": (hook, (2,), "of DistributedDataParallelKwargs cannot be had beside ZeroPlugin"),
    "inference mode": (inference, (3,), "use torch.no_grad()"),
    "optimizer first": (optimizer_first, (3,), "but the model has not been prepared: call prepare(model, optimizer)"),
    "swapping": (swapping, (1, 3), "ZeRO cannot shard Swapping: its train() and eval() change whole parameters"),
    "lbfgs": (lbfgs, (1, 3), "ZeRO cannot shard LBFGS"),
    "clip too early": (clip_too_early, (1, 2, 3), "clip where accelerator.sync_gradients is True"),
}


def refusals() -> list[tuple[str, int, str]]:
    said = []
    for name, (body, stages, _) in REFUSED.items():
        for stage in stages:
            try:
                body(stage)
                said.append((name, stage, "nothing"))
            except Exception as error:
                said.append((name, stage, str(error)))
    return said


def test_what_cannot_work_is_refused_on_every_rank_with_the_reason() -> None:
    for said in run_ranks(2, refusals):
        for name, stage, message in said:
            assert REFUSED[name][2] in message, (name, stage)


def test_the_errors_are_those_of_the_lightning_strategy() -> None:
    strategies = pytest.importorskip("lightning_distkit.strategies", reason="Lightning is not installed")
    for wrong in ({"stage": 4}, {"stage": 3, "bucket_cap_mb": 1}, {"stage": 2, "policy": 5}, {"bucket_cap_mb": 0}):
        with pytest.raises(ValueError, match=next(reversed(wrong))) as ours:
            ZeroPlugin(**wrong)
        with pytest.raises(ValueError, match=next(reversed(wrong))) as theirs:
            strategies.ZeroStrategy(**wrong)
        assert str(ours.value).partition(";")[0] == str(theirs.value).partition(";")[0]


def prepared_anew(stage: str) -> list[float]:
    run = Run.of(stage).train(3)
    run.accelerator.free_memory()
    losses = []
    model, optimizer = run.accelerator.prepare(net := Net(), torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(3):
        loss = model(torch.ones(2, 16)).square().mean()
        run.accelerator.backward(loss)
        run.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_after_free_memory_another_model_may_be_trained(stage: str) -> None:
    for losses in run_ranks(2, prepared_anew, stage):
        assert losses[2] < losses[0]


def in_two_goes(stage: str) -> list[tuple[list[float], list[float], list[torch.Tensor]]]:
    """The same objects are prepared again after `free_memory`, as Trainer does at the begin of each fit."""
    results = []
    for name in ("none", stage):
        run = Run.of(name)
        for _ in range(3):
            run.train(2, clip=0.5)
            state = run.accelerator.get_state_dict(run.model)
            run.accelerator.free_memory()
            run.model, run.optimizer, run.loader = run.accelerator.prepare(run.model, run.optimizer, run.loader)
        results.append((run.losses, run.norms, [each.detach().clone() for each in state.values()]))
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_after_free_memory_the_same_model_and_optimizer_go_on(stage: str) -> None:
    for rank, (plain, ours) in enumerate(run_ranks(2, in_two_goes, stage)):
        for wanted, got in zip(plain[:2], ours[:2], strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
        if rank == 0:
            torch.testing.assert_close(ours[2], plain[2], rtol=1e-5, atol=1e-6)


def alone(stage: str) -> tuple[list[float], list[float], torch.Tensor, torch.Tensor]:
    """As a notebook or ``python train.py`` does: no launcher, no process group."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    plain, ours = (Run.of(name).train(clip=0.5) for name in ("none", stage))
    return plain.losses, ours.losses, plain.weights(), ours.weights()


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_trains_as_plain_accelerate(stage: str) -> None:
    plain, ours, wanted, got = run_ranks(1, alone, stage)[0]
    assert ours == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def clipped_where_a_rank_has_nothing(stage: str) -> list[float]:
    """More ranks than elements of what is clipped: some have no piece of it, and go on all the same."""
    accelerator = Accelerator(plugin=ZeroPlugin(stage=int(stage[-1])), cpu=True)
    model, optimizer = accelerator.prepare(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), 1.0))
    accelerator.backward(model(torch.ones(4, 2)).sum())
    bias = [param for param in model.parameters() if param.numel() == 1]
    accelerator.clip_grad_value_(bias, 0.5)
    norm = float(accelerator.clip_grad_norm_(bias, 9.0))
    optimizer.step()
    return [norm]


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_works_where_a_rank_has_no_piece(stage: str) -> None:
    assert run_ranks(2, clipped_where_a_rank_has_nothing, stage) == [[0.5], [0.5]]

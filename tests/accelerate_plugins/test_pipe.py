"""PipePlugin: a loop trains over stages as in one process, and over several pipes as under DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import skip_first_batches
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate_plugins import Accelerator, PipePlugin
from lightning_distkit.core.pipeline import DistributedPipe
from lightning_distkit.core.pipeline.stage_norm import StageGradScaler
from tests.accelerate_plugins.like_transformers import LanguageModel
from tests.accelerate_plugins.test_zero import BF16, LOOPS
from tests.accelerate_plugins.training import Net, Run
from tests.ranks import run_ranks

# Adam would make steps of full length of the rounding in gradients that are zero, as of a bias before a BatchNorm.
SGD = {"optimizer": lambda params: torch.optim.SGD(params, 0.1)}
TABLES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "LOOPS": {**LOOPS, "batch norm": ({"net": lambda: Net(norm=True), **SGD}, {})},
    "BF16": {name: ({**made, **SGD}, trained) for name, (made, trained) in BF16.items()},
}
WORLDS = {"pipe": (2, 1), "pipes": (4, 2)}  # plugin -> its ranks, and those of DDP that see the same batches


def every_loop(plugin: str, loops: str) -> dict[str, Any]:
    results = {}
    for name, (made, trained) in TABLES[loops].items():
        run = Run.of(plugin, **made).train(**trained)
        results[name] = run.losses, run.norms, run.rates, run.weights()
    return results


@pytest.mark.parametrize("loops", ["LOOPS", "BF16"])
@pytest.mark.parametrize("plugin", WORLDS)
def test_losses_norms_rates_and_weights_are_those_without_stages(plugin: str, loops: str) -> None:
    n_ranks, n_plain = WORLDS[plugin]
    plain = run_ranks(n_plain, every_loop, "none", loops)[0]
    for rank, results in enumerate(run_ranks(n_ranks, every_loop, plugin, loops)):
        for name, ours in results.items():
            # Micro-batches are rounded to bf16 each.
            close = {"rtol": 2e-2, "atol": 2e-3} if name == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
            for wanted, got in zip(plain[name][:3], ours[:3], strict=True):
                assert len(got) == len(wanted), name
                torch.testing.assert_close(got, wanted, **close, msg=lambda said, name=name: f"{name}: {said}")
            if rank == 0:
                torch.testing.assert_close(ours[3], plain[name][3], **close)
            else:
                assert ours[3].numel() == 0


def chain(tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    if tied:
        layers[3].weight = layers[0].weight
    return layers


X = torch.linspace(-1, 1, 48).view(6, 8)


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


def steps(accelerator: Any, model: Any, optimizer: Any, n: int = 3) -> list[float]:
    losses = []
    for _ in range(n):
        loss = loss_of(model(X))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


ORDERS = ("together", "model last", "one by one", "optimizer first", "a new optimizer", "state before")


def in_any_order(is_piped: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for order in ORDERS:
        plugin = PipePlugin(chunks=2) if is_piped else None
        accelerator: Any = Accelerator(plugin=plugin, cpu=True)
        net = chain(tied=order == "together")
        optimizer: Any = torch.optim.AdamW(net.parameters(), 1e-2)
        if order == "state before":
            loss_of(net(X)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if order in ("together", "state before"):
            model, optimizer = accelerator.prepare(net, optimizer)
        elif order == "model last":
            optimizer, model = accelerator.prepare(optimizer, net)
        elif order == "one by one":
            model = accelerator.prepare(net)
            optimizer = accelerator.prepare(optimizer)
        elif order == "optimizer first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(net)
        else:
            model = accelerator.prepare(net)
            optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), 1e-2))
        assert isinstance(model, DistributedPipe) == is_piped
        assert accelerator.unwrap_model(model) is net
        results[order] = steps(accelerator, model, optimizer), accelerator.get_state_dict(model)
        if is_piped:
            held = [each for its in optimizer.state.values() for each in its.values() if each.dim()]
            results[order] += (sum(each.numel() for each in held), sum(each.numel() for each in model.parameters()))
    return results


def test_prepare_gives_a_pipe_and_the_optimizer_trains_its_own_stage_whatever_the_order() -> None:
    plain = run_ranks(1, in_any_order, False)[0]
    for rank, results in enumerate(run_ranks(2, in_any_order, True)):
        for order, (losses, state, held, own) in results.items():
            assert losses == pytest.approx(plain[order][0], rel=1e-5), order
            assert own == 2 * 72
            assert held == 2 * own  # the two moments
            if rank == 0:
                torch.testing.assert_close(state, plain[order][1], rtol=1e-5, atol=1e-6)
                assert list(state) == list(chain().state_dict())
                assert not any(torch.equal(state[name], value) for name, value in chain().state_dict().items())


def two_models(is_piped: bool) -> list[Any]:
    """Each has an optimizer; both accumulate; one of them steps every other time only; clipped by the norm of both."""
    accelerator: Any = Accelerator(
        plugin=PipePlugin(chunks=2) if is_piped else None, cpu=True, gradient_accumulation_steps=2
    )
    nets = [Net(), chain()]
    made = [torch.optim.AdamW(net.parameters(), 1e-2) for net in nets]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in made]
    first, second, *rest = accelerator.prepare(*nets, *made, *schedules)
    optimizers, schedulers = rest[:2], rest[2:]
    losses = []
    for n in range(8):
        with accelerator.accumulate(first, second):
            loss = (first(torch.cat([X, X], 1)).repeat(1, 2) - second(X + n)).square().mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.5)
            for at, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
                if at == 0 or n % 4 == 3:
                    optimizer.step()
                    scheduler.step()
                optimizer.zero_grad()
        losses += [loss.item(), float(norm)]
    return [losses, [each.param_groups[0]["lr"] for each in optimizers]]


def test_several_models_accumulate_together() -> None:
    plain = run_ranks(1, two_models, False)[0]
    for ours in run_ranks(2, two_models, True):
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)
        assert ours[1] == plain[1]


def sent(plugin: str) -> tuple[int, int]:
    """Bytes between replicas of four accumulated backwards, and of one."""
    counted = []
    for n_rows, every in ((32, 4), (8, 1)):
        run = Run.of(plugin, n_rows=n_rows, gradient_accumulation_steps=every)
        run.train()
        counted.append(run.accelerator.unwrap_model(run.model).layers.forward.pipe.data_ledger.total.nbytes)
    return counted[0], counted[1]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from torch.arange(10.0)


def data() -> dict[str, Any]:
    """What is seen by this rank of several loaders, and gathered of it."""
    plugin = PipePlugin(chunks=2, pipeline_parallel_size=2)
    accelerator: Any = Accelerator(plugin=plugin, cpu=True)
    torch.manual_seed(dist.get_rank())  # the ranks' own numbers differ
    found: dict[str, Any] = {}
    rows = TensorDataset(torch.arange(11.0))
    for name, loader in (
        ("in order", DataLoader(rows, 2)),
        ("shuffled", DataLoader(rows, 2, shuffle=True)),
        ("stream", DataLoader(Stream(), 2)),
    ):
        prepared = accelerator.prepare(loader)
        seen, gathered, objects, numbers = [], [], [], []
        for batch in prepared:
            values = batch[0] if isinstance(batch, list) else batch
            seen.append(values.tolist())
            numbers.append(torch.rand(()).item())
            gathered += accelerator.gather_for_metrics(values).tolist()
            objects += accelerator.gather_for_metrics([str(each) for each in values.tolist()])
        skipped = []
        for skip in (skip_first_batches, accelerator.skip_first_batches):
            torch.manual_seed(100 + dist.get_rank())
            for batch in skip(prepared, 2):
                values = batch[0] if isinstance(batch, list) else batch
                skipped.append((values.tolist(), torch.rand(()).item()))
        found[name] = seen, sorted(gathered), len(objects), numbers, skipped
    number = torch.tensor(float(accelerator.process_index))
    found["reduced"] = [float(accelerator.reduce(number, how)) for how in ("sum", "mean")]
    found["sizes"] = (accelerator.data_parallel_size, accelerator.pipeline_parallel_size, accelerator.num_processes)
    found["gathered"] = accelerator.gather(number).tolist()
    with accelerator.split_between_processes([1, 2]) as own:
        found["split"] = own
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    if is_last_rank:
        accelerator.set_trigger()
    found["triggers"] = accelerator.check_trigger(), accelerator.check_trigger()
    found["is last"] = accelerator.is_last_process == is_last_rank
    return found


@pytest.mark.parametrize("plugin", WORLDS)
def test_a_pipe_has_one_batch_and_each_row_counts_once(plugin: str) -> None:
    n_ranks, n_pipes = WORLDS[plugin]
    results = run_ranks(n_ranks, data)
    for name in ("in order", "shuffled", "stream"):
        for rank, each in enumerate(results):
            seen, gathered, n_objects, numbers, skipped = each[name]
            assert seen == results[rank - rank % 2][name][0]  # as the first stage
            assert numbers == results[rank - rank % 2][name][3]  # and so are the step's random numbers
            if name != "stream":
                assert gathered == list(range(11))
                assert n_objects == 11
            else:
                assert set(gathered) == set(range(10))
            assert len(skipped) == 2 * (len(seen) - 2)
            assert skipped == results[rank - rank % 2][name][4]
            if name != "shuffled":
                assert [values for values, _ in skipped] == 2 * seen[2:]
        others = {str(each[name][0]) for each in results}
        assert len(others) == n_pipes
    for each in results:
        assert each["reduced"] == [n_pipes - 1, (n_pipes - 1) / 2]
        assert each["sizes"] == (n_pipes, 2, n_pipes)
        assert each["triggers"] == (True, False)
        assert each["is last"]
        assert each["gathered"] == (0.0 if n_pipes == 1 else [0.0, 1.0])
    assert [each["split"] for each in results] == ([[1, 2]] * 2 if n_pipes == 1 else [[1], [1], [2], [2]])


def profiled(path: Path) -> None:
    accelerator: Any = Accelerator(
        plugin=PipePlugin(), cpu=True, kwargs_handlers=[ProfileKwargs(output_trace_dir=str(path))]
    )
    with accelerator.profile() as profiler:
        torch.ones(2).sum()
    assert profiler.key_averages()


def test_each_stage_writes_a_profile_of_its_own(tmp_path: Path) -> None:
    run_ranks(2, profiled, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"profile_0.json", "profile_1.json"}


def timeouts() -> list[float]:
    """Seconds: those of the pipe's group and of its messages, with each way to say it."""
    found = []
    handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=77))]
    for given in ({"plugin": PipePlugin(timeout=55)}, {"plugin": PipePlugin()}):
        accelerator: Any = Accelerator(**given, cpu=True, kwargs_handlers=handlers)
        group = accelerator.grid.stages.process_group
        found.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return found


def test_the_pipes_groups_have_the_timeout_that_is_asked_for() -> None:
    assert run_ranks(2, timeouts) == [[55.0, 77.0]] * 2


def test_accumulation_averages_between_pipes_once() -> None:
    for accumulated, one in run_ranks(4, sent, "pipes"):
        assert accumulated == one > 0


def scaled(is_piped: bool) -> list[Any]:
    """Loss scaling, which Accelerate has for GPUs only: the same scaler on the CPU; one stage overflows in step 2."""
    accelerator: Any = Accelerator(plugin=PipePlugin() if is_piped else None, cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model, optimizer = accelerator.prepare(net := chain(), torch.optim.SGD(net.parameters(), 0.1))
    skipped, norms = [], []
    for n in range(4):
        accelerator.backward(loss_of(model(X)))
        if n == 1 and not net[3].weight.is_meta:
            net[3].weight.grad.fill_(float("inf"))
        accelerator.scaler.unscale_(optimizer.optimizer)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return [skipped, norms, accelerator.scaler.get_scale(), accelerator.get_state_dict(model)]


def test_an_overflow_on_one_stage_skips_the_step_on_all() -> None:
    plain = run_ranks(1, scaled, False)[0]
    for rank, ours in enumerate(run_ranks(2, scaled, True)):
        assert ours[0] == plain[0] == [False, True, False, False]
        assert ours[1] == pytest.approx(plain[1], rel=1e-5)
        assert ours[2] == plain[2]
        if rank == 0:
            torch.testing.assert_close(ours[3], plain[3], rtol=1e-5, atol=1e-6)


def by_micro_batches() -> tuple[list[float], list[float]]:
    """1F1B has the loss of each micro-batch, within the pipe."""
    losses = []
    for schedule in ("gpipe", "1f1b"):
        accelerator: Any = Accelerator(plugin=PipePlugin(chunks=4, schedule=schedule), cpu=True)
        model, optimizer = accelerator.prepare(net := chain(), torch.optim.AdamW(net.parameters(), 1e-2))
        if schedule == "gpipe":
            losses.append(steps(accelerator, model, optimizer))
            continue
        losses.append([])
        for _ in range(3):
            loss = model.loss(X, loss=loss_of)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[1].append(loss.item())
    return losses[0], losses[1]


def prepared_anew() -> tuple[list[float], list[float], bool]:
    accelerator: Any = Accelerator(plugin=PipePlugin(), cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 16)).sum())
    accelerator.free_memory()
    is_gone = "forward" not in vars(net.layers)
    losses = []
    for _ in range(2):
        model, optimizer = accelerator.prepare(other := chain(), torch.optim.SGD(other.parameters(), 0.1))
        losses.append(steps(accelerator, model, optimizer))
        model, optimizer = accelerator.free_memory(model, optimizer)
    return losses[0], losses[1], is_gone


def in_two_goes(is_piped: bool) -> dict[str, Any]:
    """The same objects are prepared again after `free_memory`, as Trainer does at the begin of each fit."""
    results = {}
    for name in ("chain", "net"):
        plugin = PipePlugin(chunks=2, checkpoint="never") if is_piped else None
        accelerator: Any = Accelerator(plugin=plugin, cpu=True)
        net: nn.Module = chain() if name == "chain" else nn.ModuleDict({"layers": chain()})
        accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
        call = net["layers"] if name == "net" else net  # type: ignore[index]
        model, optimizer = net, torch.optim.AdamW(net.parameters(), 1e-2)
        losses, norms, seeds = [], [], set()
        for _ in range(3):
            model, optimizer = accelerator.prepare(model, optimizer)
            if is_piped:
                assert isinstance(accelerator.scaler, StageGradScaler)
                trained = optimizer.param_groups[0]["params"]
                assert all(one is other for one, other in zip(trained, net.parameters(), strict=True))
                seeds.add(model.numbers.initial_seed() if name == "chain" else len(seeds))
            for _ in range(2):
                loss = loss_of(call(X))
                accelerator.backward(loss)
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            state = accelerator.get_state_dict(model)
            accelerator.free_memory()
        assert len(seeds) == (3 if is_piped else 0)  # or each go would have the first one's dropout
        results[name] = losses, norms, state
    return results


def evaluated_as_it_is() -> tuple[Tensor, Tensor, Tensor]:
    accelerator: Any = Accelerator(plugin=PipePlugin(chunks=2), cpu=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    with torch.no_grad():
        wanted = net.eval()(X)
    net.train()
    model = accelerator.prepare(net)
    model.eval()
    with torch.no_grad():
        return wanted, model(X), accelerator.unwrap_model(model)(X)


def test_the_pipe_itself_can_be_used() -> None:
    for gpipe, one_f_one_b in run_ranks(2, by_micro_batches):
        assert one_f_one_b == pytest.approx(gpipe, rel=1e-5)
    for wanted, got, unwrapped in run_ranks(2, evaluated_as_it_is):
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(unwrapped, wanted)


def test_after_free_memory_another_model_may_be_trained() -> None:
    for first, second, is_gone in run_ranks(2, prepared_anew):
        assert first == second
        assert first[2] < first[0]
        assert is_gone


def test_after_free_memory_the_same_model_and_optimizer_go_on_in_a_new_pipe() -> None:
    plain = run_ranks(1, in_two_goes, False)[0]
    for rank, results in enumerate(run_ranks(2, in_two_goes, True)):
        for name, (losses, norms, state) in results.items():
            assert losses == pytest.approx(plain[name][0], rel=1e-5), name
            assert norms == pytest.approx(plain[name][1], rel=1e-5), name
            if rank == 0:
                torch.testing.assert_close(state, plain[name][2], rtol=1e-5, atol=1e-6)


def alone() -> tuple[list[float], list[float], Tensor, Tensor]:
    """As a notebook or ``python train.py`` does: no launcher, no process group."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    plain, ours = (Run.of(name).train(clip=0.5) for name in ("none", "pipe"))
    return plain.losses, ours.losses, plain.weights(), ours.weights()


def test_one_process_trains_as_plain_accelerate() -> None:
    plain, ours, wanted, got = run_ranks(1, alone)[0]
    assert ours == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def other_shapes() -> None:
    Accelerator(plugin=PipePlugin(), cpu=True).prepare(
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2 + dist.get_rank()))
    )


def other_plugins() -> None:
    Accelerator(plugin=PipePlugin(chunks=1 + dist.get_rank()), cpu=True)


def uneven() -> None:
    run = Run.of("pipes 1")
    with run.accelerator.join_uneven_inputs([run.model], even_batches=False):
        run.train()


def hook() -> None:
    kwargs = DistributedDataParallelKwargs(comm_hook="fp16")
    Accelerator(plugin=PipePlugin(), cpu=True, kwargs_handlers=[kwargs]).prepare(chain())


def lbfgs() -> None:
    Accelerator(plugin=PipePlugin(), cpu=True).prepare(net := chain(), torch.optim.LBFGS(net.parameters()))


def no_layers() -> None:
    Accelerator(plugin=PipePlugin(), cpu=True).prepare(nn.Linear(2, 2))


def several() -> None:
    Accelerator(plugin=PipePlugin(), cpu=True).prepare(nn.ModuleList([chain(), nn.ModuleDict({"a": chain()})]))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)] * 2)


def the_same_layer() -> None:
    Accelerator(plugin=PipePlugin(), cpu=True).prepare(Twice())


def nothing_there() -> None:
    Accelerator(plugin=PipePlugin(module="encoder.layers"), cpu=True).prepare(Net())


def too_few() -> None:
    Accelerator(plugin=PipePlugin(n_stages_per_rank=2), cpu=True).prepare(Net())


def sizes() -> None:
    Accelerator(plugin=PipePlugin(pipeline_parallel_size=3), cpu=True)


def dispatched() -> None:
    handed = DataLoaderConfiguration(dispatch_batches=True)
    Accelerator(plugin=PipePlugin(), cpu=True, dataloader_config=handed)


def on_each_node() -> None:
    project = accelerate.utils.ProjectConfiguration(save_on_each_node=True)
    Accelerator(plugin=PipePlugin(), cpu=True, project_config=project).save_state("state")


def compiled() -> None:
    accelerate.state.AcceleratorState._reset_state()  # which remembers the first one's backend
    try:
        Accelerator(plugin=PipePlugin(), cpu=True, dynamo_backend="eager")
    finally:
        accelerate.state.AcceleratorState._reset_state()


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "shapes": (other_shapes, "alike on every rank"),
    "plugins": (other_plugins, "the Accelerator's plugin must be made alike on every rank, but chunks is 1 on rank 0"),
    "uneven": (uneven, "every rank has a part in every step, so one that is out of data"),
    "hook": (hook, "of DistributedDataParallelKwargs cannot be had beside PipePlugin"),
    "lbfgs": (lbfgs, "LBFGS needs all parameters at once, and a stage has its own alone"),
    "no layers": (
        no_layers,
        "must be an nn.Sequential or an nn.ModuleList of one class, and one alone if it is not named",
    ),
    "several": (several, "found '0', '1.a'; name it: module="),
    "the same layer": (the_same_layer, "must be different objects, to be on different ranks, but 2 of them are 1"),
    "nothing there": (nothing_there, "nothing is at 'encoder.layers'; found 'layers'"),
    "too few": (too_few, "4 stages need at least 4 layers, got 2"),
    "sizes": (sizes, "Accelerator(plugin=...): data_parallel_size times pipeline_parallel_size must be the number of"),
    "dispatched": (dispatched, "dispatch_batches=True cannot be had with PipePlugin"),
    "on each node": (on_each_node, "save to a folder that all machines share"),
    "compiled": (compiled, "the whole model cannot be compiled, but dynamo_backend is EAGER"),
}


def as_before() -> list[Any]:
    """What is left of a model that was refused: too few layers for the stages."""
    model = LanguageModel(n_layers=2)
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    layers = model.model.layers
    with pytest.raises(ValueError, match="at least 4 layers"):
        Accelerator(plugin=PipePlugin(n_stages_per_rank=2, schedule="interleaved_1f1b"), cpu=True).prepare(model)
    return [model.model.layers is layers, *("forward" in vars(each) for each in layers), model.config.use_cache]


def test_a_model_that_is_refused_is_as_it_was() -> None:
    assert run_ranks(2, as_before) == [[True, False, False, True]] * 2


def refusals() -> list[tuple[str, str]]:
    said = []
    for name, (body, _) in REFUSED.items():
        try:
            body()
            said.append((name, "nothing"))
        except Exception as error:
            said.append((name, str(error)))
    return said


def test_what_cannot_work_is_refused_on_every_rank_with_the_reason() -> None:
    for said in run_ranks(2, refusals):
        for name, message in said:
            assert REFUSED[name][1] in message, name


def test_defaults_and_errors_are_those_of_the_lightning_strategy() -> None:
    strategies = pytest.importorskip("lightning_distkit.strategies", reason="Lightning is not installed")
    from dataclasses import fields
    from inspect import signature

    theirs = signature(strategies.PipeStrategy).parameters
    for each in fields(PipePlugin):
        assert each.name == "timeout" or each.default == theirs[each.name].default, each.name
    for wrong in ({"chunks": 0}, {"checkpoint": "often"}, {"schedule": "zb"}, {"pipeline_parallel_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))) as ours:
            PipePlugin(**wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=next(iter(wrong))) as other:
            strategies.PipeStrategy(**wrong)
        assert str(ours.value) == str(other.value)

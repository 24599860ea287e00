"""`DistributedPipe` is the whole module in one process, for any batch, on every rank."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_distkit.core.pipeline import NoChunk
from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES
from lightning_distkit.core.pipeline.dist import DistributedPipe
from tests.core.pipeline.models import (
    SCHEDULES_AND_STAGES,
    OneProcess,
    assert_same_gradients,
    assert_same_state,
    cross_entropy,
    even,
    mlp,
    sequence_model,
    tokens,
)
from tests.ranks import run_ranks

# Rows, time steps, whether in training: as many rows as chunks and fewer, none of them divisible, in any order.
BATCHES = [
    (16, 6, True),
    (10, 9, True),
    (3, 4, False),
    (7, 5, True),
    (1, 8, True),
    (2, 3, False),
    (32, 3, True),
    (5, 7, True),
]


def every_batch(schedule: str, n_stages_per_rank: int) -> None:
    n_stages = dist.get_world_size() * n_stages_per_rank
    for n, mode in enumerate(CHECKPOINT_MODES):
        deferred = (n + n_stages) % 2 == 0
        module = sequence_model()
        whole = OneProcess(module, 4, deferred)
        pipe = DistributedPipe(
            module,
            4,
            mode,
            deferred,
            balance=even(len(module), n_stages),
            schedule=schedule,
            n_stages_per_rank=n_stages_per_rank,
            timeout=20,
        )
        for seed, (rows, time, training) in enumerate(BATCHES):
            pipe.train(training)
            whole.module.train(training)
            pipe.zero_grad()
            whole.module.zero_grad()
            assert_equal_one_process(pipe, whole, *tokens(rows, time, seed), inside=seed % 2 == 1)


def assert_equal_one_process(pipe: DistributedPipe, whole: OneProcess, x: Tensor, y: Tensor, inside: bool) -> None:
    """Outputs, gradients, statistics; the loss's backward is done inside of the pipe, or follows outside."""
    expected = whole(x)
    if not pipe.training:
        with torch.no_grad():
            out = pipe(x)
            torch.testing.assert_close(pipe.loss(x, loss=cross_entropy, targets=y), cross_entropy(expected, y))
        assert not out.requires_grad
    elif inside:
        value, out = pipe.loss(x, loss=cross_entropy, targets=y, return_output=True)
        torch.testing.assert_close(value, cross_entropy(expected, y))
        value.backward()
    else:
        out = pipe(x)
        cross_entropy(out, y).backward()
    torch.testing.assert_close(out, expected)
    if pipe.training:
        cross_entropy(expected, y).backward()
        assert_same_gradients(pipe, whole.module)
    assert_same_state(pipe, whole.module)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("schedule", "n_stages_per_rank"), SCHEDULES_AND_STAGES)
def test_outputs_gradients_and_statistics_are_those_of_one_process_for_any_rows_lengths_and_modes(
    schedule: str, n_stages_per_rank: int, world_size: int
) -> None:
    run_ranks(world_size, every_batch, schedule, n_stages_per_rank)


def pipe_of(module: nn.Sequential, chunks: int = 3, mode: str = "never", **arguments: Any) -> DistributedPipe:
    """Two stages, or as many as there are ranks, with as many layers each as can be."""
    n_stages = dist.get_world_size() * arguments.get("n_stages_per_rank", 1)
    arguments = {"balance": even(len(module), n_stages), "timeout": 20, **arguments}
    return DistributedPipe(module, chunks, mode, **arguments)


def layers_around() -> None:
    """An embedding before the pipe and a head behind it, on every rank; inputs that are leaves, too."""
    for schedule, n in SCHEDULES_AND_STAGES:
        for mode in CHECKPOINT_MODES:
            torch.manual_seed(0)
            before, behind, inner = nn.Linear(5, 6), nn.Linear(4, 3), mlp(6, 8, 8, 8, 4)
            whole = nn.Sequential(*(copy.deepcopy(each) for each in (before, inner, behind)))
            pipe = pipe_of(inner, mode=mode, schedule=schedule, n_stages_per_rank=n)
            x = torch.randn(7, 5, requires_grad=True)
            behind(pipe(before(x))).square().mean().backward()
            grad, x.grad = x.grad, None
            whole(x).square().mean().backward()
            torch.testing.assert_close(grad, x.grad)
            torch.testing.assert_close(before.weight.grad, whole[0].weight.grad)
            torch.testing.assert_close(behind.weight.grad, whole[2].weight.grad)
            assert_same_gradients(pipe, whole[1])
            # The same with the backward inside of the call, the loss halved.
            x.grad = before.weight.grad = None
            (pipe.loss(before(x), loss=lambda out: out.square().mean()) / 2).backward()
            whole.zero_grad()
            expected = x.grad.clone()
            x.grad = None
            (whole[1](whole[0](x)).square().mean() / 2).backward()
            torch.testing.assert_close(expected, x.grad)
            torch.testing.assert_close(before.weight.grad, whole[0].weight.grad)


def test_layers_before_and_behind_the_pipe_get_their_gradients_on_every_rank() -> None:
    run_ranks(2, layers_around)


def many_calls() -> None:
    """Several calls a step, used together; accumulation by scaled losses; a call whose result nobody uses."""
    for schedule, n in SCHEDULES_AND_STAGES:
        module = mlp(4, 8, 8, 8, 4)
        whole, pipe = copy.deepcopy(module), pipe_of(module, mode="except_last", schedule=schedule, n_stages_per_rank=n)
        x, y = torch.randn(5, 4), torch.randn(2, 4)

        def loss_of(model: nn.Module, x: Tensor = x, y: Tensor = y) -> Tensor:
            once, other = model(x), model(y)
            model(y + 1)  # never differentiated
            twice = model(once)
            return twice.square().mean() + (once.sum() * other.sum()) / 7

        for _ in range(2):
            loss_of(pipe).backward()
            loss_of(whole).backward()
        assert_same_gradients(pipe, whole)
        for k in (1, 2, 3):
            (pipe.loss(k * x, loss=lambda out: out.square().mean()) / 3).backward()
            (whole(k * x).square().mean() / 3).backward()
        assert_same_gradients(pipe, whole)
        pipe.loss(x, loss=lambda out: out.square().mean())  # skipped: no backward, no gradient
        assert_same_gradients(pipe, whole)
        pipe.loss(x, loss=lambda out: out.square().mean(), scale=2.0**16).backward()
        whole(x).square().mean().backward()
        assert_same_gradients(pipe, whole)


def test_several_calls_a_step_accumulation_and_skipped_losses_are_as_in_one_process() -> None:
    run_ranks(2, many_calls)


class Sort(nn.Module):
    """From one tensor to a nest with everything in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, name: str | None = None) -> dict[str, Any]:
        x = self.linear(x) * scale
        return {
            "x": x,
            "nest": ([x.double(), (x > 0)], {"index": x.argmax(-1), "half": x.to(torch.bfloat16)}),
            "plain": [None, 3, 2.5, True, "text", name, len(x)],
            "number": x.sum(),
            "empty": x[:0],
            "complex": torch.complex(x, x),
            "strided": x.mT,
            "twice": x,
        }


class Unsort(nn.Module):
    def forward(self, nest: dict[str, Any]) -> tuple[Any, ...]:
        x, ((double, positive), inner), plain = nest["x"], nest["nest"], nest["plain"]
        assert plain[:5] == [None, 3, 2.5, True, "text"]
        assert type(plain[3]) is bool
        assert plain[6] == len(x)
        assert nest["empty"].shape == (0, 4)
        assert positive.dtype == torch.bool
        assert inner["half"].dtype == torch.bfloat16
        assert nest["twice"] is x
        chosen = x.gather(-1, inner["index"][:, None])
        out = x * positive + chosen + double.float() + inner["half"].float() + nest["complex"].imag + nest["strided"].mT
        return out + nest["number"], plain[5], positive


def nests() -> None:
    for schedule, n in (("gpipe", 1), ("1f1b", 1)):
        for mode in CHECKPOINT_MODES:
            torch.manual_seed(0)
            module = nn.Sequential(Sort(), Unsort())
            whole, pipe = copy.deepcopy(module), pipe_of(module, 2, mode, schedule=schedule, n_stages_per_rank=n)
            x = torch.randn(5, 4)
            for name in ("a", None, "a"):  # what is no tensor may change from call to call
                out, names, positive = pipe(x, scale=2.0, name=name)
                # Some outputs depend on the micro-batch (a sum over it), so one process does them one by one.
                each = [whole[1](whole[0](piece, 2.0, name)) for piece in (x[:3], x[3:])]
                torch.testing.assert_close(out, torch.cat([its[0] for its in each]))
                assert names == [name, name]
                assert torch.equal(positive, torch.cat([its[2] for its in each]))
                assert not positive.requires_grad
            pipe.zero_grad()
            out.square().mean().backward()
            torch.cat([its[0] for its in each]).square().mean().backward()
            assert_same_gradients(pipe, whole, rtol=1e-3, atol=1e-3)  # bfloat16 on the way


def test_any_nest_of_tensors_and_plain_values_crosses_between_stages_and_comes_out() -> None:
    run_ranks(2, nests)


class Whole(nn.Module):
    def forward(self, x: Tensor, table: Tensor, k: int) -> tuple[Tensor, int]:
        assert table.shape == (3, 4)
        return x + table.sum(0), k


class Last(nn.Module):
    def forward(self, x: Tensor, k: int) -> tuple[Tensor, int]:
        return x * k, k


def no_chunk() -> None:
    pipe = pipe_of(nn.Sequential(Whole(), Last()), 2)
    x, table = torch.randn(4, 4), torch.randn(3, 4, requires_grad=True)
    out, ks = pipe(x, NoChunk(table), 5)
    assert ks == [5, 5]
    torch.testing.assert_close(out, (x + table.sum(0)) * 5)
    out.square().sum().backward()
    grad, table.grad = table.grad, None
    ((x + table.sum(0)) * 5).square().sum().backward()
    torch.testing.assert_close(grad, table.grad)


def test_what_is_wrapped_in_no_chunk_is_whole_in_every_micro_batch_and_gets_its_gradient() -> None:
    run_ranks(2, no_chunk)


def frozen() -> None:
    """Front layers that are not trained: nothing flows back to them, and the schedule still fits."""
    for schedule, n in SCHEDULES_AND_STAGES:
        for mode in CHECKPOINT_MODES:
            for n_frozen in (2, 4, 7):
                module = mlp(4, 8, 8, 8, 4)
                for layer in module[:n_frozen]:
                    layer.requires_grad_(False)
                whole, pipe = copy.deepcopy(module), pipe_of(module, 3, mode, schedule=schedule, n_stages_per_rank=n)
                x = torch.randn(4, 4)
                if n_frozen < 7:
                    pipe(x).square().mean().backward()
                    whole(x).square().mean().backward()
                    assert_same_gradients(pipe, whole)
                    pipe.zero_grad()
                    pipe.loss(x, loss=lambda out: out.square().mean()).backward()
                    assert_same_gradients(pipe, whole)
                else:
                    assert not pipe(x).requires_grad
                    x.requires_grad_()
                    pipe(x).square().mean().backward()  # gradients pass through what is frozen
                    grad, x.grad = x.grad, None
                    whole(x).square().mean().backward()
                    torch.testing.assert_close(grad, x.grad)


def test_frozen_layers_get_no_gradients_and_let_them_through() -> None:
    run_ranks(2, frozen)


def last_only() -> int:
    """Only the last rank has the output; all take part in its backward."""
    module = mlp(4, 8, 8, 16)
    whole, pipe = copy.deepcopy(module), pipe_of(module, 2, outputs="last")
    x = torch.randn(64, 4)
    before = pipe.ledger.total.nbytes
    out = pipe(x)
    sent = pipe.ledger.total.nbytes - before
    if pipe.is_last:
        torch.testing.assert_close(out, whole(x))
        loss = out.square().mean()
    else:
        assert out.shape == ()
        assert out.item() == 0
        loss = out
    loss.backward()
    whole(x).square().mean().backward()
    assert_same_gradients(pipe, whole)
    with torch.no_grad():
        assert pipe(x).requires_grad is False
    return sent if pipe.is_last else 0


def test_the_output_can_stay_on_the_last_rank() -> None:
    assert run_ranks(3, last_only)[2] < 64 * 16 * 4  # not the output, but a word


def by_tokens() -> None:
    """A mean over tokens that count, of which micro-batches have 9, 0, 1 ...: exact in one call, as in one process."""
    for schedule, n in SCHEDULES_AND_STAGES:
        module = sequence_model()
        del module[1], module[4]  # the norms: their micro-batches' statistics are no matter here
        whole = copy.deepcopy(module)
        pipe = pipe_of(module, 4, "always", schedule=schedule, n_stages_per_rank=n)
        x, y = tokens(8, 9)
        y[2:4] = -100
        y[4, 1:], y[5] = -100, -100

        def loss(logits: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)

        value = pipe.loss(x, loss=loss, targets=y, weight=lambda y: (y != -100).sum())
        value.backward()
        expected = loss(whole(x), y)
        expected.backward()
        torch.testing.assert_close(value, expected)
        assert_same_gradients(pipe, whole)


def test_a_mean_over_what_counts_is_exact_though_micro_batches_have_more_or_less_of_it() -> None:
    run_ranks(2, by_tokens)


def watch(pipe: DistributedPipe) -> list[Tensor]:
    """What this rank's layers return from now on."""
    returned: list[Tensor] = []
    for layer in pipe.children():
        layer.register_forward_hook(lambda layer, args, output: returned.append(output.detach()))
    return returned


def dropout() -> list[Any]:
    """By rank: a mask of ones, and the global generator's state after some calls."""
    found: list[Any] = []
    for schedule, n in SCHEDULES_AND_STAGES:
        torch.manual_seed(0)
        for mode in CHECKPOINT_MODES:
            pipe = pipe_of(
                nn.Sequential(*(nn.Sequential(Eye(), nn.Dropout(0.5)) for _ in range(2 * n))),
                mode=mode,
                schedule=schedule,
                n_stages_per_rank=n,
            )
            x = torch.ones(6, 64)
            masks = watch(pipe)
            out = pipe(x)
            masks_at_first = [mask.ne(0) for mask in masks]
            masks.clear()
            out.sum().backward()
            again = {"always": 3, "except_last": 2, "never": 0}[mode]  # micro-batches that were run again
            assert len(masks) == again * n
            drawn = [mask.ne(0) for mask in masks]
            assert all(any(torch.equal(mask, each) for each in masks_at_first) for mask in drawn)
            assert not torch.equal(masks_at_first[0], masks_at_first[1])
            found.append(masks_at_first[0].tolist())
            found.append(torch.get_rng_state().tolist()[:64])
            torch.manual_seed(7)
            once = pipe(x)
            torch.manual_seed(7)
            assert torch.equal(once, pipe(x))  # the global seed decides
            assert not torch.equal(once, pipe(x))
    return found


class Eye(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_stages_draw_different_masks_and_the_global_generators_stay_alike() -> None:
    first, second = run_ranks(2, dropout)
    assert first[1::2] == second[1::2]  # generators
    for mine, its in zip(first[::2], second[::2], strict=True):
        # The second stage drops of what the first has left, so its mask holds the first one's zeros as well.
        assert mine != its
        assert sum(map(sum, mine)) > sum(map(sum, its)) > 0


def mixed_precision() -> None:
    for schedule, n in SCHEDULES_AND_STAGES:
        for mode in CHECKPOINT_MODES:
            module = mlp(8, 16, 16, 16, 8)
            whole, pipe = copy.deepcopy(module), pipe_of(module, 2, mode, schedule=schedule, n_stages_per_rank=n)
            x = torch.randn(6, 8)
            with torch.autocast("cpu", torch.bfloat16):
                out = pipe(x)
                expected = torch.cat([whole(x[:3]), whole(x[3:])])
                inner = pipe.loss(x, loss=lambda out: out.float().square().mean())
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, expected)
            out.float().square().mean().backward()
            expected.float().square().mean().backward()
            assert_same_gradients(pipe, whole, rtol=2e-2, atol=1e-3)
            pipe.zero_grad()
            inner.backward()
            assert_same_gradients(pipe, whole, rtol=2e-2, atol=1e-3)


def test_autocast_reaches_every_stage_and_its_recomputation() -> None:
    run_ranks(2, mixed_precision)


class Own(nn.Module):
    """Recomputes its inside by itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.utils.checkpoint.checkpoint(lambda x: self.linear(x).tanh(), x, use_reentrant=False)


def unusual_layers() -> None:
    """Hooks, compiled layers, recomputation inside of layers, writing in place at a boundary, a replaced layer."""
    hooked = []

    def double(grad: Tensor) -> Tensor:
        hooked.append(grad)
        return grad * 2

    for mode in CHECKPOINT_MODES:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(8, 8), Own(), nn.ReLU(inplace=True), torch.compile(nn.Linear(8, 8), backend="eager")
        )
        whole, pipe = copy.deepcopy(module), pipe_of(module, 3, mode)
        for parameter in (*pipe.parameters(), *whole.parameters()):
            parameter.register_hook(double)
        x = torch.randn(5, 8)
        hooked.clear()
        pipe(x).square().mean().backward()
        assert len(hooked) == 3 * len(list(pipe.parameters()))
        whole(x).square().mean().backward()
        assert_same_gradients(pipe, whole)
        if pipe.is_first:
            pipe.add_module("0", nn.Linear(8, 8, bias=False))
            nn.init.zeros_(pipe.get_submodule("0").weight)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), whole[1:](torch.zeros(5, 8)))


# Dynamo looks at it; in a backward autograd shows the warning that dynamo elsewhere silences.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_hooks_compiled_layers_own_recomputation_and_in_place_layers_work() -> None:
    run_ranks(2, unusual_layers)


def misuse() -> list[str]:
    pipe = pipe_of(mlp(4, 8, 8, 4))
    x = torch.randn(4, 4)
    out = pipe(x).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as again:
        out.backward()
    value = pipe.loss(x, loss=torch.sum)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as twice:
        value.backward()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(pipe(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as double:
        grad.sum().backward()
    pipe(x).sum().backward()  # and goes on
    return [str(each.value) for each in (again, twice, double)]


def test_a_second_backward_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, misuse)
    assert first == second
    assert "once" in first[0]
    assert "once" in first[1]


def world_of_one() -> None:
    dist.destroy_process_group()
    module = mlp(4, 8, 8, 4)
    whole = copy.deepcopy(module)
    for schedule, n in (("gpipe", 1), ("interleaved_1f1b", 3)):
        pipe = DistributedPipe(copy.deepcopy(module), 3, schedule=schedule, n_stages_per_rank=n)
        x = torch.randn(4, 4)
        pipe(x).square().mean().backward()
        whole.zero_grad()
        whole(x).square().mean().backward()
        assert_same_gradients(pipe, whole)
        assert pipe.ledger.total.n_messages == 0
        assert list(pipe.whole_state_dict()) == list(whole.state_dict())


def test_it_works_in_one_process_without_a_process_group() -> None:
    run_ranks(1, world_of_one)


def no_hang() -> int:
    """Many steps of every schedule, with rows that change."""
    n = 0
    pipes = []
    for schedule, n_stages_per_rank in SCHEDULES_AND_STAGES:
        n_stages = 4 * n_stages_per_rank
        module = mlp(*([6] * (n_stages + 1)), activation=nn.Identity)
        pipes.append(pipe_of(module, 5, "except_last", schedule=schedule, n_stages_per_rank=n_stages_per_rank))
    for step in range(50):
        for pipe in pipes:
            x = torch.ones(1 + step % 7, 6)
            if step % 2:
                pipe(x).sum().backward()
            else:
                pipe.loss(x, loss=torch.mean).backward()
            n += 1
    return n


def test_four_ranks_fifty_steps_all_schedules_no_hang() -> None:
    assert run_ranks(4, no_hang, timeout=120) == [200] * 4


class Counter(nn.Module):
    """Hands on a buffer that it changes in place for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += len(x)
        return x, self.count


class Added(nn.Module):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return x + count


def buffers_on_the_way() -> None:
    for mode in CHECKPOINT_MODES:
        pipe = pipe_of(nn.Sequential(Counter(), Added()), 4, mode)
        torch.testing.assert_close(pipe(torch.zeros(7, 1)).flatten(), torch.tensor([2.0, 2, 4, 4, 6, 6, 7]))


def test_a_buffer_that_changes_is_sent_as_it_was() -> None:
    run_ranks(2, buffers_on_the_way)


def explicit_micro_batches() -> None:
    module = mlp(4, 8, 8, 4)
    for schedule in ("gpipe", "1f1b"):
        whole, pipe = copy.deepcopy(module), pipe_of(copy.deepcopy(module), schedule=schedule)
        pieces = [torch.randn(rows, 4) for rows in (3, 1, 5)]
        weights = [0.5, 3.0, 1.5]
        value = pipe.micro_batch_loss(
            [((piece,), {}) for piece in pieces],
            loss=lambda i, out: out.square().mean() + i,
            weights=weights,
        )
        value.backward()
        each = [
            weight * (whole(x).square().mean() + i) for i, (x, weight) in enumerate(zip(pieces, weights, strict=True))
        ]
        (sum(each) / sum(weights)).backward()
        torch.testing.assert_close(value, sum(each) / sum(weights))
        assert_same_gradients(pipe, whole)
        with pytest.raises(ValueError, match="a weight for each, got 1 micro-batches and 0 weights"):
            pipe.micro_batch_loss([((pieces[0],), {})], loss=lambda i, out: out.sum(), weights=[])


def test_micro_batches_of_ones_own_making_with_weights() -> None:
    run_ranks(2, explicit_micro_batches)


def evaluation_between() -> None:
    """Evaluation between a backward and the step, with other rows, leaves gradients and parameters alone."""
    for schedule, n in SCHEDULES_AND_STAGES:
        pipe = pipe_of(mlp(4, 8, 8, 8, 4), schedule=schedule, n_stages_per_rank=n)
        pipe.loss(torch.randn(6, 4), loss=lambda out: out.square().mean()).backward()
        before = [(each.clone(), each.grad.clone()) for each in pipe.parameters()]
        pipe.eval()
        with torch.no_grad():
            pipe(torch.randn(2, 4))
            pipe.loss(torch.randn(1, 4), loss=torch.mean)
        pipe.train()
        for each, (value, grad) in zip(pipe.parameters(), before, strict=True):
            assert torch.equal(each, value)
            assert torch.equal(each.grad, grad)


def test_evaluation_changes_no_gradient() -> None:
    run_ranks(2, evaluation_between)


def first_step() -> None:
    pipe = pipe_of(mlp(4, 8, 8, 8, 4))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = pipe.whole_state_dict(all_ranks=True)
    assert before is not None
    before = {key: value.clone() for key, value in before.items()}
    loss = pipe(torch.randn(6, 4)).square().mean()
    loss.backward()
    optimizer.step()
    after = pipe.whole_state_dict(all_ranks=True)
    assert after is not None
    assert list(after) == list(mlp(4, 8, 8, 8, 4).state_dict())
    assert not any(torch.equal(after[key], value) for key, value in before.items())


def test_every_parameter_of_every_stage_moves_in_the_first_step() -> None:
    run_ranks(3, first_step)


def recorded() -> list[str]:
    """What was done, in order; and seconds that add up."""
    pipe = pipe_of(mlp(4, 8, 8, 4), 3, schedule="1f1b")
    pipe.record = True
    before = pipe.seconds
    pipe.loss(torch.randn(6, 4), loss=torch.mean).backward()
    after = {key: value - before[key] for key, value in pipe.seconds.items()}
    steps = [event for event in pipe.events if event.kind in "FB"]
    for event in steps:
        assert 0 <= event.waited <= event.end - event.begin
    for one, other in pairwise(steps):
        assert one.end <= other.begin
    assert 0 < after["computed"] + after["waited"] <= after["total"]
    pipe.record = False
    pipe(torch.randn(6, 4))
    assert pipe.events == []
    return [f"{event.kind}{event.micro_batch}" for event in steps]


def test_recorded_steps_are_those_of_the_schedule() -> None:
    assert run_ranks(2, recorded) == [
        ["F0", "F1", "B0", "F2", "B1", "B2"],
        ["F0", "B0", "F1", "B1", "F2", "B2"],
    ]


def same_loss() -> float:
    pipe = pipe_of(mlp(4, 8, 8, 4), schedule="1f1b")
    torch.manual_seed(0)
    return pipe.loss(torch.randn(5, 4), loss=lambda out: out.square().mean()).item()


def test_the_loss_is_the_same_number_on_every_rank() -> None:
    first, *others = run_ranks(3, same_loss)
    assert others == [first, first]

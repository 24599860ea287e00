"""Pipe keeps each promise of the one that torch removed. Devices are the CPU and "meta"."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_distkit.core.pipeline import LocalRef, NoChunk, Pipe, PipeSequential, WithDevice
from lightning_distkit.core.pipeline.checkpoint import CHECKPOINT_MODES, is_recomputing
from lightning_distkit.core.pipeline.local import clock_cycles
from lightning_distkit.core.pipeline.placement import refuse_shared
from lightning_distkit.core.pipeline.skip import Namespace, pop, skippable, stash
from tests.core.pipeline.test_microbatch import expected_of, nests, same
from tests.ranks import run_ranks

BATCHES = [16, 10, 3, 7, 1, 32]
CPU, META = torch.device("cpu"), torch.device("meta")


class Fn(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any, **named: Any) -> Any:
        return self.function(*values, **named)


def mlp(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *extra, nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


def step(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = run(x)
    return y.detach(), list(torch.autograd.grad(y.square().mean(), [x, *model.parameters()]))


# Arguments


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]), [nn.Linear(1, 1)], None])
def test_a_module_that_is_no_sequential_is_a_type_error(module: Any) -> None:
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned"):
        Pipe(module)


@pytest.mark.parametrize("chunks", [0, -1, 2.5, "many", None, float("nan")])
def test_chunks_that_are_no_positive_integer_are_a_value_error(chunks: Any) -> None:
    with pytest.raises(ValueError, match="number of chunks must be positive integer"):
        Pipe(nn.Sequential(nn.Linear(1, 1)), chunks=chunks)


def test_a_checkpoint_mode_that_is_none_of_the_three_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="checkpoint is not one of 'always', 'except_last', or 'never', got 'some'"):
        Pipe(nn.Sequential(nn.Linear(1, 1)), checkpoint="some")


def test_defaults_and_attributes_are_those_of_the_removed_pipe() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)))
    assert (pipe.chunks, pipe.checkpoint, pipe.devices) == (1, "except_last", [CPU])
    assert Pipe(nn.Sequential(nn.Linear(1, 1)), 42.0, "always", True).chunks == 42  # type: ignore[arg-type]


def test_a_layer_that_occurs_twice_is_a_value_error() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        Pipe(nn.Sequential(layer, layer))


def test_a_layer_on_two_devices_is_a_value_error() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(1, 1), nn.Linear(1, 1, device=META)

    with pytest.raises(ValueError, match=r"layer 1, Both, should have all parameters on a single device, got cpu, me"):
        Pipe(nn.Sequential(nn.Linear(1, 1), Both()))


def test_parameters_shared_on_one_device_are_fine_and_on_two_a_value_error() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    pipe = Pipe(nn.Sequential(first, second), chunks=2)
    x = torch.randn(4, 2)
    torch.testing.assert_close(step(pipe, local(pipe), x), step(pipe, nn.Sequential(first, second), x))
    with pytest.raises(ValueError, match="duplicate parameters on distinct devices"):
        refuse_shared(nn.ModuleList([first, second]), [CPU, META])


def local(pipe: nn.Module) -> Callable[..., Any]:
    return lambda *inputs: pipe(*inputs).local_value()


def test_mismatched_skips_are_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="one or more pairs of stash and pop do not match"):
        Pipe(nn.Sequential(Stash(), nn.Linear(4, 4)))


# Partitions and devices


def test_consecutive_layers_on_one_accelerator_are_one_partition() -> None:
    there = partial(nn.Linear, device=META)
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), there(2, 3), there(3, 4), nn.Linear(4, 4), there(4, 5)))
    assert pipe.devices == [CPU, META, CPU, META]
    assert [len(partition) for partition in pipe.partitions] == [1, 2, 1, 1]  # type: ignore[arg-type]
    assert list(pipe.state_dict())[:4:2] == ["partitions.0.0.weight", "partitions.1.0.weight"]
    assert "partitions.1.1.weight" in pipe.state_dict()


def test_on_the_cpu_each_layer_is_a_partition_and_a_sequential_joins_several() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)))
    assert pipe.devices == [CPU] * 3
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert [name for name in pipe.state_dict() if "weight" in name] == [
        "partitions.0.0.weight",
        "partitions.1.0.weight",
        "partitions.2.0.weight",
    ]


def test_layers_without_parameters_run_on_the_cpu_unless_with_device_says_otherwise() -> None:
    seen = []
    look = Fn(lambda x: seen.append(x.device) or x)
    there = nn.Linear(2, 2, device=META)
    pipe = Pipe(nn.Sequential(deepcopy(look), WithDevice(deepcopy(look), "meta"), there, WithDevice(look, META)), 2)
    assert pipe.devices == [CPU, META]
    y = pipe(torch.ones(4, 2)).local_value()  # the input of a layer is moved to its device
    assert (y.device, y.shape) == (META, (4, 2))
    assert seen == [CPU, CPU, META, META, META, META] or sorted(map(str, seen)) == ["cpu"] * 2 + ["meta"] * 4
    assert Pipe(nn.Sequential(there, nn.ReLU())).devices == [META, CPU]


def test_with_device_moves_the_layer_and_is_taken_off() -> None:
    layer = nn.Linear(2, 2)
    wrapped = WithDevice(layer, "meta")
    pipe = Pipe(nn.Sequential(wrapped))
    assert (wrapped.module, wrapped.device) == (layer, META)
    assert pipe[0] is layer
    assert layer.weight.device == META
    assert list(pipe.state_dict()) == ["partitions.0.0.weight", "partitions.0.0.bias"]
    x = torch.ones(1, 2)
    assert WithDevice(nn.ReLU(), "cpu")(x) is not None


def test_buffers_say_where_a_layer_without_parameters_is() -> None:
    norm = nn.BatchNorm1d(2, affine=False, device=META)
    assert Pipe(nn.Sequential(norm)).devices == [META]


def test_inputs_must_be_on_the_first_partitions_device() -> None:
    pipe = Pipe(mlp())
    for inputs in ((torch.ones(2, 4, device=META),), (torch.ones(2, 4), NoChunk(torch.ones(1, device=META)))):
        with pytest.raises(ValueError, match="same device as the first partition, cpu, got a tensor on meta"):
            pipe(*inputs)


def test_a_sequential_with_hooks_or_a_forward_of_its_own_stays_a_layer() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    calls = []
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked.register_forward_hook(lambda *_: calls.append(1))
    module = nn.Sequential(Residual(nn.Linear(4, 4), nn.Tanh()), hooked)
    pipe = Pipe(deepcopy(module), chunks=2)
    x = torch.randn(4, 4)
    torch.testing.assert_close(pipe(x).local_value(), module(x))
    assert len(pipe) == 2
    assert len(calls) == 3


def test_moving_is_denied_and_casting_allowed() -> None:
    pipe = Pipe(mlp())
    x = torch.ones(1)
    moves: list[Callable[[], Any]] = [
        pipe.cpu,
        pipe.cuda,
        pipe.xpu,
        pipe.mtia,
        pipe.ipu,
        lambda: pipe.to_empty(device="cpu"),
        lambda: pipe.to("cpu"),
        lambda: pipe.to(CPU),
        lambda: pipe.to(0),
        lambda: pipe.to(x),
        lambda: pipe.to(CPU, torch.half),
        lambda: pipe.to(device="cpu"),
        lambda: pipe.to(tensor=x),
        lambda: pipe.to(other=x),
        lambda: nn.Sequential(pipe).to("meta"),
    ]
    for move in moves:
        with pytest.raises(TypeError, match="denied to move parameters and buffers"):
            move()
    pipe = Pipe(mlp())
    assert pipe.half()[0].weight.dtype == torch.half
    assert pipe.to(torch.double) is pipe
    assert pipe[0].weight.dtype == torch.double
    assert pipe.to(dtype=torch.float, non_blocking=True)[0].weight.dtype == torch.float
    assert nn.Sequential(pipe).to("cpu", torch.double)[0][0].weight.dtype == torch.double
    assert pipe.to(memory_format=torch.channels_last) is pipe


# Like a sequence


def test_it_is_counted_iterated_and_indexed_like_its_module() -> None:
    a, b, c, d = (nn.Linear(1, 1) for _ in range(4))
    pipe = Pipe(nn.Sequential(OrderedDict(a=a, bc=nn.Sequential(b, c), d=d)))
    assert len(pipe) == 4
    assert list(pipe) == [a, b, c, d]
    assert [pipe[index] for index in (0, 1, 2, 3, -1, -4)] == [a, b, c, d, d, a]
    for index in (4, -5):
        with pytest.raises(IndexError):
            pipe[index]
    with pytest.raises(AttributeError):
        _ = pipe.a
    assert {id(param) for param in pipe.parameters()} == {id(param) for layer in pipe for param in layer.parameters()}


def test_a_module_without_layers_gives_back_its_input() -> None:
    pipe = Pipe(nn.Sequential())
    x = torch.tensor(42)
    assert pipe(x).local_value() is x
    assert pipe(x, 3).local_value() == (x, 3)
    assert (len(pipe), list(pipe), pipe.devices) == (0, [], [])
    with pytest.raises(TypeError, match="at least one tensor"):
        pipe(42)
    y = torch.ones(4)
    assert torch.equal(Pipe(nn.Sequential(nn.Sequential(), nn.Sequential()), 2)(y).local_value(), y)


def test_it_can_be_copied_and_its_state_loaded_elsewhere() -> None:
    pipe = Pipe(mlp(), chunks=2)
    x = torch.randn(4, 4)
    for copied in (deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(copied(x).local_value(), pipe(x).local_value())
    other = Pipe(mlp(), chunks=3)
    for param in other.parameters():
        nn.init.zeros_(param)
    other.load_state_dict(pipe.state_dict())
    assert torch.allclose(other(x).local_value(), pipe(x).local_value())


# Inputs and outputs


def echo(chunks: int) -> Pipe:
    return Pipe(nn.Sequential(Fn(lambda *values: values), Fn(lambda *values: values)), chunks)


@settings(max_examples=50)
@given(st.data(), st.integers(1, 7), st.integers(1, 9))
def test_any_nest_of_tensors_and_plain_values_goes_through(data: st.DataObject, n_rows: int, chunks: int) -> None:
    inputs = data.draw(nests(n_rows))
    n_micro_batches = min(n_rows, chunks)
    assert same(echo(chunks)(*inputs).local_value(), expected_of(inputs, n_micro_batches))


def test_non_tensors_are_repeated_and_collected_as_a_list() -> None:
    five = Fn(lambda x, *_: (x, 5))
    assert Pipe(nn.Sequential(five), 2)(torch.ones(4)).local_value()[1] == [5, 5]
    x, n, text, nothing = echo(3)(torch.ones(7), 1.5, "a", None).local_value()
    assert (len(x), n, text, nothing) == (7, [1.5] * 3, ["a"] * 3, [None] * 3)


def test_the_first_dimension_is_split_and_a_small_batch_makes_fewer_micro_batches() -> None:
    seen: list[tuple[int, ...]] = []
    pipe = Pipe(nn.Sequential(Fn(lambda x: seen.append(tuple(x.shape)) or x)), chunks=4)
    for n_rows, wanted in ((8, [2] * 4), (7, [2, 2, 2, 1]), (3, [1] * 3), (1, [1]), (0, [0])):
        seen.clear()
        pipe(torch.zeros(n_rows, 5))
        assert seen == [(rows, 5) for rows in wanted]


def test_no_chunk_is_whole_in_each_micro_batch() -> None:
    pipe = Pipe(nn.Sequential(Fn(lambda x, mask: x * mask.sum()), nn.Linear(2, 2)), chunks=4)
    x, mask = torch.randn(8, 2), torch.randn(5, requires_grad=True)
    y = pipe(x, NoChunk(mask)).local_value()
    torch.testing.assert_close(y, pipe[1](x * mask.sum()))
    (got,) = torch.autograd.grad(y.sum(), mask)
    torch.testing.assert_close(got, torch.autograd.grad(pipe[1](x * mask.sum()).sum(), mask)[0])


def test_positional_arguments_are_those_of_the_first_layer_and_of_each_next() -> None:
    add = Fn(lambda a, b, c: (a + b, c))
    sub = Fn(lambda a, c: a - c)
    assert torch.equal(Pipe(nn.Sequential(add, sub), 2)(*torch.ones(3, 4)).local_value(), torch.ones(4))
    assert torch.equal(Pipe(nn.Sequential(nn.Sequential(add, sub)), 2)(*torch.ones(3, 4)).local_value(), torch.ones(4))
    with pytest.raises(TypeError):
        Pipe(nn.Sequential(nn.Linear(1, 1)))(torch.ones(1, 1), torch.ones(1, 1))


def test_only_a_tuple_is_spread_wherever_the_boundaries_are() -> None:
    layers = [Fn(lambda x: [x, x]), Fn(lambda both: {"a": both[0], "n": 3}), Fn(lambda each: each["a"] * each["n"])]
    for module in (nn.Sequential(*layers), nn.Sequential(nn.Sequential(*layers))):
        assert torch.equal(Pipe(module, 2)(torch.ones(4)).local_value(), torch.full((4,), 3.0))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_none_numbers_texts_and_dicts_between_stages_and_as_the_result(checkpoint: str) -> None:
    pipe = Pipe(
        nn.Sequential(
            nn.Linear(4, 4),
            Fn(lambda x: ({"h": x, "none": None}, 3, "text", True)),
            Fn(lambda d, n, text, flag: ({"y": d["h"] * n, "none": d["none"]}, text, flag, None)),
        ),
        chunks=2,
        checkpoint=checkpoint,
    )
    x = torch.randn(4, 4)
    d, text, flag, none = pipe(x).local_value()
    assert (d["none"], text, flag, none) == ([None] * 2, ["text"] * 2, [True] * 2, [None] * 2)
    torch.testing.assert_close(d["y"], pipe[0](x) * 3)
    d["y"].sum().backward()
    assert pipe[0].weight.grad is not None


def test_inputs_outputs_and_boundaries_need_a_tensor() -> None:
    x = torch.ones(2)
    for inputs in ((), ("hello",), (1, None), ([],), (NoChunk(x),)):
        with pytest.raises(TypeError, match="the input of Pipe must contain at least one tensor"):
            echo(1)(*inputs)
    first = nn.Sequential(Fn(lambda x: "hello"), Fn(lambda text: torch.ones(2)))
    with pytest.raises(TypeError, match="what partition 0 of 2 returns must contain at least one tensor, got str"):
        Pipe(first)(x)
    with pytest.raises(TypeError, match="what partition 1 of 2 returns"):
        Pipe(nn.Sequential(Fn(lambda x: x), Fn(lambda x: (1, None))))(x)


def test_integer_and_bool_tensors_cross_boundaries() -> None:
    pipe = Pipe(
        nn.Sequential(nn.Linear(3, 3), Fn(lambda x: (x, x.argmax(1), x > 0)), Fn(lambda x, n, mask: (x * mask, n))),
        chunks=3,
        checkpoint="always",
    )
    x = torch.randn(6, 3)
    y, n = pipe(x).local_value()
    h = pipe[0](x)
    torch.testing.assert_close(y, h * (h > 0))
    assert torch.equal(n, h.argmax(1))
    y.sum().backward()


def test_the_handle_has_the_output() -> None:
    handle = Pipe(mlp(), 2)(torch.ones(4, 4))
    assert isinstance(handle, LocalRef)
    assert handle.to_here() is handle.to_here(timeout=1.0) is handle.local_value()
    assert handle.is_owner()


def with_rpc() -> list[Any]:
    from torch.distributed import rpc

    before = type(Pipe(mlp())(torch.ones(2, 4))).__name__
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own call of its own
        rpc.init_rpc("worker", rank=0, world_size=1)
    handle = Pipe(mlp(), chunks=8)(torch.ones(16, 4))
    y = handle.local_value()
    y.sum().backward()
    result = [before, isinstance(handle, rpc.RRef), tuple(y.shape), torch.equal(handle.to_here(), y)]
    rpc.shutdown()
    return [*result, type(Pipe(mlp())(torch.ones(2, 4))).__name__]


def test_the_handle_is_an_rref_where_rpc_is_initialized() -> None:
    assert run_ranks(1, with_rpc) == [["LocalRef", True, (16, 3), True, "LocalRef"]]


# Equal to one process


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_micro_batches_of_any_number_of_rows_equal_one_process(checkpoint: str) -> None:
    module = mlp()
    for chunks in (1, 2, 3, 4, 8):
        pipe = Pipe(deepcopy(module), chunks=chunks, checkpoint=checkpoint)
        for n_rows in BATCHES:
            x = torch.randn(n_rows, 4)
            torch.testing.assert_close(step(pipe, local(pipe), x), step(module, module, x))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_the_first_layer_may_write_to_its_input_and_the_batch_stays_as_it_is(checkpoint: str) -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2))

    pipe = Pipe(nn.Sequential(Double(), nn.ReLU(inplace=True), nn.Linear(4, 2)), 4, checkpoint)
    x = torch.randn(8, 4)
    before = x.clone()
    for _ in range(2):
        got = torch.autograd.grad(pipe(x).local_value().square().mean(), list(pipe.parameters()))
        wanted = torch.autograd.grad(pipe[2](pipe[0](x.clone()).relu()).square().mean(), list(pipe.parameters()))
        torch.testing.assert_close(got, wanted)
    assert torch.equal(x, before)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_train_and_eval_in_any_order_and_accumulation_end_in_the_weights_of_one_process(checkpoint: str) -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), *mlp())
    pipe = Pipe(deepcopy(module), chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    # One process that normalizes each micro-batch by itself, as a pipe does, but has its statistics of the whole.
    plain = deepcopy(module)

    def one_process(x: Tensor) -> Tensor:
        if not plain.training:
            return plain(x)
        whole = deepcopy(plain[0])
        whole(x)
        outputs = [plain(piece) for piece in x.tensor_split(min(4, len(x)))]
        for name, statistic in whole.named_buffers():
            setattr(plain[0], name, statistic)
        return torch.cat(outputs)

    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipe, plain)]
    for n, (n_rows, mode) in enumerate(
        [(16, True), (10, False), (10, True), (1, False), (32, True), (8, True), (3, False), (16, True)]
    ):
        x = torch.randn(n_rows, 4)
        pipe.train(mode)
        plain.train(mode)
        y, z = pipe(x).local_value(), one_process(x)
        torch.testing.assert_close(y, z)
        if mode:
            for output in (y, z):
                output.square().mean().backward()
        if mode and n % 2:  # others are accumulated, with evaluations in between
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for got, wanted in zip(pipe.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("deferred", [True, False])
def test_running_statistics_are_those_of_whole_batches_or_of_each_micro_batch(checkpoint: str, deferred: bool) -> None:
    norm = nn.BatchNorm2d(3)
    pipe = Pipe(nn.Sequential(deepcopy(norm), nn.Conv2d(3, 2, 1)), 4, checkpoint, deferred_batch_norm=deferred)
    for n_rows in BATCHES:
        x = torch.randn(n_rows, 3, 2, 2) + 2
        pipe(x).local_value().sum().backward()
        for piece in [x] if deferred else x.tensor_split(min(4, n_rows)):
            norm(piece)
        got = {name.split(".")[-1]: its for name, its in pipe[0].state_dict().items()}
        torch.testing.assert_close(got, norm.state_dict())
        pipe.eval()(x)
        pipe.train()
    assert list(pipe.state_dict())[:5] == [f"partitions.0.0.{name}" for name in norm.state_dict()]


def test_a_call_that_fails_leaves_no_statistics_for_the_next() -> None:
    fail = [True]

    def may_fail(x: Tensor) -> Tensor:
        if fail[0] and (x > 1e3).any():
            raise ZeroDivisionError
        return x

    norm = nn.BatchNorm1d(3, affine=False)
    pipe = Pipe(nn.Sequential(deepcopy(norm), Fn(lambda x: x * 1e4), Fn(may_fail)), 2, deferred_batch_norm=True)
    with pytest.raises(ZeroDivisionError):
        pipe(torch.randn(8, 3))
    fail[0] = False
    x = torch.randn(8, 3)
    pipe(x)
    norm(x)
    torch.testing.assert_close(pipe[0].state_dict(), norm.state_dict())


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_shapes_may_change_at_every_call(checkpoint: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
    module.append(nn.Linear(8, 10))
    pipe = Pipe(deepcopy(module), chunks=4, checkpoint=checkpoint)
    for n_rows, length in ((8, 5), (3, 9), (8, 2), (1, 1)):
        tokens = torch.randint(10, (n_rows, length))
        got, wanted = pipe(tokens).local_value(), module(tokens)
        torch.testing.assert_close(got, wanted)
        for model, y in ((pipe, got), (module, wanted)):
            model.zero_grad()
            y.square().mean().backward()
        for one, other in zip(pipe.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_every_parameter_of_every_partition_moves_in_the_first_step() -> None:
    pipe = Pipe(mlp(), chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    before = deepcopy(pipe.state_dict())
    pipe(torch.randn(8, 4)).local_value().square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(before[name], its) for name, its in pipe.state_dict().items())


def test_evaluation_between_backwards_leaves_gradients_alone() -> None:
    module = mlp()
    pipe = Pipe(deepcopy(module), chunks=4)
    x = torch.randn(8, 4)
    for _ in range(2):
        pipe(x).local_value().sum().backward()
        with torch.no_grad():
            pipe.eval()(torch.randn(5, 4))
        pipe.train()
        module(x).sum().backward()
    for one, other in zip(pipe.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_several_calls_may_share_a_backward() -> None:
    module = mlp()
    pipe = Pipe(deepcopy(module), chunks=3)
    a, b = torch.randn(7, 4), torch.randn(2, 4)
    (pipe(a).local_value().sum() * pipe(b).local_value().sum()).backward()
    (module(a).sum() * module(b).sum()).backward()
    for one, other in zip(pipe.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_layers_before_and_behind_the_pipe_train_too(checkpoint: str) -> None:
    torch.manual_seed(0)
    before, behind, module = nn.Linear(4, 4), nn.Linear(3, 1), mlp()
    pipe = Pipe(deepcopy(module), 4, checkpoint)

    def grads(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        loss = behind(run(before(x))).square().mean()
        return list(torch.autograd.grad(loss, [*before.parameters(), *behind.parameters()]))

    x = torch.randn(6, 4)
    torch.testing.assert_close(grads(local(pipe), x), grads(module, x))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_frozen_layers_in_front_have_no_gradients(checkpoint: str) -> None:
    pipe = Pipe(mlp(), 2, checkpoint)
    pipe[0].requires_grad_(False)
    y = pipe(torch.randn(4, 4)).local_value()
    y.sum().backward()
    assert pipe[0].weight.grad is None
    assert pipe[2].weight.grad is not None
    pipe.requires_grad_(False)
    assert not pipe(torch.randn(4, 4)).local_value().requires_grad


# Checkpointing


def runs(pipe: Pipe, marks: list[Any]) -> list[Any]:
    marks.clear()
    output = pipe(torch.arange(4.0).view(4, 1)).local_value()
    if output.requires_grad:
        output.sum().backward()
    return list(marks)


class Mark(nn.Module):
    """Notes each run of a micro-batch, and when backward comes to it. Its rows are 0, 1, 2, ..., one a micro-batch."""

    def __init__(self, name: int, marks: list[Any]) -> None:
        super().__init__()
        self.name, self.marks = name, marks
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        micro_batch = int(x[0].item())
        self.marks.append(("again" if is_recomputing() else "run", micro_batch, self.name))
        y = x + (self.weight * x.detach()).sin()  # it saves something that backward asks for
        if y.requires_grad and not is_recomputing():
            y.register_hook(lambda _: self.marks.append(("back", micro_batch, self.name)))
        return y

    def __deepcopy__(self, memo: Any) -> Mark:
        return Mark(self.name, self.marks)


@pytest.mark.parametrize(
    ("mode", "chunks", "again"),
    [
        ("always", 4, [0, 1, 2, 3]),
        ("except_last", 4, [0, 1, 2]),
        ("except_last", 9, [0, 1, 2]),  # the last of those that there are
        ("never", 4, []),
    ],
)
def test_checkpoint_says_which_micro_batches_run_again(mode: str, chunks: int, again: list[int]) -> None:
    marks: list[Any] = []
    pipe = Pipe(nn.Sequential(Mark(0, marks)), chunks, mode)
    done = runs(pipe, marks)
    assert sorted(n for kind, n, _ in done if kind == "again") == again
    assert [n for kind, n, _ in done if kind == "run"] == [0, 1, 2, 3]
    assert [kind for kind, _, _ in runs(pipe.eval(), marks) if kind == "again"] == []  # as the removed one
    with torch.no_grad():
        assert [kind for kind, _, _ in runs(pipe.train(), marks)] == ["run"] * 4


def test_cycles_let_each_partition_work_on_another_micro_batch() -> None:
    assert list(clock_cycles(3, 2)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert list(clock_cycles(1, 3)) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_backward_drains_the_micro_batches_in_reverse(mode: str) -> None:
    marks: list[Any] = []
    pipe = Pipe(nn.Sequential(*(Mark(j, marks) for j in range(3))), 4, mode)
    done = runs(pipe, marks)
    forward = [mark[1:] for mark in done if mark[0] == "run"]
    assert forward == list(clock_cycles(4, 3))
    assert [mark[1:] for mark in done if mark[0] == "back"] == forward[::-1]
    for index, mark in enumerate(done):
        if mark[0] == "again":  # not earlier than it is needed: nothing is held longer than while it is worked on
            assert done[index - 1] == ("back", *mark[1:])


def test_what_layers_compute_is_not_kept() -> None:
    block = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]

    def kept(mode: str) -> int:
        pipe = Pipe(nn.Sequential(nn.Sequential(*deepcopy(block))), 4, mode)
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        x = torch.randn(32, 64)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = pipe(x)
        for known in (x, *pipe.parameters()):
            saved.pop(known.untyped_storage().data_ptr(), None)
        assert y.local_value().requires_grad
        return sum(saved.values())

    never, except_last, always = (kept(mode) for mode in ("never", "except_last", "always"))
    assert always == 0  # but for the input
    assert never / 5 < except_last < never / 3  # one micro-batch of four


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_dropout_masks_in_recomputation_are_those_of_the_first_run(mode: str) -> None:
    module = mlp(nn.Dropout(0.5), nn.Dropout(0.1))

    def trained(mode: str) -> tuple[Tensor, list[Tensor], Tensor]:
        pipe = Pipe(deepcopy(module), 4, mode)
        torch.manual_seed(5)
        return (*step(pipe, local(pipe), torch.ones(10, 4)), torch.rand(3))

    got, wanted = trained(mode), trained("never")
    assert torch.equal(got[0], wanted[0])
    assert all(map(torch.equal, got[1], wanted[1]))
    assert torch.equal(got[2], wanted[2])  # and random numbers go on alike


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_autocast_is_seen_by_all_partitions_and_in_recomputation(mode: str) -> None:
    module = mlp()
    pipe = Pipe(deepcopy(module), 3, mode)
    seen = []
    for layer in pipe:
        layer.register_forward_hook(lambda layer, _, y: seen.append(y.dtype) if isinstance(layer, nn.Linear) else None)
    x = torch.randn(9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = module(x)
        got = pipe(x).local_value()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wanted)
    for y in (got, wanted):
        y.float().square().mean().backward()
    assert set(seen) == {torch.bfloat16}
    for one, other in zip(pipe.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_checkpoint_themselves_train(mode: str, reentrant: bool) -> None:
    class Own(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=reentrant)

    module = nn.Sequential(*(layer for layer in mlp() if not isinstance(layer, nn.ReLU)))  # checkpoint refuses it
    pipe = Pipe(nn.Sequential(*(Own(layer) if n else layer for n, layer in enumerate(deepcopy(module)))), 3, mode)
    x = torch.randn(7, 4)
    for model, run in ((pipe, local(pipe)), (module, module)):
        run(x).square().mean().backward()
        assert model[0].weight.grad is not None
    for one, other in zip(pipe.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_an_error_of_a_layer_is_the_users_own_and_the_pipe_goes_on(mode: str) -> None:
    fail = [2]

    def may_fail(x: Tensor) -> Tensor:
        fail[0] -= 1
        if fail[0] == 0:
            raise ZeroDivisionError("of mine")
        return x * 1

    module = mlp()
    pipe = Pipe(nn.Sequential(*deepcopy(module), Fn(may_fail)), 4, mode)
    x = torch.randn(8, 4)
    with pytest.raises(ZeroDivisionError, match="of mine"):
        pipe(x)
    torch.testing.assert_close(step(pipe, local(pipe), x), step(module, module, x))


# Skip connections


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x * 2)
        return x + 1


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x * skip


class Spy(nn.Linear):
    """Keeps the inputs that a layer between gets."""

    seen: list[tuple[Any, ...]]

    def forward(self, *values: Any) -> Tensor:
        self.seen.append(values)
        return super().forward(*values)


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
@pytest.mark.parametrize("together", [True, False])
def test_skips_are_popped_in_the_same_partition_or_in_one_further_on(mode: str, together: bool) -> None:
    torch.manual_seed(0)
    outer, inner = Namespace(), Namespace()
    layers = [
        nn.Linear(4, 4),
        Stash().isolate(outer),
        nn.Linear(4, 4),
        Stash().isolate(inner),
        nn.Linear(4, 4),
        Pop().isolate(inner),
        nn.Dropout(0.0),
        Pop().isolate(outer),
    ]
    module = nn.Sequential(*layers)
    parts = [layers[:3], layers[3:]] if together else [[layer] for layer in layers]
    pipe = Pipe(deepcopy(nn.Sequential(*(nn.Sequential(*part) for part in parts))), 4, mode)
    for n_rows in BATCHES:
        x = torch.randn(n_rows, 4)
        torch.testing.assert_close(step(pipe, local(pipe), x), step(module, module, x))
        with torch.no_grad():
            torch.testing.assert_close(local(pipe)(x), module(x))
            torch.testing.assert_close(local(pipe.eval())(x), module(x))
        pipe.train()


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_a_skip_goes_straight_and_the_partitions_between_do_not_see_it(mode: str) -> None:
    spy = Spy(4, 4)
    spy.seen = []
    pipe = Pipe(nn.Sequential(Stash(), spy, WithDevice(Pop(), "cpu")), 2, mode)
    x = torch.randn(6, 4)
    y = pipe(x).local_value()
    torch.testing.assert_close(y, nn.functional.linear(x + 1, spy.weight, spy.bias) * 2 * x)
    assert [len(values) for values in spy.seen] == [1, 1]
    saved = [values[0] for values in spy.seen]
    assert torch.equal(torch.cat(saved), x + 1)


def test_a_skip_is_moved_to_the_device_where_it_is_popped() -> None:
    pipe = Pipe(nn.Sequential(Stash(), nn.Linear(4, 4), WithDevice(Pop(), "meta")), 2)
    assert pipe(torch.ones(4, 4)).local_value().device == META


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_none_may_be_skipped_and_a_skip_changed_in_place(mode: str) -> None:
    @skippable(stash=["none", "x"])
    class StashBoth(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            yield stash("none", None)
            yield stash("x", x * 3)
            return x

    @skippable(pop=["none", "x"])
    class PopBoth(nn.Module):
        def forward(self, y: Tensor) -> Generator[Any, Any, Any]:
            assert (yield pop("none")) is None
            x = yield pop("x")
            x.mul_(y)
            return x.exp()

    pipe = Pipe(nn.Sequential(StashBoth(), nn.Tanh(), PopBoth()), 3, mode)
    x = torch.randn(5, 2)
    wanted = step(pipe, lambda x: (3 * x * x.tanh()).exp(), x)
    torch.testing.assert_close(step(pipe, local(pipe), x), wanted)


def test_nothing_of_a_skip_is_held_after_a_call_that_failed() -> None:
    pipe = Pipe(nn.Sequential(Stash(), nn.Linear(5, 5), Pop()), 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pipe(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        Pop()(torch.ones(4))


# Inside DistributedDataParallel


def batches(n_ranks: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for n_rows in (8, 6, 2):
        yield torch.randn(n_ranks * n_rows, 4, generator=generator)


def in_ddp(**arguments: bool) -> dict[str, Tensor]:
    pipe = Pipe(mlp(Fn(lambda x: (x, 5)), Fn(lambda x, n: x)), 4, checkpoint="never")
    ddp = DistributedDataParallel(pipe, **arguments)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x in batches(dist.get_world_size()):
        y = ddp(x.chunk(dist.get_world_size())[dist.get_rank()]).local_value()
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(pipe.state_dict())


def told_so() -> list[str]:
    told = []
    for mode in ("always", "except_last"):
        pipe = Pipe(mlp(), 4, checkpoint=mode)
        inside: list[nn.Module] = [pipe, nn.Sequential(pipe, Fn(lambda ref: ref.local_value()))]
        for module in inside:
            try:
                DistributedDataParallel(module)(torch.ones(4, 4))
            except RuntimeError as error:
                told.append(str(error))
        with torch.no_grad():
            DistributedDataParallel(pipe)(torch.ones(4, 4))  # nothing runs again
        # One that DDP does not reduce may do as it likes inside a module that DDP wraps.
        other = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), Fn(lambda x: pipe(x).local_value())))  # noqa: B023
        other(torch.ones(4, 4)).sum().backward()
        assert pipe[0].weight.grad is not None
        pipe(torch.ones(4, 4)).local_value().sum().backward()  # nor is it noticed outside
    return told


def test_inside_ddp_it_equals_one_process_with_checkpoint_never() -> None:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x in batches(2):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # The latter two look for tensors in the handle.
    for arguments in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        for got in run_ranks(2, partial(in_ddp, **arguments)):
            for one, other in zip(got.values(), module.state_dict().values(), strict=True):
                torch.testing.assert_close(one, other)


def test_inside_ddp_any_other_checkpoint_mode_is_told_so() -> None:
    for told in run_ranks(2, told_so):
        assert len(told) == 4
        assert all('must have checkpoint="never", got "' in each for each in told)


def test_partitions_are_sequentials_with_several_arguments() -> None:
    layers = PipeSequential(Fn(lambda a, b: (a, b)), Fn(lambda a, b: a + b))
    assert layers(1, 2) == 3
    assert PipeSequential(Fn(lambda *values, **named: (values, named)))(1, n=2) == ((1,), {"n": 2})
    assert (PipeSequential()(1), PipeSequential()(1, 2)) == (1, (1, 2))

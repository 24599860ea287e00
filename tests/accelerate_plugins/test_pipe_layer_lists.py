"""A model in the way of Transformers trains through a pipe as in one process: masks, tied embeddings, dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate_plugins import Accelerator, PipePlugin
from lightning_distkit.core.pipeline.layer_list import LayerList, StandIn
from tests.accelerate_plugins.like_transformers import LanguageModel, batch
from tests.ranks import run_ranks

# The last one has as many rows as positions: what is of positions must not be taken for what is of rows.
BATCHES: list[dict[str, Any]] = [batch(0), batch(1), batch(2, n_rows=2), batch(3, n_rows=5), batch(4, n_rows=7)]

Result = tuple[list[float], list[Tensor], list[float], dict[str, Tensor]]


def trained(plugin: PipePlugin | None, **made: Any) -> Result:
    """Losses, logits, norms, and the state in the end."""
    accelerator: Any = Accelerator(plugin=plugin, cpu=True)
    net = LanguageModel(**made)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2, eps=1e-4))
    losses, logits, norms = [], [], []
    for each in BATCHES:
        outputs = model(**each)
        accelerator.backward(outputs.loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
        logits.append(outputs.logits.detach())
    return losses, logits, norms, accelerator.get_state_dict(model)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensors": ({"chunks": 3}, {}),
    "tuples, all recomputed": ({"chunks": 2, "checkpoint": "always"}, {"gives_tuple": True}),
    "chosen stages": ({"chunks": 4, "checkpoint": "never", "module": "model.layers"}, {"n_layers": 6}),
    "two stages a rank": ({"chunks": 3, "n_stages_per_rank": 2}, {"n_layers": 6}),
}


def every_case(is_piped: bool) -> dict[str, Result]:
    return {name: trained(PipePlugin(**given) if is_piped else None, **made) for name, (given, made) in CASES.items()}


@pytest.fixture(scope="module")
def wanted() -> dict[str, Result]:
    return run_ranks(1, every_case, False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("n_stages", [2, 3])
def test_it_trains_as_in_one_process(n_stages: int, wanted: dict[str, Result]) -> None:
    for rank, results in enumerate(run_ranks(n_stages, every_case, True)):
        for name, got in results.items():
            for ours, plain in zip(got[:3], wanted[name][:3], strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
            if rank == 0:
                torch.testing.assert_close(got[3], wanted[name][3], rtol=1e-5, atol=1e-5)
                assert list(got[3]) == list(LanguageModel(**CASES[name][1]).state_dict())
                assert got[3]["head.weight"] is got[3]["model.embed.weight"]
            else:
                assert got[3] == {}


def with_dropout() -> tuple[list[float], bool]:
    """All stages see the same output, and no two rows have one mask."""
    accelerator = Accelerator(plugin=PipePlugin(chunks=2), cpu=True)
    torch.manual_seed(dist.get_rank())  # the ranks' own numbers differ
    model = accelerator.prepare(LanguageModel(dropout=0.5))
    rows = {name: value[:1].repeat(2, 1) for name, value in batch(0).items()}
    outputs = model(**rows)
    return outputs.logits.sum().item(), bool((outputs.logits[0] != outputs.logits[1]).any())


def test_dropout_differs_between_micro_batches_and_not_between_ranks() -> None:
    first, second = run_ranks(2, with_dropout)
    assert first == second
    assert first[1]


class Biased(nn.Module):
    """As MPT's layers: attention with a bias of each head, (n_heads, 1, length), or a mask of each row."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        scores = (x @ x.mT)[:, None] + bias  # (n_rows, n_heads, time, time)
        return x + (scores.softmax(-1) @ x[:, None]).mean(1)


class OfHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Biased() for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


def biased() -> dict[str, tuple[Tensor, Tensor]]:
    """What a pipe gives and the layers themselves, where what is of heads looks like rows."""
    accelerator = Accelerator(plugin=PipePlugin(chunks=2), cpu=True)
    random = torch.Generator().manual_seed(0)
    results = {}
    for name, time, shape in (
        ("as many heads as rows", 6, (4, 1, 6)),
        ("of one position", 1, (4, 1, 1)),
        ("fewer heads", 6, (2, 1, 6)),
        ("a mask of each row", 6, (4, 1, 6, 6)),
    ):
        x, bias = torch.randn(4, time, 8, generator=random), 9 * torch.randn(shape, generator=random)
        wanted = OfHeads()(x, bias)
        results[name] = wanted, accelerator.prepare(OfHeads())(x, bias)
    return results


def test_what_is_of_heads_is_not_taken_for_rows() -> None:
    for results in run_ranks(2, biased):
        for name, (wanted, got) in results.items():
            torch.testing.assert_close(got, wanted, msg=lambda said, name=name: f"{name}: {said}")


def test_a_forward_that_the_object_had_before_comes_back() -> None:
    model = Odd(between)
    wrapped = model.layers[1].forward = lambda x: 2 * x
    layers = LayerList(model, "layers")
    assert model.layers[1].forward is not wrapped
    layers.undo()
    assert model.layers[1].forward is wrapped
    assert not any("forward" in vars(model.layers[n]) for n in (0, 2))


class Odd(nn.Module):
    """Does something with hidden states that a pipe cannot do."""

    def __init__(self, forward: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x)


def between(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x).relu()
    return x


def left_out(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[2](layers[0](x))  # type: ignore[no-any-return]


def not_the_last(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[1](layers[0](x)) + 1  # type: ignore[no-any-return]


def on_the_input(layers: nn.ModuleList, x: Tensor) -> Tensor:
    layers[0](x)
    return layers[1](x)  # type: ignore[no-any-return]


class DynamicCache:
    """As that of Transformers is called."""


def with_a_cache(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[0](x, past_key_values=DynamicCache())  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[nn.ModuleList, Tensor], Tensor], str]] = {
    "between": (between, "relu was called with what layer 0 of layers has returned"),
    "left out": (left_out, "must be called each once, in order, the next with what the last has returned"),
    "not the last": (not_the_last, "was called with what layer 1 of layers has returned"),
    "on the input": (on_the_input, "layer 1 was called after 1 others, with Tensor"),
    "a cache": (with_a_cache, "layer 0 got past_key_values of type DynamicCache; a pipe cannot fill a cache"),
}


def refusals() -> dict[str, str]:
    accelerator = Accelerator(plugin=PipePlugin(), cpu=True)
    said = {}
    for name, (forward, _) in REFUSED.items():
        model = accelerator.prepare(Odd(forward))
        try:
            model(torch.ones(2, 4))
            said[name] = "nothing"
        except (RuntimeError, TypeError) as error:
            said[name] = str(error)
    return said


def test_what_a_pipe_cannot_do_between_layers_is_refused_on_every_rank_with_the_reason() -> None:
    for said in run_ranks(2, refusals):
        for name, (_, message) in REFUSED.items():
            assert message in said[name], name


def test_a_stand_in_knows_its_shape_and_can_be_the_first_of_a_tuple() -> None:
    stand_in = StandIn.of(torch.ones(2, 3), "layer 0")
    assert stand_in[0] is stand_in
    assert (stand_in.shape, stand_in.size(1), stand_in.dim(), len(stand_in)) == ((2, 3), 3, 2, 2)
    assert stand_in.dtype is torch.float32
    assert stand_in.device == torch.device("cpu")
    for compute in (lambda: stand_in + 1, lambda: stand_in[1], lambda: stand_in.T, lambda: torch.cat([stand_in])):
        with pytest.raises(RuntimeError, match="what layer 0 has returned; hidden states of single layers cannot be"):
            compute()

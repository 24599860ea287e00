"""Each rank holds its own layers alone; whole state dicts have ordinary keys, both ways; what is tied stays tied."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_distkit.core.pipeline.dist import DistributedPipe
from tests.core.pipeline.models import (
    SCHEDULES_AND_STAGES,
    all_equal,
    assert_same_gradients,
    assert_same_state,
    even,
    mlp,
    sequence_model,
)
from tests.ranks import run_ranks


def state_dicts() -> None:
    for schedule, n in SCHEDULES_AND_STAGES:
        n_stages = dist.get_world_size() * n
        module = sequence_model()
        whole = copy.deepcopy(module)
        pipe = DistributedPipe(
            module, 2, balance=even(10, n_stages), schedule=schedule, n_stages_per_rank=n, timeout=20
        )
        for key, value in pipe.state_dict().items():
            assert torch.equal(value, whole.state_dict()[key])
        on_zero = pipe.whole_state_dict()
        assert (on_zero is None) == (pipe.rank != 0)
        state = pipe.whole_state_dict(all_ranks=True)
        assert state is not None
        assert list(state) == list(whole.state_dict())
        sequence_model(seed=1).load_state_dict(state, strict=True)
        for key, value in whole.state_dict().items():
            assert torch.equal(state[key], value)
            assert on_zero is None or torch.equal(on_zero[key], value)
        other = sequence_model(seed=2).state_dict()
        for given in (other, other if pipe.rank == 0 else None):
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.zero_()
            pipe.load_whole_state_dict(given)
            assert_same_state(pipe, sequence_model(seed=2))
        for bad in ({**other, "new": torch.ones(1)}, {key: other[key] for key in list(other)[1:]}):
            for given in (bad, bad if pipe.rank == 0 else None):
                with pytest.raises(RuntimeError, match=r"missing: .*unexpected: "):
                    pipe.load_whole_state_dict(given)
                pipe.load_whole_state_dict(given, strict=False)
        with pytest.raises(ValueError, match="rank 0 must have a state dict"):
            pipe.load_whole_state_dict(None)
        gathered = pipe.gather({"rank": pipe.rank, "tensor": torch.full((2,), pipe.rank)})
        if pipe.rank == 0:
            assert gathered is not None
            assert [each["rank"] for each in gathered] == list(range(pipe.n_ranks))
            assert [float(each["tensor"][0]) for each in gathered] == list(range(pipe.n_ranks))
        else:
            assert gathered is None


def test_the_whole_state_dict_has_ordinary_keys_and_loads_strictly_in_one_process_and_back() -> None:
    run_ranks(2, state_dicts)


def own_layers_alone() -> tuple[list[str], int]:
    module = mlp(4, 8, 8, 8, 4)
    refs = {name: weakref.ref(layer) for name, layer in module.named_children()}
    pipe = DistributedPipe(module, balance=[3, 2, 2])
    del module
    gc.collect()
    alive = [name for name, ref in refs.items() if ref() is not None]
    assert alive == [name for name, _ in pipe.named_children()]
    assert len(list(pipe.parameters())) == len(list(pipe.state_dict()))
    pipe.train(False)
    assert not any(layer.training for layer in pipe.children())
    return alive, sum(pipe.balance)


def test_a_rank_keeps_its_own_layers_and_the_others_are_freed() -> None:
    assert run_ranks(3, own_layers_alone) == [(["0", "1", "2"], 7), (["3", "4"], 7), (["5", "6"], 7)]


def on_meta() -> list[str]:
    torch.manual_seed(5)
    whole = sequence_model_as_is()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with torch.device("meta"):
        module = sequence_model_as_is()
    layers = dict(module.named_children())
    pipe = DistributedPipe(module, 2, balance=[5, 5])
    assert torch.equal(torch.get_rng_state(), after)  # the same on every rank
    assert_same_state(pipe, whole)
    assert not any(each.is_meta for each in (*pipe.parameters(), *pipe.buffers()))
    own = [name for name, _ in pipe.named_children()]
    for name, layer in layers.items():
        if name not in own:
            assert all(each.is_meta for each in layer.parameters())  # never had memory
    x = torch.randint(11, (4, 5))
    pipe(x).square().mean().backward()
    return own


def sequence_model_as_is() -> nn.Sequential:
    """`sequence_model` without its seed, and the device that is the default one."""
    state = torch.get_rng_state()
    seed, torch.manual_seed = torch.manual_seed, lambda seed: None  # type: ignore[assignment]
    try:
        torch.set_rng_state(state)
        return sequence_model()
    finally:
        torch.manual_seed = seed  # type: ignore[assignment]


def test_a_module_on_meta_is_made_layer_by_layer_with_the_values_of_the_plain_one() -> None:
    first, second = run_ranks(2, on_meta)
    assert (first, second) == ([str(n) for n in range(5)], [str(n) for n in range(5, 10)])


class Tied(nn.Module):
    """Logits by a weight that is the embedding's, too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def tied_model() -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 6)
    middle = nn.Linear(6, 6, bias=False)
    return nn.Sequential(embedding, middle, nn.Tanh(), Tied(middle.weight), nn.Linear(6, 6), Tied(embedding.weight))


def tied(n_ranks: int) -> list[list[float]]:
    """Trained with accumulation: the copies stay equal to the last bit, and the gradients are one process's."""
    result = []
    for schedule, n in SCHEDULES_AND_STAGES:
        if n_ranks * n > 6:
            continue
        for mode in ("never", "always"):
            module = tied_model()
            if dist.get_rank() > 0:  # made with another seed: the first owner's values count
                module[5].weight.data.zero_()
            whole = tied_model()
            pipe = DistributedPipe(
                module, 3, mode, balance=even(6, n_ranks * n), schedule=schedule, n_stages_per_rank=n, timeout=20
            )
            optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipe, whole)]
            x = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(0))
            for step in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for micro_step in range(2):
                    if (step + micro_step) % 2:
                        (pipe.loss(x, loss=lambda out: out.square().mean()) / 2).backward()
                    else:
                        (pipe(x).square().mean() / 2).backward()
                    (whole(x).square().mean() / 2).backward()
                assert_same_gradients(pipe, whole)
                norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)  # what is tied counts once
                torch.testing.assert_close(pipe.clip_grad_norm_(0.01).float(), norm)
                assert_same_gradients(pipe, whole)
                for optimizer in optimizers:
                    optimizer.step()
            assert_same_state(pipe, whole)
            state = pipe.whole_state_dict(all_ranks=True)
            assert state is not None
            assert list(state) == list(whole.state_dict())
            own = {**dict(pipe.named_parameters(remove_duplicate=False))}
            result.append([own[key].detach().double().sum().item() for key in ("0.weight", "5.weight") if key in own])
    return result


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_parameters_that_are_tied_across_stages_stay_equal_and_get_the_sum_of_their_gradients(n_ranks: int) -> None:
    ranks = run_ranks(n_ranks, tied, n_ranks)
    for each in zip(*ranks, strict=True):
        assert all_equal([value for values in each for value in values])


def frozen_tied() -> None:
    module = tied_model()
    module[0].weight.requires_grad_(False)
    pipe = DistributedPipe(module, 3, balance=[3, 3])
    pipe(torch.randint(9, (5, 4))).square().mean().backward()
    whole = tied_model()
    whole[0].weight.requires_grad_(False)
    assert (pipe.get_parameter("0.weight" if pipe.is_first else "5.weight")).grad is None


def test_tied_parameters_that_are_frozen_get_no_gradient() -> None:
    run_ranks(2, frozen_tied)


def resumed(n_stages: int, state: Any) -> Any:
    """Train a step from a whole state dict; the whole one after it."""
    pipe = DistributedPipe(mlp(4, 8, 8, 8, 4, seed=9), 2, balance=even(7, n_stages))
    pipe.load_whole_state_dict(state)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    torch.manual_seed(0)
    pipe(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    return pipe.whole_state_dict()


def test_a_checkpoint_goes_on_with_another_number_of_stages() -> None:
    state = mlp(4, 8, 8, 8, 4).state_dict()
    of_two = run_ranks(2, resumed, 2, state)[0]
    of_three = run_ranks(3, resumed, 3, state)[0]
    for key, value in of_two.items():
        torch.testing.assert_close(of_three[key], value)

"""Small models for the pipe over processes, and one process that does what it should do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_distkit.core.pipeline.microbatch import row_counts

VOCABULARY, WIDTH = 11, 8
SCHEDULES_AND_STAGES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("gpipe", 2)]


class Norm(nn.Module):
    """BatchNorm of (batch, time, WIDTH), for each of the WIDTH channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Mix(nn.Module):
    """Attention-like: each row looks at its own time steps, so sequences may have any length."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.qk(x).transpose(1, 2)).softmax(-1) @ self.v(x)


def sequence_model(seed: int = 0) -> nn.Sequential:
    """Tokens (batch, time) to logits (batch, time, VOCABULARY); ten layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        Norm(),
        Mix(),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        Norm(),
        nn.Tanh(),
        Mix(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    )


def tokens(rows: int, time: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randint(VOCABULARY, (rows, time), generator=random),
        torch.randint(VOCABULARY, (rows, time), generator=random),
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OneProcess:
    """What a pipe must equal: the whole module, micro-batch after micro-batch, and one loss of the whole output.

    Args:
        deferred_batch_norm: the running statistics are computed anew here, from all inputs of a BatchNorm together.
    """

    def __init__(self, module: nn.Sequential, chunks: int, deferred_batch_norm: bool = False) -> None:
        self.module = copy.deepcopy(module)
        self.chunks = chunks
        self.deferred = deferred_batch_norm

    def __call__(self, x: Tensor) -> Tensor:
        norms = [each for each in self.module.modules() if isinstance(each, nn.BatchNorm1d)]
        seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
        before = {norm: [buffer.clone() for buffer in norm.buffers()] for norm in norms}
        hooks = [norm.register_forward_pre_hook(lambda n, args: seen[n].append(args[0].detach())) for norm in norms]
        output = torch.cat([self.module(piece) for piece in x.split(row_counts(len(x), self.chunks))])
        for hook in hooks:
            hook.remove()
        if self.deferred and self.module.training:
            for norm in norms:
                whole = torch.cat([each.transpose(1, 2).reshape(-1, WIDTH) for each in seen[norm]])
                mean, variance, count = before[norm]
                # New tensors: autograd holds the ones that the forward has used.
                norm.running_mean = mean.lerp(whole.mean(0), norm.momentum)
                norm.running_var = variance.lerp(whole.var(0), norm.momentum)
                norm.num_batches_tracked = count + 1
        return output


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_same_gradients(pipe: nn.Module, whole: nn.Module, **tolerance: Any) -> None:
    """Those of the pipe's own layers are those of the whole module's."""
    expected = dict(whole.named_parameters(remove_duplicate=False))  # here a tied one may go by its second name
    for name, parameter in pipe.named_parameters():
        want = expected[name].grad
        if want is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, want, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def assert_same_state(pipe: nn.Module, whole: nn.Module, **tolerance: Any) -> None:
    expected = whole.state_dict()
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def mlp(*widths: int, seed: int = 0, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """A linear layer and an activation for each two widths; the last without one."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


def even(n_layers: int, n_stages: int) -> list[int]:
    """Layers of each stage, as equal as can be."""
    return row_counts(n_layers, n_stages)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)

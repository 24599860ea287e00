"""Gradients on their way to the mean: hooks for ``DistributedDataParallel.register_comm_hook``.

`HOOKS` names them all. Each is a function ``hook(state, bucket) -> Future[Tensor]``; whoever adds one writes a file and
a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_distkit.core.compression.acp_sgd import acp_sgd_hook
from lightning_distkit.core.compression.allreduce import allreduce_hook
from lightning_distkit.core.compression.batched_powersgd import batched_powerSGD_hook
from lightning_distkit.core.compression.cast import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from lightning_distkit.core.compression.error_memory import gathered, redistributed
from lightning_distkit.core.compression.hook import CommState, Hook, attach, comm_hook, ledger_of
from lightning_distkit.core.compression.noop import noop_hook
from lightning_distkit.core.compression.powersgd import powerSGD_hook
from lightning_distkit.core.compression.powersgd_state import PowerSGDState

__all__ = [
    "HOOKS",
    "CommState",
    "HookEntry",
    "PowerSGDState",
    "acp_sgd_hook",
    "allreduce_hook",
    "attach",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "comm_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "gathered",
    "ledger_of",
    "noop_hook",
    "powerSGD_hook",
    "redistributed",
]


@dataclass(frozen=True)
class HookEntry:
    """A hook and what makes the state that it is registered with: ``make_state(process_group, **arguments)``."""

    hook: Hook
    make_state: Callable[..., CommState]

    def __call__(self, process_group: dist.ProcessGroup | None = None, **arguments: Any) -> tuple[CommState, Hook]:
        """A new state, and the hook: the two arguments of ``register_comm_hook``."""
        return self.make_state(process_group, **arguments), self.hook


HOOKS = {
    "allreduce": HookEntry(allreduce_hook, CommState),
    "noop": HookEntry(noop_hook, CommState),
    "fp16": HookEntry(fp16_compress_hook, CommState),
    "bf16": HookEntry(bf16_compress_hook, CommState),
    "powersgd": HookEntry(powerSGD_hook, PowerSGDState),
    "batched_powersgd": HookEntry(batched_powerSGD_hook, PowerSGDState),
    "acp_sgd": HookEntry(acp_sgd_hook, PowerSGDState),
}

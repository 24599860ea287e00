"""Gradients travel in 16 bits and are cast back on arrival; around any hook, or around the plain mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from lightning_distkit.core.collectives import Steps
from lightning_distkit.core.compression.hook import CommState, Hook, _as_ddp_wants_it, checked_hook, comm_hook


def _mean_in(dtype: torch.dtype, state: CommState, bucket: GradBucket) -> Steps:
    buffer = bucket.buffer()
    # Divide first, so that the sum of all ranks' halves does not overflow.
    half = buffer.to(dtype, copy=True).div_(state.group.world_size)
    if state.measurement is not None:
        left_out = buffer - half.to(buffer.dtype) * state.group.world_size
        state.measurement.add(bucket.parameters(), half.nbytes, buffer)
        state.measurement.add_left_out(bucket.parameters(), left_out)
    yield half
    buffer.copy_(half)
    return buffer


@comm_hook
def fp16_compress_hook(state: CommState, bucket: GradBucket) -> Steps:
    """Average the gradients in ``torch.float16``.

    ``register_comm_hook(process_group or None, fp16_compress_hook)``
    """
    return _mean_in(torch.float16, state, bucket)


@comm_hook
def bf16_compress_hook(state: CommState, bucket: GradBucket) -> Steps:
    """Average the gradients in ``torch.bfloat16``.

    ``register_comm_hook(process_group or None, bf16_compress_hook)``
    """
    return _mean_in(torch.bfloat16, state, bucket)


# By that plain name DDP refuses a hook wherever there is no CUDA, but gloo sums bfloat16 on CPU as well.
bf16_compress_hook.__name__ = "bf16_compress"


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Cast the bucket to ``torch.float16`` before ``hook`` gets it, and its result back."""
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Cast the bucket to ``torch.bfloat16`` before ``hook`` gets it, and its result back."""
    return _wrapped(hook, torch.bfloat16)


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    hook = checked_hook(hook)

    def cast_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype, copy=True))
        return hook(state, bucket).then(lambda done: buffer.copy_(done.value()))

    return _as_ddp_wants_it(cast_hook)

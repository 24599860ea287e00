"""What a rank must hold to train under DDP and under each ZeRO stage, counted from shapes alone.

Source: Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054, section 3 for the model states; what travels is
counted as it is held here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_distkit.core.zero.in_flight import bucket_nbytes, most_in_flight
from lightning_distkit.core.zero.kept import name_of, state_numel
from lightning_distkit.core.zero.outline import PRECISIONS, nbytes_of, of_module, of_numel, share
from lightning_distkit.core.zero.policy import Policy
from lightning_distkit.core.zero.unsharded import most_unsharded

STAGES = (0, 1, 2, 3)  # 0 is plain DDP
WORLD_SIZES = tuple(2**n for n in range(11))  # that `what_fits` tries
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank, at the peak of a step; without activations and what the optimizer needs while it steps."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    master_weights: int
    reduced_gradients: int  # stage 1: this rank's shard of the mean, beside the whole gradients
    in_flight: int  # DDP's buckets; stages 1 and 2: memory for what travels, and gradients that are not yet shards
    unsharded: int  # stage 3: what is whole at the peak, less the gradient shards that are not there yet
    autocast: int  # copies of weights in half precision that wait for the backward, beyond the gradients that follow

    @property
    def model_state(self) -> int:
        """What the paper counts."""
        return self.parameters + self.gradients + self.optimizer_state + self.master_weights

    @property
    def total(self) -> int:
        others = self.buffers + self.reduced_gradients + self.in_flight + self.unsharded + self.autocast
        return self.model_state + others


def estimate_memory(
    module_or_numel: nn.Module | float,
    stage: int,
    world_size: int,
    optimizer: str | type[Optimizer] | Optimizer = "adam",
    precision: str = "32-true",
    *,
    master_weights: bool = False,
    bucket_cap_mb: float = 25.0,
    gradient_as_bucket_view: bool = False,
    n_blocks: int = 32,
    policy: Policy = "auto",
) -> MemoryEstimate:
    """What one rank holds at the peak of a step.

    Activations are not counted: they depend on the batch. Gradients are taken to be set to None before each backward,
    as ``zero_grad`` does. On one rank nothing is sharded and nothing travels, whatever the stage.

    Args:
        module_or_numel: a module, on the meta device or any other: shapes and dtypes are its own, a tied parameter
            counts once, a frozen one has neither gradient nor state. Or a number of parameters, all trained, none
            larger than a bucket.
        stage: 0 for plain DDP, or ZeRO's 1 (optimizer state sharded), 2 (also gradients), 3 (also parameters).
        world_size: the ranks that share.
        optimizer: one of `kept.OPTIMIZERS`, or an optimizer's class, or an instance, whose options then count.
        precision: one of `PRECISIONS`. With "bf16-mixed" and "16-mixed" parameters, gradients and state stay as they
            are, float32; autocast adds copies of the weights. The "-true" ones cast all, "32-true" nothing.
        master_weights: the optimizer keeps and updates a float32 copy of half-precision parameters, its state in
            float32 too, both sharded alike.
        bucket_cap_mb: what travels together in stages 1 and 2, in 2**20 bytes; a larger parameter is its own bucket.
        gradient_as_bucket_view: of DDP: the gradients are its buckets, not a copy of them.
        n_blocks: of a number of parameters only: into how many equal blocks stage 3 divides it.
        policy: of a module only: which are stage 3's blocks, as in `shard_parameters`.

    Raises:
        ValueError: an argument is none of these, or the parameters have no shapes yet.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be 0 (DDP), 1, 2 or 3, got {stage!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be more than 0, got {bucket_cap_mb}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if isinstance(module_or_numel, nn.Module):
        model = of_module(module_or_numel, precision, policy)
    else:
        model = of_numel(module_or_numel, precision, n_blocks)
        if name_of(optimizer) == "adafactor":
            raise ValueError("adafactor's state depends on shapes, which a number has not; give a module")
    trained = [weight for weight in model.weights if weight.trained]
    halves = [weight for weight in trained if weight.dtype in _HALF] if master_weights else []
    if master_weights and not halves:
        raise ValueError(
            "master_weights=True needs trained parameters in half precision, and there are none; "
            'use precision="bf16-true" or "16-true", or leave master_weights out'
        )
    parameters, gradients = nbytes_of(model.weights), nbytes_of(trained)
    master = sum(4 * weight.numel for weight in halves)
    state = sum(
        state_numel(optimizer, weight.shape) * (4 if master_weights and weight.dtype in _HALF else weight.itemsize)
        for weight in trained
    )
    casts = sum(weight.cast_nbytes for weight in model.weights)
    reduced = in_flight = unsharded = 0
    if world_size == 1:
        pass
    elif stage == 0:
        in_flight = 0 if gradient_as_bucket_view else gradients
    else:
        state, master = share(state, world_size), share(master, world_size)
        whole = isinstance(module_or_numel, nn.Module)
        buckets = list(bucket_nbytes(trained, int(bucket_cap_mb * 2**20), may_cut=not whole))
        if stage == 1:
            reduced = share(gradients, world_size)
            in_flight = most_in_flight(buckets, world_size, frees_whole=False)
        elif stage == 2:
            gradients = share(gradients, world_size)
            in_flight = most_in_flight(buckets, world_size, frees_whole=True)
        else:
            unsharded = most_unsharded(model, world_size, with_casts=False)
            casts_too = most_unsharded(model, world_size, with_casts=True) - unsharded
            parameters, gradients = share(parameters, world_size), share(gradients, world_size)
    # A backward frees the copies one by one as gradients come, so there is first the one and then the other.
    autocast = casts_too if stage == 3 and world_size > 1 else max(0, casts - gradients - reduced)
    return MemoryEstimate(
        parameters=parameters,
        buffers=model.buffers,
        gradients=gradients,
        optimizer_state=state,
        master_weights=master,
        reduced_gradients=reduced,
        in_flight=in_flight,
        unsharded=unsharded,
        autocast=autocast,
    )


def what_fits(
    nbytes: float,
    module_or_numel: nn.Module | float,
    optimizer: str | type[Optimizer] | Optimizer = "adam",
    precision: str = "32-true",
    *,
    master_weights: bool = False,
    bucket_cap_mb: float = 25.0,
    gradient_as_bucket_view: bool = False,
    n_blocks: int = 32,
    policy: Policy = "auto",
) -> dict[int, int | None]:
    """For each stage the smallest of `WORLD_SIZES` whose total is at most `nbytes` a rank, None if there is none.

    The other arguments are those of `estimate_memory`.
    """

    def total(stage: int, world_size: int) -> int:
        return estimate_memory(
            module_or_numel,
            stage,
            world_size,
            optimizer,
            precision,
            master_weights=master_weights,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            n_blocks=n_blocks,
            policy=policy,
        ).total

    return {stage: next((each for each in WORLD_SIZES if total(stage, each) <= nbytes), None) for stage in STAGES}

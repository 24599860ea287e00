"""What stage 3 holds of parameters and gradients that are whole for a moment, as torch's ``fully_shard`` does it."""

from __future__ import annotations

from itertools import accumulate

from lightning_distkit.core.zero.outline import Outline, nbytes_of, share, trained_nbytes_of


def most_unsharded(outline: Outline, world_size: int, *, with_casts: bool) -> int:
    """The most bytes that a step under ``fully_shard`` holds beside its shards, counting all of these as there.

    In the forward a block is there twice, gathered and copied out into its parameters, while the one before still is
    as it was gathered. In the backward there are its parameters, its gradients, the next block as it was gathered
    ahead, and the input of the reduce-scatter before. The root's parameters stay from the first to the last moment.
    What is gathered goes into memory that is kept for the next (`Buffers`), as much as the root or the largest block.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``wait_for_unshard`` and ``post_backward``.
    """
    root = nbytes_of([*outline.before, *outline.after])
    root_gradients = trained_nbytes_of([*outline.before, *outline.after])
    late_gradients = trained_nbytes_of(outline.after)
    sizes = [nbytes_of(block) for block in outline.blocks]
    gradients = [trained_nbytes_of(block) for block in outline.blocks]
    casts = [sum(weight.cast_nbytes for weight in block) if with_casts else 0 for block in outline.blocks]
    kept = max([root, *sizes])
    no_gradients = share(root_gradients + sum(gradients), world_size)
    moments = [2 * root - no_gradients]
    moments.append(root + root_gradients + (gradients[0] if sizes else kept) - share(root_gradients, world_size))
    for n, (waiting, casts_left) in enumerate(zip(accumulate(gradients), accumulate(casts), strict=True)):
        before = sizes[n - 1] if n > 0 else root
        moments.append(root + before + 2 * sizes[n] + casts_left - no_gradients)
        leaving = gradients[n + 1] if n + 1 < len(sizes) else 0
        block = sizes[n] + max(sizes[n], kept + gradients[n])
        not_yet = share(root_gradients + waiting, world_size)
        moments.append(root + late_gradients + block + leaving + casts_left - not_yet)
    return max(0, *moments)

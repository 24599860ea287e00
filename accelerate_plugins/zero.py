"""The settings of ZeRO: the stage, and the arguments of `ZeroOptimizer` and `shard_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from accelerate_plugins.plugin import Plugin

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# Loading core.zero takes as long as loading torch does, so it waits until an Accelerator is made.
_DTYPES = Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(kw_only=True)
class ZeroPlugin(Plugin):
    """Each rank keeps its shard of the optimizer's state (stage 1), of the gradients (2), of the parameters (3).

    None leaves a setting to the core object.

    Args:
        stage: 1, 2 or 3.
        bucket_cap_mb: stages 1 and 2: MiB that travel together; see `lightning_distkit.core.zero.ZeroOptimizer`.
        elementwise: whether the optimizer may step slices of parameters; by default as its class says.
        policy: stage 3: which modules are gathered as one block: "auto", the import path of a class, or a number of
            elements; see `find_blocks`.
        mixed_precision: stage 3: FSDP2's ``MixedPrecisionPolicy``, or a mapping of its arguments, dtypes by name;
            Accelerate's own ``mixed_precision`` works without it.
        reshard_after_forward: stage 3: as in ``fully_shard``.

    Raises:
        ValueError: another stage, or an argument that belongs to another.
    """

    stage: Literal[1, 2, 3] = 1
    bucket_cap_mb: float | None = None
    elementwise: bool | None = None
    policy: str | int | type[nn.Module] | Any | None = "auto"
    mixed_precision: MixedPrecisionPolicy | Mapping[str, _DTYPES | bool] | None = None
    reshard_after_forward: bool | int | None = None

    alone = "it shards by itself"

    @property
    def methods(self) -> str:  # type: ignore[override]
        name = "ShardedParametersMethods" if self.stage == 3 else "ZeroMethods"
        return f"accelerate_plugins.zero_methods:{name}"

    def __post_init__(self) -> None:
        from lightning_distkit.core.zero.arguments import check_stage

        check_stage(
            self.stage,
            bucket_cap_mb=self.bucket_cap_mb,
            policy=self.policy,
            mixed_precision=self.mixed_precision,
            reshard_after_forward=self.reshard_after_forward,
            without="Accelerator() without a plugin",
        )
        if isinstance(self.mixed_precision, Mapping):
            self.mixed_precision = _policy(self.mixed_precision)


def _policy(arguments: Mapping[str, Any]) -> MixedPrecisionPolicy:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    known = [each.name for each in fields(MixedPrecisionPolicy)]
    for name, value in arguments.items():
        if name not in known:
            raise ValueError(f"mixed_precision must have keys of {', '.join(known)}, got {name!r}")
        if name.endswith("_dtype") and not isinstance(value, torch.dtype) and value not in get_args(_DTYPES):
            raise ValueError(f"mixed_precision's {name} must be one of {', '.join(get_args(_DTYPES))}, got {value!r}")
    return MixedPrecisionPolicy(
        **{
            name: getattr(torch, _SHORT.get(value, value)) if isinstance(value, str) else value
            for name, value in arguments.items()
        }
    )

"""``Accelerator(plugin=...)``: Hugging Face's Accelerator, carrying out a plugin."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import accelerate
from accelerate.utils import DistributedType

from accelerate_plugins import config, launch
from accelerate_plugins.plugin import Plugin

_OF_OTHERS = {  # keyword of accelerate.Accelerator -> what it stands for
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "a ParallelismConfig",
}
_TYPES_OF_OTHERS = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.FSDP: "FSDP",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "a TPU",
}


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with a plugin.

    Args:
        plugin: `PipePlugin`, `PowerSGDPlugin` or `ZeroPlugin`; by default what the environment says (see
            `accelerate_plugins.config`), or none.
        args, kwargs: all that `accelerate.Accelerator` takes.

    Raises:
        TypeError: ``plugin`` is none.
        ValueError: another distributed engine is asked for as well, or the environment has another plugin.
        RuntimeError: several processes were started, but this one would train alone.
    """

    def __init__(self, *args: Any, plugin: Plugin | None = None, **kwargs: Any) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise TypeError(f"plugin must be a PipePlugin, a PowerSGDPlugin or a ZeroPlugin, got {plugin!r}")
        other = config.from_environment()
        if plugin is not None and other is not None and plugin != other:
            raise ValueError(f"two plugins are asked for, {plugin} here and {other} by {config.CONFIG}; give one")
        construct(self, super().__init__, plugin or other, args, kwargs)


def construct(
    accelerator: accelerate.Accelerator,
    init: Callable[..., None],
    plugin: Plugin | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Run ``init(*args, **kwargs)`` and have ``accelerator`` carry out ``plugin`` from then on.

    The plugin's methods are put before those of the object's class, by a subclass of both. So it does not matter which
    subclass of Accelerate's the user has made, nor whence he has imported it.
    """
    if plugin is None:
        init(*args, **kwargs)
        return
    for name, what in _OF_OTHERS.items():
        if kwargs.get(name) is not None:
            refuse(plugin, what, f"{name}=")
    refuse_by_environment(plugin)
    launch.use_cpu_if_there_is_nothing_else()
    init(*args, **kwargs)
    kind = accelerator.distributed_type
    if kind in _TYPES_OF_OTHERS:
        refuse(plugin, _TYPES_OF_OTHERS[kind], f"distributed_type {kind}")
    launch.check_that_the_ranks_are_together(accelerator.num_processes)
    cls = type(accelerator)
    methods = plugin.methods_class()
    accelerator.__class__ = type(cls.__name__, (methods, cls), {"__module__": cls.__module__})
    assert isinstance(accelerator, methods)
    accelerator.adopt(plugin)


def refuse_by_environment(plugin: Plugin) -> None:
    """Raise a ValueError if the launcher was told to use another engine."""
    for name, what in launch.OTHER_ENGINES.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            refuse(plugin, what, f"{name}={os.environ[name]}, set by the launcher or its config file")
    if launch.is_on_tpu():
        refuse(plugin, "a TPU", "PJRT_DEVICE or torch_xla")


def refuse(plugin: Plugin, what: str, how: str) -> None:
    raise ValueError(
        f"{config.where('plugin')}: {type(plugin).__name__} cannot be had beside {what} ({how}), as {plugin.alone}; "
        "take one of them out"
    )

"""On which device each layer of a module is, and so which layers are one partition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_distkit.core.pipeline.sequential import PipeSequential


class WithDevice(nn.Module):
    """A layer for `Pipe` that runs on ``device``, to which Pipe moves it. For layers without parameters.

    Args:
        module: the layer; Pipe takes it out of this wrapper.
        device: where it runs.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | int) -> None:
        super().__init__()
        self._module = module
        self._device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The layer itself."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device


def partitioned(module: nn.Sequential) -> tuple[nn.ModuleList, list[torch.device]]:
    partitions: list[list[nn.Module]] = []
    devices: list[torch.device] = []
    for name, child in module.named_children():
        if isinstance(child, WithDevice):
            device = torch.empty(0, device=child.device).device  # "cuda" becomes "cuda:0"
            layer = child.module.to(device)
        else:
            device, layer = _device_of(name, child), child
        if not devices or devices[-1] != device or device.type == "cpu":
            partitions.append([])
            devices.append(device)
        partitions[-1] += _taken_apart(layer)
    return nn.ModuleList(PipeSequential(*layers) for layers in partitions), devices


def _taken_apart(layer: nn.Module) -> list[nn.Module]:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if not isinstance(layer, nn.Sequential) or type(layer).forward is not nn.Sequential.forward:
        return [layer]
    return [layer] if any(getattr(layer, name) for name in hooks) else list(layer)


def _device_of(name: str, layer: nn.Module) -> torch.device:
    devices = {param.device for param in layer.parameters()} or {buffer.device for buffer in layer.buffers()}
    if len(devices) > 1:
        raise ValueError(
            f"layer {name}, {type(layer).__name__}, should have all parameters on a single device, got "
            f"{', '.join(sorted(map(str, devices)))}; please use .to() to place the module on a single device"
        )
    return devices.pop() if devices else torch.device("cpu")


def refuse_shared(partitions: nn.ModuleList, devices: list[torch.device]) -> None:
    where: dict[Tensor, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for param in partition.parameters():
            if where.setdefault(param, device) != device:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not supported, got one of shape "
                    f"{tuple(param.shape)} on {where[param]} and {device}; keep layers that share one on one device"
                )

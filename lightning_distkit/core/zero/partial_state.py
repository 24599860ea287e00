"""A state dict of a part of a module, without the memory of the rest.

A parameter in a bucket is a view, and ``torch.save`` of a view writes all that it is a view of. Of a whole module that
is all of it once. Of a part, as ``model.head.state_dict()``, it would be the part's buckets: so there the values are
copies, which take no more memory than the part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_distkit.core.zero.bucket import Bucket
from lightning_distkit.core.zero.holders import modules_with

SLACK = 2**14  # bytes of a bucket, such as paddings, that may be written with what was asked for
_MARK = "_zero_bucket"  # on a storage, and so seen by whoever has a view of it, as long as there is one


def copy_parts(buckets: Collection[Bucket], living: Sequence[nn.Module]) -> None:
    """Let the state dicts of all modules that have parameters of ``buckets`` have copies where they are of a part."""
    for bucket in buckets:
        setattr(bucket.flat.untyped_storage(), _MARK, True)
    params = [param for bucket in buckets for param in bucket.params]
    for module in modules_with(params, living):
        if _copy_parts not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_copy_parts)


# A function of a module, as the modules are copied and pickled with it.
def _copy_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    if prefix:  # below that of which the state dict is
        return
    names: dict[int, list[str]] = {}  # by storage
    for name, value in state_dict.items():
        # Not the parameters themselves, which keep_vars=True gives.
        if type(value) is Tensor and hasattr(value.untyped_storage(), _MARK):
            names.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    for alike in names.values():
        views = {_place(state_dict[name]): state_dict[name] for name in alike}  # a tied one once
        whole: Tensor = next(iter(views.values()))
        if whole.untyped_storage().nbytes() - sum(view.nbytes for view in views.values()) > SLACK:
            copies = {place: view.clone() for place, view in views.items()}
            state_dict.update({name: copies[_place(state_dict[name])] for name in alike})


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()

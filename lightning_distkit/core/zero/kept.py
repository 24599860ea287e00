"""How much an optimizer keeps of each parameter, by its name or its class."""

from __future__ import annotations

from torch.optim import Optimizer

_KEPT = {  # by how many tensors of the parameter's size each keeps of it
    0: ("sgd", "adafactor"),  # adafactor a row and a column in place of a matrix: see `_state_numel`
    1: ("sgd_momentum", "adagrad", "rmsprop", "asgd", "lion", "muon"),
    2: ("adam", "adamw", "nadam", "radam", "adamax", "lamb", "adadelta", "rprop"),
}
OPTIMIZERS = {name: n_kept for n_kept, names in _KEPT.items() for name in names}
_MORE = {  # options that cost one more each
    "sgd": ("momentum",),
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
    "rmsprop": ("momentum", "centered"),
}


def state_numel(optimizer: str | type[Optimizer] | Optimizer, shape: tuple[int, ...]) -> int:
    """Elements that the optimizer keeps of a parameter; steps, a number each, are not counted."""
    name, numel = name_of(optimizer), 1
    for size in shape:
        numel *= size
    if name == "adafactor":
        return numel // shape[-1] + numel // shape[-2] if len(shape) > 1 and numel else numel
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    more = max((sum(bool(group.get(option)) for option in _MORE.get(name, ())) for group in groups), default=0)
    return (OPTIMIZERS[name] + more) * numel


def name_of(optimizer: str | type[Optimizer] | Optimizer) -> str:
    if isinstance(optimizer, str):
        names = [optimizer.lower()]
    else:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        names = [each.__name__.lower() for each in kind.__mro__]
    for name in names:
        if name in OPTIMIZERS:
            return name
    raise ValueError(
        f"optimizer must be one of {', '.join(OPTIMIZERS)}, or such a class or instance, got {optimizer!r:.200}; "
        "name one that keeps as many tensors a parameter"
    )

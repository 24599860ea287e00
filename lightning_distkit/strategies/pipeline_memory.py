"""What PowerSGD remembers between the replicas of pipes, in checkpoints, as the strategy "powersgd" has it there.

Each stage has a compressor of its own, and each replica of it errors of its own. In the file they stand under the names
of the whole module, so it may be cut otherwise when they are loaded, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.compression import PowerSGDState, gathered, redistributed
from lightning_distkit.core.pipeline.merged_state import merged

CHECKPOINT_KEY = "PowerSGDDDPStrategy"  # that strategy's
_OF_PARAMETERS = ("p", "q", "memory_order", "factors")
_OF_A_STAGE = ("total_numel_before_compression", "total_numel_after_compression", "n_parameters")
_CPU = torch.device("cpu")


def whole_memory(
    state: PowerSGDState, names: Mapping[Tensor, str], stages: Group | None, with_errors: bool
) -> dict[str, Any] | None:
    """On rank 0 of the first pipe what all ranks remember; None on others. Collective.

    Args:
        names: in the whole module, of all parameters that this rank has.
        stages: the ranks of this pipe, for messages on the CPU; None on the ranks of other pipes than the first.
        with_errors: else what compression has left out is not asked for, and None stands in its place.
    """
    own = state.state_dict(names)
    errors = gathered(own["error"], state.group) if with_errors else None
    if stages is None:
        return None
    # One tensor at a time, and plain values all at once.
    shared = own["shared"]
    plain = {name: value for name, value in shared.items() if name not in ("p", "q", "factors")}
    of_stages = stages.everyones(plain, _CPU)
    factors = {name: dict(enumerate(pair)) for name, pair in shared["factors"].items()}
    tensors = {"p": shared["p"], "q": shared["q"], "factors": factors, "errors": dict(enumerate(errors or ()))}
    tensors = merged(tensors, stages)
    if stages.rank != 0:
        return None
    whole = of_stages[0] | {"p": tensors["p"], "q": tensors["q"]}
    whole["factors"] = {name: (pair[0], pair[1]) for name, pair in tensors["factors"].items()}
    whole["memory_order"] = {name: order for each in of_stages for name, order in each["memory_order"].items()}
    whole["draws"] = [draw for each in of_stages for draw in each["draws"]]
    whole["n_drawn"] = max(each["n_drawn"] for each in of_stages)
    whole |= {name: sum(each[name] for each in of_stages) for name in _OF_A_STAGE}
    # What is around the pipe counts in every stage, so the sum would be taken for another model's; 0 is not looked at.
    whole["n_parameters"] = 0
    return {
        "shared": whole,
        "errors": list(tensors["errors"].values()) if with_errors else None,
        "stages": [{name: each[name] for name in (*_OF_A_STAGE, "draws", "n_drawn")} for each in of_stages],
    }


def own_memory(
    saved: Mapping[str, Any], names: Mapping[Tensor, str], rank: int, n_ranks: int, replica: int, n_replicas: int
) -> dict[str, Any]:
    """What of `whole_memory` a rank goes on with: a `PowerSGDState.state_dict`.

    Where there are as many stages and replicas as before, just what it was.

    Args:
        names: in the whole module, of all parameters that this rank has.
        rank, n_ranks: of the pipe.
    """
    shared, errors = saved["shared"], saved["errors"]
    own = set(names.values())
    if errors is None:
        state = {"shared": {**shared, "factors": {}}, "error": {}}
    elif len(errors) == n_replicas:
        state = {"shared": shared, "error": errors[replica]}
    else:
        state = redistributed(shared, [_of(own, each) for each in errors], n_replicas)
    mine = {**state["shared"], **{name: _of(own, state["shared"][name]) for name in _OF_PARAMETERS}}
    stages: Sequence[Mapping[str, Any]] = saved.get("stages", ())
    if len(stages) == n_ranks and all(n in own for _, its, *_ in stages[rank]["draws"] for n in its):
        mine |= stages[rank]
    else:  # cut otherwise, or never: numbers of other layers say nothing here
        draws = [(side, [n for n in its if n in own], *rest) for side, its, *rest in shared["draws"]]
        mine |= dict.fromkeys(_OF_A_STAGE, 0) | {"draws": [each for each in draws if each[1]]}
    return {"shared": mine, "error": _of(own, state["error"])}


def _of(names: set[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}

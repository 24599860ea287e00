"""What compression saves, costs and leaves out since the last time someone asked, as numbers to log.

==================  ================================================================================================
``rate``            bytes that plain all-reduces would have sent, over those that were sent
``nbytes``          bytes that this rank sent, per step
``total_nbytes``    bytes that this rank sent in all
``relative_error``  of all that the ranks were to send in the step measured, the part that the messages do not stand
                    for: 0 for the plain mean, 1 if nothing is sent; Frobenius norms
``error_norm``      norm of what is remembered for the next step, over all ranks and layers
``computing_ms``    milliseconds per step spent making messages and reading them
``waiting_ms``      milliseconds per step spent waiting for the network and the other ranks
==================  ================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from lightning_distkit.core.compression.hook import CommState
from lightning_distkit.core.compression.measurement import LayerMeasurement, total


class Statistics:
    """Of one hook's state; `CommState.measure` is to be called before a step whose errors are wanted."""

    def __init__(self, state: CommState) -> None:
        self._state = state
        self._before, self._n_before = state.ledger.total, state.ledger.n_steps
        self.layers: dict[str, LayerMeasurement] = {}  # of the last step measured; the same on every rank

    def collect(self, names: Mapping[Tensor, str], per_layer: bool = False) -> dict[str, float]:
        """The numbers since the last call; bytes and times are of this rank. Collective, one small message.

        Args:
            names: of all parameters.
            per_layer: also ``relative_error/<parameter>`` of each compressed parameter.
        """
        state = self._state
        measurement, state.last_measurement = state.last_measurement, None
        if measurement is not None:
            self.layers = {names[p]: layer for p, layer in measurement.over_ranks(state.group).items()}
        now, n_steps = state.ledger.total, state.ledger.n_steps
        n_since = max(1, n_steps - self._n_before)
        sent, whole = (getattr(now, name) - getattr(self._before, name) for name in ("nbytes", "nbytes_whole"))
        numbers = {
            "rate": whole / sent if sent else math.inf if whole else 1.0,
            "nbytes": sent / n_since,
            "total_nbytes": float(now.nbytes),
            "computing_ms": 1e3 * (now.computed_s - self._before.computed_s) / n_since,
            "waiting_ms": 1e3 * (now.waited_s - self._before.waited_s) / n_since,
        }
        overall = total(self.layers.values())
        if measurement is not None and self.layers and math.isfinite(overall.wanted):  # else the step was not finite
            numbers |= {"relative_error": overall.relative_error, "error_norm": math.sqrt(overall.error)}
            if per_layer:
                compressed = {name: layer for name, layer in self.layers.items() if layer.is_compressed}
                numbers |= {f"relative_error/{name}": layer.relative_error for name, layer in compressed.items()}
        self._before, self._n_before = now, n_steps
        return numbers

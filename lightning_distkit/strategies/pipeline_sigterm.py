"""SIGTERM to one rank ends the fit of all, before the same batch.

Lightning's own handler sends a word to the other ranks at once, wherever they are. A stage that waits there for this
one's activations waits in vain, as this one waits for it to take the word: until the process group's timeout, half an
hour by default. So here a handler takes a note, and the ranks compare notes where they all come by.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distkit.core.collectives import Group


class Sigterm:
    """Takes the place of Lightning's handler, until `restore`.

    A fit ends before its next training batch, on all ranks; what is not a fit, before the next batch of that pipe.

    Args:
        everyone, pipe: all ranks and those of this pipe, for messages on the CPU.
    """

    def __init__(self, trainer: Any, everyone: Group, pipe: Group) -> None:
        self._trainer = trainer
        self._group = everyone if trainer.state.fn == TrainerFn.FITTING else pipe
        self._has_come = False
        self._places: list[tuple[Any, str]] = []
        epoch_loop = trainer.fit_loop.epoch_loop
        # Before 2.6 no word is sent: the rank ends by itself, and the others say that it is gone.
        if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            self._put(trainer._signal_connector, "_sigterm_notifier_fn", self._note)
            self._put(epoch_loop, "_broadcast_sigterm_tensor", self._compare_notes)

    def _put(self, owner: Any, name: str, function: Any) -> None:
        vars(owner)[name] = function
        self._places.append((owner, name))

    def restore(self) -> None:
        for owner, name in self._places:
            vars(owner).pop(name, None)

    def before_batch(self) -> None:
        """Of an evaluation. In one within a fit replicas may have different numbers of batches: nothing is asked.

        Raises:
            SIGTERMException: on every rank of the pipe, if it has come to one.
        """
        if self._places and self._trainer.state.fn != TrainerFn.FITTING:
            self._compare_notes()

    def _note(self, signum: int, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._has_come and launcher is not None:
            launcher.kill(signum)  # as Lightning does: rank 0's script has started the others
        self._has_come = True

    def _compare_notes(self) -> None:
        has_come = torch.tensor(int(self._has_come))
        self._group.all_reduce(has_come, dist.ReduceOp.MAX).wait()
        if has_come:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

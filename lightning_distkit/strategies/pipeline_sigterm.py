"""SIGTERM to one rank ends the fit of all, before the same batch.

Lightning's own handler sends a word to the other ranks at once, wherever they are. A stage that waits there for this
one's activations waits in vain, as this one waits for it to take the word: until the process group's timeout, half an
hour by default. So here a handler takes a note. Where all come by, before a batch, the first stage says whether to go
on; others have told it by the group's store, so that a rank that is gone holds up nobody.
"""

from __future__ import annotations

import contextlib
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_distkit.core.collectives import Group


class Sigterm:
    """Takes the place of Lightning's handler, until `restore`.

    A fit ends before its next training batch or the one after, on all ranks; what is not a fit, on those of this pipe.

    Args:
        pipe: the ranks of this pipe, for messages on the CPU.
        replicas: the ranks that have the same stages in other pipes.
        device: for messages to these.
    """

    _n_made = 0  # in this process; the same on every rank, so that an old note is not taken for a new one

    def __init__(self, trainer: Any, pipe: Group, replicas: Group, device: torch.device) -> None:
        Sigterm._n_made += 1
        self._key = f"sigterm {Sigterm._n_made}"
        self._trainer = trainer
        self._pipe = pipe
        self._replicas = replicas if trainer.state.fn == TrainerFn.FITTING else Group()
        self._device = device
        self._has_come = False
        self._places: list[tuple[Any, str]] = []
        epoch_loop = trainer.fit_loop.epoch_loop
        # Before 2.6 no word is sent: the rank ends by itself, and the others say that it is gone.
        if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            self._put(trainer._signal_connector, "_sigterm_notifier_fn", self._note)
            self._put(epoch_loop, "_broadcast_sigterm_tensor", self._go_on_or_end)

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
            self._go_on_or_end()

    def _note(self, signum: int, _: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._has_come and launcher is not None:
            launcher.kill(signum)  # as Lightning does: rank 0's script has started the others
        self._has_come = True

    def _go_on_or_end(self) -> None:
        if self._has_come_to_one():
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

    def _has_come_to_one(self) -> bool:
        """The same on every rank."""
        process_group = self._pipe.process_group
        if process_group is None or self._pipe.world_size == 1:
            return self._over_replicas(self._has_come)
        store = dist.distributed_c10d._get_process_group_store(process_group)
        if self._pipe.rank != 0:
            if self._has_come:
                with contextlib.suppress(RuntimeError):  # the store has died with its process
                    store.set(self._key, "has come")
            return bool(self._pipe.receive(torch.zeros((), dtype=torch.uint8), 0))
        word = torch.tensor(self._over_replicas(self._has_come or store.check([self._key])), dtype=torch.uint8)
        # As in `SharedBatches`: a rank that is gone is for the pipe's next call to name, on all of them.
        sent = []
        for rank in range(1, self._pipe.world_size):
            with contextlib.suppress(RuntimeError):
                sent.append(dist.isend(word, group=process_group, group_dst=rank))
        for work in sent:
            with contextlib.suppress(RuntimeError):
                assert work is not None
                work.wait()
        return bool(word)

    def _over_replicas(self, has_come: bool) -> bool:
        if self._replicas.world_size == 1:
            return has_come
        anywhere = torch.tensor(int(has_come), device=self._device)
        self._replicas.all_reduce(anywhere, dist.ReduceOp.MAX).wait()
        return bool(anywhere)

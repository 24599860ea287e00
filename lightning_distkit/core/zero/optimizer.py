"""ZeRO stage 1: each rank keeps the optimizer's state of its shard only, steps that, and gets the rest from the others.

Source: Rajbhandari et al., 2020, "ZeRO", https://arxiv.org/abs/1910.02054, section 5.1.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distkit.core.collectives import Group, default_device
from lightning_distkit.core.total_norm import total_norm
from lightning_distkit.core.zero import norm
from lightning_distkit.core.zero.bucket import Bucket, alike, balanced, slices, whole_parameters
from lightning_distkit.core.zero.gradients import WholeGradients
from lightning_distkit.core.zero.holders import NO_WRAPPER, WithoutDDP, living_modules, refusal
from lightning_distkit.core.zero.partial_state import copy_parts
from lightning_distkit.core.zero.shardable import ELEMENTWISE, check, chosen_for, made
from lightning_distkit.core.zero.state import gathered_state, load_whole_state, part_of_state, sharded_state
from lightning_distkit.core.zero.turn import Turn

logger = logging.getLogger(__name__)


class Gradients(Protocol):
    """How whole gradients become those of the shards: stage 1's way, or stage 2's."""

    buckets: list[Bucket]
    turn: Turn
    at_first: Callable[[], None] | None  # called once, before anything is reduced

    def add(self, buckets: Sequence[Bucket]) -> None: ...
    def reduce(self) -> None: ...
    def clear(self) -> None: ...
    def edited(self) -> None: ...
    def stepped(self) -> None: ...
    def remove(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...


class ZeroOptimizer(Optimizer):
    """An optimizer whose state is sharded over the ranks; gradients are averaged by `step`, as DDP would have done.

    The module is used as it is, without a wrapper. Its trained parameters become views of flat buckets, with rank 0's
    values; whoever moves or replaces them afterwards (``module.to(...)``) gets an error at the next step.
    ``param_groups`` are the user's, with whole parameters, and may be changed by schedulers as ever.

    Every method but `zero_grad`, `no_sync` and `sharded_state_dict` is collective: to be called on every rank.

    Args:
        optimizer: a torch optimizer, or a class of one, of which one is then made with ``params`` and ``arguments``.
            One whose class is in `shardable.ELEMENTWISE` steps slices of parameters. Of any other, each rank steps
            whole parameters, so that what a step computes is what it would be on one device.
        params: parameters or param groups, if ``optimizer`` is a class.
        group: the ranks; by default all, or a world of one where torch.distributed is not initialized.
        bucket_cap_mb: MiB that travel together.
        elementwise: whether slices may be stepped; by default as the class says.

    Raises:
        TypeError: an optimizer that cannot be sharded.
        ValueError: parameters that differ between the ranks, that lie on several types of device or on none.
    """

    def __init__(
        self,
        optimizer: Optimizer | type[Optimizer],
        params: Iterable[Any] | None = None,
        group: dist.ProcessGroup | Group | None = None,
        *,
        bucket_cap_mb: float = 25,
        elementwise: bool | None = None,
        **arguments: Any,
    ) -> None:
        if isinstance(optimizer, ZeroOptimizer):
            raise TypeError("the optimizer is sharded already: give ZeroOptimizer the plain one")
        users = made(optimizer, params, arguments)
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be above 0, got {bucket_cap_mb}")
        self.group = Group.of(group)
        self.elementwise = type(users) in ELEMENTWISE if elementwise is None else elementwise
        self.chosen = None if elementwise is not None else chosen_for(users)  # what the user did not ask for, in words
        self._bucket_cap = bucket_cap_mb * 2**20
        self._loads = [0] * self.group.world_size  # numel that each rank steps, where parameters are whole
        self._gradients: Gradients = WholeGradients(self.group)
        self._pieces: dict[Tensor, Tensor] = {}
        self._without_ddp = WithoutDDP()
        self._gradients.at_first = self._refuse_ddp
        self._users = users
        self._is_made = False
        self.is_unscaled_by_ours = False  # that is, by a GradScaler that knows shards
        # The one that steps: the same class and settings, with this rank's pieces for parameters.
        self._inner = copy.copy(users)
        self._inner.__dict__.pop("step", None)  # a scheduler's wrapper around the step of the user's
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)
        living = living_modules()
        check(users, self.group, living, elementwise=self.elementwise, bucket_cap=self._bucket_cap)
        state, users.state = users.state, defaultdict(dict)
        param_groups = users.param_groups
        super().__init__(param_groups, users.defaults)  # which sets them anew
        # The very list, so that a scheduler made for either has its effect on both.
        self.param_groups = param_groups
        self.state = self._inner.state
        self._is_made = True
        self._take_up(living)
        if (chosen := self.chosen) is not None and self.group.rank == 0:
            logger.info(chosen)
        self.load_state(state)

    # -- what is trained

    @property
    def buckets(self) -> list[Bucket]:
        """In the order in which they travel."""
        return self._gradients.buckets

    @property
    def inner(self) -> Optimizer:
        """The optimizer of this rank's pieces."""
        return self._inner

    def piece(self, param: Tensor) -> Tensor | None:
        """What this rank steps of ``param``: flat, or in its own shape if it is whole. None if that is nothing."""
        return self._pieces.get(param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, at any time and alike on every rank."""
        super().add_param_group(param_group)
        if self._is_made:  # torch's constructor adds the groups one by one
            self._take_up()

    # They are the user's, whoever sets them: a callback that had added groups does it on resuming.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._users.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self._users.param_groups = param_groups
        if self._is_made:
            self._inner.param_groups = []
            self._take_up()

    def use_gradients(self, gradients: Gradients) -> None:
        """Change how gradients are reduced; those that there are are dropped."""
        self.zero_grad()
        buckets = self.buckets
        self._gradients.remove()
        self._gradients = gradients
        gradients.at_first = self._refuse_ddp
        gradients.add(buckets)

    def release(self) -> None:
        """Leave the parameters alone from now on: nothing is reduced any more. The state can still be had."""
        self._gradients.remove()
        self._without_ddp.release()

    def __getstate__(self) -> Any:
        raise TypeError("a sharded optimizer belongs to its process group and can be neither copied nor pickled")

    def _refuse_ddp(self) -> None:
        """Wrappers are usually made after the optimizer, if at all."""
        params = [param for bucket in self.buckets for param in bucket.params]
        if self._without_ddp.watch(params, living_modules()):
            raise RuntimeError(f"the module must be plain, but is in DistributedDataParallel by now: {NO_WRAPPER}")

    def _take_up(self, living: Sequence[nn.Module] | None = None) -> None:
        """Shard what is to be trained and is not yet: parameters of a new group, and those unfrozen since."""
        known = {param for bucket in self.buckets for param in bucket.params}
        new = [p for group in self.param_groups for p in group["params"] if p.requires_grad and p not in known]
        if new:
            self._shard(new, living)
        if new or len(self._inner.param_groups) != len(self.param_groups):
            self._inner.param_groups = [
                {**users, "params": [piece for param in users["params"] if (piece := self.piece(param)) is not None]}
                for users in self.param_groups
            ]

    def _shard(self, params: list[Tensor], living: Sequence[nn.Module] | None) -> None:
        if living is None:  # else it was looked at before
            living = living_modules()
            if (why := refusal(params, living)) is not None:
                raise ValueError(why)
        buckets = [self._bucket(together) for together in alike(params, self._bucket_cap)]
        for pending in [self.group.broadcast_(bucket.flat) for bucket in buckets]:
            pending.wait()
        self._gradients.add(buckets)
        for bucket in buckets:
            self._pieces.update(bucket.pieces)
        copy_parts(buckets, living)  # for as long as they lie there, and so without an end
        self._without_ddp.watch(params, living)

    def _bucket(self, params: list[Tensor]) -> Bucket:
        numels, world_size = [param.numel() for param in params], self.group.world_size
        if self.elementwise:
            layout = slices(numels, world_size)
        else:
            layout = whole_parameters(numels, balanced(numels, self._loads), world_size)
        return Bucket(params, layout, self.group.rank)

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, step this rank's shard, and make the parameters whole again.

        Args:
            closure: computes the gradients; it is called once.
        """
        if hasattr(self, "found_inf"):  # torch's GradScaler leaves it here, because of the property below
            raise TypeError(
                "torch's GradScaler looks for infs in this rank's gradients only, so some ranks would skip a step and "
                "others not: use lightning_distkit.core.zero.GradScaler in its place"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        for mine, users in zip(self._inner.param_groups, self.param_groups, strict=True):
            mine.update({name: value for name, value in users.items() if name not in ("params", "param_names")})
        self._inner.step()
        for mine, users in zip(self._inner.param_groups, self.param_groups, strict=True):
            users.update({name: value for name, value in mine.items() if name not in ("params", "param_names")})
        for stepped in (self, self._users):  # or else a scheduler made for it complains
            stepped._opt_called = True  # type: ignore[attr-defined]
        with self._gradients.turn.naming_the_cause():
            for pending in [self.group.all_gather_(bucket.shards) for bucket in reversed(self.buckets)]:
                pending.wait()
        self._gradients.stepped()
        self.group.ledger.add(nbytes_whole=self.group.ring_nbytes(sum(bucket.nbytes for bucket in self.buckets)))
        self.group.ledger.step()
        return loss

    # Schedulers wrap `step` to see whether it was called, unless they find this; `step` tells them itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes torch's GradScaler show itself; see `step`."""
        return not self.is_unscaled_by_ours

    def reduce_gradients(self) -> None:
        """Bring the gradients of the pieces up to date, as `step`, clipping and norms do themselves."""
        for bucket in self.buckets:
            for param in bucket.moved():
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} is no longer where ZeroOptimizer has put it: the "
                    "module was moved or converted, its data was replaced, or a ZeroOptimizer made later has it, too. "
                    "Do that before the optimizer is made, and let each parameter be of one optimizer only"
                )
        self._take_up()
        self._gradients.reduce()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients.clear()
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this, no backward sends anything; the gradients of all are reduced with the next one outside.

        Stage 1 sends at the step alone. Stage 2 keeps whole gradients until then.
        """
        return self._gradients.no_sync()

    # -- norms

    def pieces(self, params: Iterable[Tensor] | None = None) -> list[Tensor]:
        """What this rank steps, the mean of the gradients in ``.grad``; those without a gradient left out.

        Args:
            params: of which of the parameters; of all by default.
        """
        self.reduce_gradients()
        pieces = self._pieces.values() if params is None else [self._pieces.get(param) for param in params]
        return [piece for piece in pieces if piece is not None and piece.grad is not None]

    def edited(self) -> None:
        """Say that the gradients of `pieces` were changed, so that nobody reduces the whole ones over them."""
        self._gradients.edited()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients as one vector: a scalar, the same on every rank."""
        grads = [piece.grad for piece in self.pieces() if piece.grad is not None]
        dtypes = {bucket.flat.dtype.to_real() for bucket in self.buckets}  # a norm is real, of complex numbers, too
        dtype = reduce(torch.promote_types, dtypes, torch.float32)
        with self._gradients.turn.naming_the_cause():
            return total_norm(grads, norm_type, self.group, self.device, dtype)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on whole gradients; returns the norm before, the same on every rank."""
        total = self.grad_norm(norm_type)
        norm.clip_(self.pieces(), max_norm, total, error_if_nonfinite)
        self._gradients.edited()
        return total

    def clip_grad_value_(self, clip_value: float) -> None:
        """As ``torch.nn.utils.clip_grad_value_`` on whole gradients, which must be real: a ValueError on every rank."""
        norm.clip_values_(self.pieces(), clip_value, (bucket.flat.dtype for bucket in self.buckets))
        self._gradients.edited()

    @property
    def device(self) -> torch.device:
        return self.buckets[0].flat.device if self.buckets else default_device(self.group.process_group)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 what the plain optimizer would say, on the CPU; on the others an empty dict.

        Collective. Rank 0 holds one whole state, no other rank more than its shard.

        Raises:
            RuntimeError: another rank did not call it.
        """
        return gathered_state(self)

    def sharded_state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's, with this rank's parts of the state: for `ShardedCheckpointWriter`.

        Not collective, and nothing is copied: it is to be saved before the next step. `load_state_dict` takes what
        `read_sharded_checkpoint` makes of it.
        """
        return sharded_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of what the plain optimizer, or `state_dict` at any number of ranks, has said.

        Collective; every rank has the whole dict, best from ``torch.load(mmap=True)``, of which it then reads its part.

        Raises:
            ValueError: it belongs to other parameters; nothing is changed then, on any rank.
        """
        load_whole_state(self, state_dict)

    def load_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Replace the state of this rank's pieces by its part of ``state``: parameter -> its whole state."""
        self.set_state(self.parts_of(state))

    def parts_of(self, state: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """Of ``state``, parameter -> its whole state, what belongs to this rank's pieces: piece -> its state."""
        return {
            piece: part_of_state(bucket, param, its, self._inner.param_groups)
            for bucket in self.buckets
            for param, piece in bucket.pieces.items()
            if (its := state.get(param))
        }

    def set_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Make this the state of this rank's pieces."""
        self._inner.state.clear()
        self._inner.state.update(state)

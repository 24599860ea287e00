"""FSDP2's two collectives on gloo, by messages between each two ranks: handed over by its own extension points.

gloo's reduce-scatter and all-gather are slower than its all-reduce, which moves more. And while FSDP2 waits for each of
them, an all-gather of ours is under way until the parameters are needed, so that a prefetch is one on the CPU, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from math import prod
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from lightning_distkit.core.collectives import naming_the_cause
from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.point_to_point import Exchange, all_gather_, reduce_scatter_
from lightning_distkit.core.reuse import Buffers


class _Counted(dist.Work):
    """An exchange under way, as FSDP2 knows one; what is sent is counted at once, what is waited when it was."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup, ledger: Ledger) -> None:
        super().__init__()
        self._exchange = exchange
        self._group = group
        self._ledger = ledger

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there.

        Raises:
            PeerError: a rank is lost.
        """
        begin = perf_counter()
        with naming_the_cause(self._group):
            self._exchange.wait()
        self._ledger.add(waited_s=perf_counter() - begin)
        return True


class PointToPointAllGather(AllGather):
    """Sends this rank's shard to every other rank: ``W - 1`` times its bytes, W the world size."""

    def __init__(self, ledger: Ledger, buffers: Buffers) -> None:
        self.ledger = ledger  # of this rank alone
        self._buffers = buffers

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffers.take(prod(int(each) for each in size), dtype, device).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Start to fill ``output_tensor`` (W * n elements) with every rank's ``input_tensor`` (n elements).

        The work is returned even if ``async_op`` is false: FSDP2 waits for one wherever it is given one.
        """
        shards = output_tensor.view(group.size(), -1).unbind()
        mine = shards[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():  # FSDP2 gives a view of the output, as its copy-in made it
            mine.copy_(input_tensor)
        self.ledger.add(nbytes=(group.size() - 1) * mine.nbytes, n_messages=1)
        with naming_the_cause(group):
            return _Counted(all_gather_(shards, group.rank(), group), group, self.ledger)


class UnderWay:
    """The one reduce-scatter of a model that may be under way while the backward goes on to the next block."""

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def put(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def finish(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class PointToPointReduceScatter(ReduceScatter):
    """Sends each other rank its shard of the gradients: ``(W - 1) / W`` of their bytes, W the world size.

    The contributions are added in one order, so two runs get the same bits.

    Args:
        param_group: FSDP2's FSDPParamGroup that this one reduces for.
        under_way: of the whole model.
    """

    def __init__(self, ledger: Ledger, buffers: Buffers, param_group: Any, under_way: UnderWay) -> None:
        self.ledger = ledger  # of this rank alone
        self._buffers = buffers
        self._param_group = param_group
        self._under_way = under_way

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # No lent memory: of the two tensors that FSDP2 allocates, it keeps one, which becomes the gradients.
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Have ``output_tensor`` (n elements) become this rank's shard of the sum or mean; ``input_tensor`` is spent.

        It is filled at the next call or at the end of the backward, and before this returns only if FSDP2 goes on to
        read it at once.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):  # a custom divide factor comes as PREMUL_SUM
            raise ValueError(
                f"the reduction must be SUM or AVG, got {op}; call set_force_sum_reduction_for_comms(True)"
            )
        self._under_way.finish()
        shards = input_tensor.view(group.size(), -1).unbind()
        mine = shards[group.rank()]
        self.ledger.add(nbytes=(group.size() - 1) * mine.nbytes, n_messages=1)
        with naming_the_cause(group):
            work = _Counted(reduce_scatter_(shards, group.rank(), group), group, self.ledger)

        def finish() -> None:
            work.wait()
            if op == dist.ReduceOp.AVG:
                torch.div(mine, group.size(), out=output_tensor)
            else:
                output_tensor.copy_(mine)

        self._under_way.put(finish)
        if op != dist.ReduceOp.AVG or self._is_read_at_once():  # a sum is divided at once
            self._under_way.finish()

    def _is_read_at_once(self) -> bool:
        """Whether FSDP2 casts, adds up, reduces further, moves or shows the gradients before the backward's end."""
        its = self._param_group
        return (
            its._reduce_dtype != its._orig_dtype
            or isinstance(its.mesh_info, DDPMeshInfo)
            or its._all_reduce_hook is not None
            or any(
                each.sharded_param.grad is not None
                or each.offload_to_cpu
                or getattr(each.sharded_param, "_post_accumulate_grad_hooks", None)
                for each in its.fsdp_params
            )
        )


def use_point_to_point(param_groups: Sequence[Any], ledger: Ledger) -> None:
    """Have FSDP2's FSDPParamGroups of one model gather and reduce by point-to-point messages, counted in ``ledger``."""
    buffers, under_way = Buffers(), UnderWay()
    for each in param_groups:
        each._all_gather_comm = PointToPointAllGather(ledger, buffers)
        each._reduce_scatter_comm = PointToPointReduceScatter(ledger, buffers, each, under_way)
        # An attribute of the object, which hides the method: called for each group at the end of the backward.
        each.finalize_backward = _after(under_way.finish, each.finalize_backward)


def _after(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    @wraps(then)
    def both() -> None:
        first()
        then()

    return both

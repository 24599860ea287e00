"""Checkpoints to which every rank writes its part, at once or while training goes on.

The format and the way to it are those of ``torch.distributed.checkpoint``. Only what goes into the files is ours: boxes
of whole tensors (`Part`), whatever the stage, so that any stage on any number of ranks can read what it needs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_distkit.core.collectives import Group, PeerError, says_that_a_peer_is_lost, what_happened
from lightning_distkit.core.zero.checkpoint_folder import META, TABLE, is_complete, put_in_place, remove, saving_folder
from lightning_distkit.core.zero.parts import Contents, Part, put_together, take_apart

_CPU = torch.device("cpu")


class ShardedCheckpointWriter:
    """Writes sharded checkpoints, one after the other. Every method is collective; the folders must be shared by all.

    Args:
        group: the ranks; by default all, or a world of one where torch.distributed is not initialized.
        timeout: after which a rank gives up waiting for another; by default torch's for gloo.

    Example::

        with ShardedCheckpointWriter() as writer:
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict(), "epoch": 3}
            writer.save(checkpoint, "run/3", replicated=model.parameters())

        checkpoint = read_sharded_checkpoint("run/3")
        load_module_full_state_dict(model, checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    """

    def __init__(self, group: dist.ProcessGroup | Group | None = None, *, timeout: timedelta | None = None) -> None:
        self._control = _group_of_its_own(Group.of(group).process_group, timeout)
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        *,
        replicated: Iterable[Tensor] = (),
        asynchronous: bool = False,
    ) -> None:
        """Write ``checkpoint`` to the folder ``path``, in the place of what is there.

        Until all of it is written, what is at ``path`` stays what it is; a rank that dies changes nothing of that.

        Args:
            checkpoint: a nested dict, as for ``torch.save``, alike on every rank. Of DTensors each rank writes its
                shard, of an optimizer's ``sharded_state_dict()`` what it has. All else is taken from rank 0.
            replicated: tensors among them that are the same on every rank, as parameters are in stages 1 and 2: of
                those each rank writes a share.
            asynchronous: return when this rank's part is copied to the CPU, and write that in another thread. There
                is one at a time: a further `save` waits for it, as does `wait`; and they raise what went wrong.

        Raises:
            ValueError: ``path`` is no folder, rank 0 cannot pickle what it has, or two places have the same name.
            PeerError: a rank is lost.
            RuntimeError: a rank could not write; or another rank did not call this.
        """
        self.wait()
        if "://" in str(path):
            raise ValueError(f"a sharded checkpoint must go to a folder that all ranks share, got {path}")
        self._control.meet("ShardedCheckpointWriter.save()")
        path = Path(os.path.abspath(path))  # noqa: PTH100  not resolved: a link is to be replaced, not its target
        parts, meta = self._taken_apart(checkpoint, replicated)
        if asynchronous:
            parts = {name: part.staged() for name, part in parts.items()}
        planner = _Planner(parts)
        writer = _Writer(path, meta)
        if not asynchronous:
            self._write(planner, writer, path)
            return
        # As dcp.async_save does, which would copy a second time, and is experimental.
        self._thread = self._thread or ThreadPoolExecutor(1, "sharded-checkpoint")
        self._under_way = self._thread.submit(self._write, planner, writer, path)

    @property
    def is_under_way(self) -> bool:
        """Whether there is one that nobody has waited for."""
        return self._under_way is not None

    def wait(self) -> None:
        """Return when the checkpoint under way, if there is one, is in its place; raise what went wrong otherwise."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """`wait`, and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def __enter__(self) -> ShardedCheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _taken_apart(
        self, checkpoint: Mapping[str, Any], replicated: Iterable[Tensor]
    ) -> tuple[dict[str, Part], bytes]:
        """What this rank writes; and, on rank 0, what goes into META.

        The latter as bytes, now: what stands in a checkpoint may be changed by the next step.
        """
        contents, meta, refusal = Contents(), b"", None
        try:
            contents = take_apart(checkpoint, replicated, self._control)
        except ValueError as error:
            refusal = str(error)
        of_ranks = self._control.everyones(contents.beyond_rank_0(), _CPU)
        if self._control.rank == 0 and refusal is None:
            of_ranks[0] = contents
            try:
                rest, places = put_together(of_ranks)
                file = io.BytesIO()
                torch.save({**rest, TABLE: places}, file)
                meta = file.getvalue()
            except Exception as error:  # whatever an object of the user's raises when it is pickled
                refusal = f"a checkpoint must be something that torch.save can write, and this is not: {error!r}"
        self._control.refuse_together(refusal, _CPU)
        return contents.parts, meta

    def _write(self, planner: _Planner, writer: _Writer, path: Path) -> None:
        try:
            if self._control.process_group is None:
                _write_alone(planner, writer)
            else:
                dcp.save({}, storage_writer=writer, planner=planner, process_group=self._control.process_group)
        except dcp.CheckpointException as error:  # no Exception in torch: whoever catches those would miss it
            rank, (cause, _) = next(iter(error.failures.items()))
            raise RuntimeError(
                f"the checkpoint {path} could not be written, and what was there before is untouched: rank {rank} "
                f"says {cause!r}"
            ) from error
        except RuntimeError as error:
            if not says_that_a_peer_is_lost(error):
                raise
            raise PeerError(what_happened(error, self._control.rank, self._control.world_size)) from error


def _group_of_its_own(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> Group:
    """The same ranks again, on gloo.

    The thread that writes takes part in collectives while training does in others. On one process group their order
    would be a matter of timing, and so another one on every rank. On gloo, as torch's checkpoints send objects, which
    NCCL would take to the current device of that thread: the first GPU, on every rank.
    """
    if process_group is None:
        return Group()
    ranks = dist.get_process_group_ranks(process_group)
    everybody = len(ranks) == dist.get_world_size()
    return Group(dist.new_group(ranks, timeout, "gloo", use_local_synchronization=not everybody))


def _write_alone(planner: _Planner, writer: _Writer) -> None:
    """What ``dcp.save`` does, which warns where there is no process group."""
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    [plan] = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _Planner(SavePlanner):
    """Says which boxes this rank writes."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self._parts = parts

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, at),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size(at), box.shape),
                        TensorProperties.create_from_tensor(box),
                        part.shape,
                    ),
                )
                for name, part in self._parts.items()
                for at, box in part.boxes.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        for name, meta in metadata.state_dict_metadata.items():
            if not isinstance(meta, TensorStorageMetadata) or not is_complete(meta):
                raise RuntimeError(f"the ranks must have all of {name} together, each element once, and have not")
        # What torch's own tools read: one key each, under which they put it.
        return plans, replace(metadata, planner_data={name: (name,) for name in metadata.state_dict_metadata})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        at = write_item.index.offset
        assert at is not None
        # The reader takes elements from where row-major order has them.
        return self._parts[write_item.index.fqn].boxes[tuple(at)].detach().contiguous()


class _Writer(dcp.FileSystemWriter):
    """Writes to a folder beside ``path``, which takes that name when all ranks have written.

    Args:
        path: absolute.
        meta: what META is to hold, on rank 0.
    """

    def __init__(self, path: Path, meta: bytes) -> None:
        # Nothing is copied ahead: the stream for that would be made on the current device, which in a thread of its
        # own is the first GPU.
        super().__init__(saving_folder(path), per_thread_copy_ahead=0)
        self._final, self._meta = path, meta

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is not to be made yet

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On rank 0, while the others wait: what a rank has left there that was killed must not be taken for ours.
        remove(Path(self.path))
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # On rank 0, when all have written; what this raises, torch raises on all.
        super().finish(metadata, results)
        with (Path(self.path) / META).open("wb") as file:
            file.write(self._meta)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(self._final)

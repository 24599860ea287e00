"""Micro-batches through stages: in one process, or with a process for each stage.

`SCHEDULES` names the orders in which the latter works; whoever adds one writes a function and a line in schedules.py.
"""

from lightning_distkit.core.pipeline.dist import DistributedPipe as DistributedPipe
from lightning_distkit.core.pipeline.failure import StageError as StageError
from lightning_distkit.core.pipeline.handle import LocalRef as LocalRef
from lightning_distkit.core.pipeline.local import Pipe as Pipe
from lightning_distkit.core.pipeline.microbatch import NoChunk as NoChunk
from lightning_distkit.core.pipeline.placement import WithDevice as WithDevice
from lightning_distkit.core.pipeline.schedules import SCHEDULES as SCHEDULES
from lightning_distkit.core.pipeline.sequential import PipeSequential as PipeSequential

"""How the processes were started, and the traps in it: several were asked for and one came, or each trains alone."""

from __future__ import annotations

import os
from importlib.util import find_spec

import psutil
import torch

OTHER_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}
"""What accelerate launch sets for other engines; on a CPU Accelerate would ignore some of them silently."""

_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def world_size() -> int:
    """How many processes the launcher says there are."""
    return max(int(os.environ.get(name) or 1) for name in _WORLD_SIZES)


def use_cpu_if_there_is_nothing_else() -> None:
    """Have Accelerate join the ranks on a CPU.

    It looks for accelerators only, unless told: with ``--multi_gpu`` on a machine without one, or under torchrun, each
    rank would train alone, and nobody would notice.
    """
    if is_on_cpu_together():
        os.environ["ACCELERATE_USE_CPU"] = "true"


def is_on_cpu_together() -> bool:
    """Whether there are several processes and no accelerator."""
    return world_size() > 1 and not torch.accelerator.is_available()


def check_that_the_ranks_are_together(num_processes: int) -> None:
    """Raise a RuntimeError if Accelerate sees fewer processes than there are."""
    if num_processes < world_size():
        raise RuntimeError(
            f"the launcher has started {world_size()} processes, but Accelerate sees {num_processes}, so each would "
            "train alone: something has made its state before and without them (PartialState(), TrainingArguments). On "
            "a CPU, say Accelerator(cpu=True), or TrainingArguments(use_cpu=True), where it is made first"
        )


def check_that_all_were_started() -> None:
    """Raise a RuntimeError if accelerate launch was asked for several processes and has started this one alone.

    ``--cpu --num_processes 2`` does so, and a config file with MULTI_CPU, unless it starts mpirun. The launcher does
    not hand the number on, but sets a master's address where there are to be several.
    """
    if world_size() > 1 or "ACCELERATE_MIXED_PRECISION" not in os.environ or "MASTER_PORT" not in os.environ:
        return
    try:
        launchers = psutil.Process().parent().environ()
    except (AttributeError, psutil.Error, OSError):  # it is gone, or nobody may look
        return
    if all(launchers.get(name) == os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        return
    raise RuntimeError(
        "accelerate launch was asked for several processes and has started one: on a CPU it does not start them "
        "itself. Say --multi_gpu in place of --cpu (where there is no GPU, the ranks then meet on the CPU), or start "
        "with torchrun --nproc-per-node N -m accelerate_plugins ..., or give it an mpirun_config"
    )


def is_on_tpu() -> bool:
    return os.environ.get("PJRT_DEVICE", "").upper() == "TPU" or find_spec("torch_xla") is not None

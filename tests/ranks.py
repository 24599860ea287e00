"""Several real processes from one call: ``run_ranks(2, body, *args)``, for core, Lightning and Accelerate alike.

A fork server imports torch once, so a rank starts in milliseconds. It finds what torchrun would have set and a default
gloo group, so both trainers take the world as it is. All that crosses is a value: a tensor put into a pipe of torch's
would be memory that the ranks share, and gone with its sender.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

_PRELOADED = ["torch.distributed", "torch._dynamo"]
_PRELOADED_IF_IN_USE = ["pytest", "hypothesis", "torchmetrics", "lightning.pytorch", "accelerate"]
_TO_LEAVE = 10.0  # seconds between a rank's result and its end


class RankDied(RuntimeError):
    """A rank ended without a result; ``exitcode`` is the negative number of the signal that killed it, if one did."""

    def __init__(self, rank: int, exitcode: int) -> None:
        how = f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exited with code {exitcode}"
        super().__init__(f"rank {rank} {how} before it had a result")
        self.exitcode = exitcode


class RemoteTraceback(Exception):
    """Where in its rank an exception was raised, and what the rank had printed: the cause of the one raised here."""


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    pg_timeout: float = 30.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run ``body(*args)`` on ``world_size`` processes and return what each returned, rank by rank.

    A rank has the caller's environment and warning filters, one thread, the same random numbers as every other rank and
    every other time, and a working directory that vanishes. What the ranks print is printed here when they have ended.

    Args:
        body: a function of a module, or a ``functools.partial`` of one; it is pickled by name.
        timeout: seconds for all ranks together, from when the last one has started.
        pg_timeout: seconds a collective may take, after which it raises in the ranks that wait.
        return_exceptions: as in ``asyncio.gather``: an exception, or ``RankDied``, stands in the list as that rank's
            result, and the other ranks go on. Else the first one is raised here and the other ranks are killed.

    Raises:
        TimeoutError: some ranks did not finish; it names them and shows where each one stood.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED + [name for name in _PRELOADED_IF_IN_USE if name in sys.modules])
    job = pickle.dumps((body, args, _filters(), world_size, timeout, pg_timeout))
    environ = {**os.environ, **_torchrun_environ(world_size)}
    ranks: list[_Rank] = []
    with TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                with there:
                    process = context.Process(target=_rank_main, args=(rank, folder, environ, job, there))
                    process.start()
                ranks.append(_Rank(rank, process, here, Path(folder, f"rank{rank}.log")))
            return _collect(ranks, timeout, return_exceptions)
        finally:
            for each in ranks:
                each.connection.close()
                each.process.kill()
                each.process.join()
                if printed := each.printed():
                    print(f"--- printed by rank {each.rank} ---\n{printed}", end="")


@dataclass
class _Rank:
    """A rank as its parent sees it."""

    rank: int
    process: BaseProcess
    connection: Connection
    log: Path

    def printed(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def outcome(self) -> tuple[bool, Any]:
        """Whether the rank raised, and its exception or else its result; blocks until it is there."""
        try:
            raised, outcome, where = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(_TO_LEAVE)
            raised, outcome, where = True, RankDied(self.rank, self.process.exitcode or 0), ""
        if raised:
            where = f"in rank {self.rank}:\n{where}--- printed by rank {self.rank} ---\n{self.printed()}"
            outcome.__cause__ = RemoteTraceback(where)
        return raised, outcome


def _collect(ranks: list[_Rank], timeout: float, return_exceptions: bool) -> list[Any]:
    outcomes: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while waiting := [each for each in ranks if each.rank not in outcomes]:
        ready = wait([each.connection for each in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _hung(waiting, timeout)
        for each in (each for each in waiting if each.connection in ready):
            raised, outcomes[each.rank] = each.outcome()
            if raised and not return_exceptions:
                raise outcomes[each.rank]
    for each in ranks:
        each.connection.close()  # all have finished: they may leave
    for each in ranks:
        each.process.join(_TO_LEAVE)
        if (code := each.process.exitcode) != 0 and not isinstance(outcomes[each.rank], RankDied):
            raise RuntimeError(f"rank {each.rank} had its result, then left with exit code {code}:\n{each.printed()}")
    return [outcomes[each.rank] for each in ranks]


def _hung(ranks: list[_Rank], timeout: float) -> TimeoutError:
    for each in ranks:
        if each.process.pid and each.process.is_alive():
            os.kill(each.process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # for faulthandler to write the stacks
    names = ", ".join(str(each.rank) for each in ranks)
    stacks = "\n".join(f"--- rank {each.rank} printed, and stood at ---\n{each.printed()}" for each in ranks)
    return TimeoutError(f"not finished after {timeout:g} s: rank {names}\n{stacks}")


def _rank_main(rank: int, folder: str, environ: dict[str, str], job: bytes, parent: Connection) -> None:
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # or a kill loses it
    # faulthandler's own handler runs in C: it shows the stack of a rank that is blocked inside gloo, too.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # The server keeps the environment of its own start; the caller's may have changed since.
    os.environ.clear()
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank), ROLE_RANK=str(rank))
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        body, args, filters, world_size, timeout, pg_timeout = pickle.loads(job)
        faulthandler.dump_traceback_later(timeout + 2 * _TO_LEAVE, exit=True)  # should the parent be gone
        warnings.resetwarnings()
        for one in reversed(filters):
            warnings.filterwarnings(*one)
        store, limit = dist.FileStore(f"{folder}/store", world_size), timedelta(seconds=pg_timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        message = pickle.dumps((False, body(*args), ""))
    # All of them, as nothing may end a rank unsaid: SystemExit and pytest's own are no Exception. The parent decides.
    except BaseException as error:
        message = pickle.dumps((True, _picklable(error), traceback.format_exc()))
    parent.send_bytes(message)
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()  # until all have finished: a rank that leaves closes sockets that a slower one still reads
    if dist.is_initialized():
        dist.destroy_process_group()


def _torchrun_environ(world_size: int) -> dict[str, str]:
    """What torchrun sets the same on every rank of one host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"], str(world_size))
    group = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": f"ranks-{port}"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    # gloo would choose the interface by the host's name, which fails on some machines.
    return {**world, **group, **master, "GLOO_SOCKET_IFNAME": "lo"}


def _filters() -> list[tuple[Any, ...]]:
    """The warning filters in force, each as the arguments of ``warnings.filterwarnings``."""
    return [
        (action, getattr(message, "pattern", ""), category, getattr(module, "pattern", module or ""), line)
        for action, message, category, module, line in warnings.filters
    ]


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")

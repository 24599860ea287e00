"""Two hosts on one machine: two network namespaces joined by a wire whose speed is set and whose bytes are counted.

Needs root and iproute2 (`ip`, `tc`). The wire is a veth pair and leads nowhere else; the kernel counts on each of its
ends what really crossed (`wire_bytes`), and a token bucket (`tc ... tbf`) makes it as slow as asked.
"""

import ctypes
import datetime
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

_PREFIX = "distkit"
_NETNS = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """Where a rank runs.

    Args:
        namespace: name of its network namespace; None for the machine's own network.
        device: the network device that its traffic takes.
        address: of that device.
    """

    namespace: str | None = None
    device: str = "lo"
    address: str = "127.0.0.1"

    def enter(self) -> None:
        """Move this process into the namespace, for good; before it has made a thread or a socket."""
        if self.namespace is None:
            return
        with (_NETNS / self.namespace).open() as namespace:
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {self.namespace}")


@functools.cache
def why_not() -> str | None:
    """What two hosts on this machine lack, or None when they can be made."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "two hosts on one machine need root and iproute2: not root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"two hosts on one machine need root and iproute2: no `{'`, `'.join(missing)}` on the path"
    # A container's root may lack the right to make a namespace: only trying tells.
    name = _new_name()
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    _delete(name)
    return f"two hosts on one machine need root and iproute2: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def two_hosts(rate: str | None = None) -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a wire of `rate` (as `tc` writes it: "1gbit", "200mbit"; None: as fast as it goes).

    Raises:
        RuntimeError: without root or iproute2.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    _delete_stale()
    hosts = (Host(_new_name(), "wire", "10.77.0.1"), Host(_new_name(), "wire", "10.77.0.2"))
    here, there = (host.namespace for host in hosts)
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", "wire", "netns", here, "type", "veth", "peer", "name", "wire", "netns", there)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", host.namespace, "link", "set", device, "up")
            if rate is not None:  # what waits longer than the latency is dropped, so the bucket holds a full window
                shape = f"qdisc add dev wire root tbf rate {rate} burst 512kb latency 50ms"
                _call("tc", "-n", host.namespace, *shape.split())
        yield hosts
    finally:
        for host in hosts:  # the wire goes with its ends
            _delete(host.namespace)


@contextmanager
def one_host() -> Iterator[tuple[Host]]:
    """One host whose loopback nobody else uses, so that its counter is ours; without root the machine's own."""
    if why_not():
        yield (Host(),)
        return
    _delete_stale()
    host = Host(_new_name())
    try:
        _ip("netns", "add", host.namespace)
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield (host,)
    finally:
        _delete(host.namespace)


def run_on(hosts: tuple[Host, ...], world_size: int, body: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    """Run `body(host, *args)` on `world_size` ranks spread over the hosts in blocks; their results, rank by rank.

    Each rank is a fresh process with one thread and a default gloo group.

    Raises:
        RuntimeError: a rank raised, died, or all were not done within `timeout` seconds; no rank outlives the call.
    """
    context = get_context("spawn")
    ranks, pipes = [], []
    meeting = tempfile.mkdtemp()  # the ranks meet in a file: nothing of that crosses the wire
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            host = hosts[rank * len(hosts) // world_size]
            where = (rank, world_size, f"{meeting}/store", timeout)
            process = context.Process(target=_rank, args=(theirs, host, where, body, args), daemon=True)
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        return _gather(pipes, timeout)
    finally:
        for process in ranks:
            process.kill()  # those that are done have nothing to lose: their result is here
        for process in ranks:
            process.join()
        shutil.rmtree(meeting)


def as_torchrun_tells_it(hosts: int) -> None:
    """Set the environment that torchrun sets, for a Trainer within a rank; `hosts` have as many ranks each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    of_host = world_size // hosts
    environment = {
        "RANK": rank,
        "GROUP_RANK": rank // of_host,
        "LOCAL_RANK": rank % of_host,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": of_host,
        "MASTER_ADDR": "localhost",  # nobody asks there: the group is made already
        "MASTER_PORT": 1,
        "TORCHELASTIC_RUN_ID": "benchmark",
    }
    os.environ.update({name: str(value) for name, value in environment.items()})


def wire_bytes(host: Host) -> int:
    """Bytes that `host`'s device has sent so far, link headers and acknowledgements included.

    Asks for this process's own namespace: to be called by a rank that runs on `host`.
    """
    devices = Path("/proc/thread-self/net/dev").read_text()
    found = re.search(rf"^\s*{host.device}:(.*)$", devices, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no network device {host.device} here; call it from a rank on that host")
    return int(found[1].split()[8])


def _rank(
    result: Connection,
    host: Host,
    where: tuple[int, int, str, float],
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, world_size, meeting, timeout = where
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # dies with its parent, however that dies
    parent = parent_process()
    if parent is None or not parent.is_alive():  # it died before
        return
    try:
        host.enter()
        # By name: to look up the host's own name fails on some machines.
        os.environ["GLOO_SOCKET_IFNAME"] = host.device
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(meeting, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        try:
            answer = body(host, *args)
        finally:
            dist.destroy_process_group()
        result.send((True, answer))
    except BaseException:
        result.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def _gather(pipes: list[Connection], timeout: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks must be done within {timeout} s, {len(open_pipes)} of {len(pipes)} were not")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                done, answers[rank] = pipes[rank].recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word; its standard error tells more") from None
            if not done:
                raise RuntimeError(answers[rank])
    return [answers[rank] for rank in range(len(pipes))]


def _new_name() -> str:
    return f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"


def _ip(*words: str | None) -> None:
    _call("ip", *words)


def _call(*words: str | None) -> None:
    command = [word or "" for word in words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _delete(namespace: str | None) -> None:
    """Delete if it is there; says nothing if not, for it is called on the way out of any failure."""
    if namespace is not None and (_NETNS / namespace).exists():
        subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _delete_stale() -> None:
    """Delete what killed processes left behind."""
    for path in _NETNS.glob(f"{_PREFIX}-*-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            _delete(path.name)

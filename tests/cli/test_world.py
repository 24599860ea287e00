"""The ranks of a command end without a race against the threads of the backend."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, torch
from lightning_distkit.cli.world import world

def threads():
    return [open(f"/proc/self/task/{each}/comm").read().strip() for each in os.listdir("/proc/self/task")]

with world(torch.device("cpu")):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    assert "pt_gloo_runloop" in threads()
    del ddp
assert not [each for each in threads() if "gloo" in each], threads()
"""


def test_no_thread_of_the_backend_outlives_the_world() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr

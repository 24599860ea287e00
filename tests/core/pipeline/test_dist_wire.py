"""Between two hosts crosses what must: activations one way, gradients the other; headers are under a hundredth."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.hosts import Host, run_on, two_hosts, wire_bytes
from lightning_distkit.core.pipeline.dist import DistributedPipe
from tests.hosts import needs_two_hosts

pytestmark = needs_two_hosts

ROWS, WIDTH, FLOAT32, N_STEPS = 256, 1024, 4, 4
ACTIVATIONS = ROWS * WIDTH * FLOAT32  # bytes of a batch between two layers, and of their gradients


def bytes_a_step(host: Host) -> dict[str, tuple[float, float]]:
    """Of each way to train, what this rank sent in a step: by the ledger and by the network device."""
    torch.set_num_threads(1)
    found = {}
    x = torch.randn(ROWS, WIDTH)
    for name, schedule in (("call", "gpipe"), ("loss", "1f1b"), ("word", "gpipe")):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        outputs = "last" if name == "word" else "all"
        pipe = DistributedPipe(module, 4, "except_last", schedule=schedule, balance=[1, 1], outputs=outputs)

        def step(pipe: DistributedPipe = pipe, name: str = name) -> None:
            out = pipe.loss(x, loss=torch.mean) if name == "loss" else pipe(x)
            (out if name == "loss" or out.dim() == 0 else out.square().mean()).backward()

        def settled(pipe: DistributedPipe = pipe) -> tuple[int, int]:
            dist.barrier()
            time.sleep(0.1)  # the last acknowledgements
            return pipe.ledger.total.nbytes, wire_bytes(host)

        for _ in range(2):
            step()
        before = settled()
        for _ in range(N_STEPS):
            step()
        after = settled()
        found[name] = ((after[0] - before[0]) / N_STEPS, (after[1] - before[1]) / N_STEPS)
    return found


def test_what_crosses_between_two_hosts_is_activations_and_gradients() -> None:
    with two_hosts("1gbit") as hosts:
        first, last = run_on(hosts, 2, bytes_a_step, timeout=120)
    for name, must in {
        "call": (ACTIVATIONS, ACTIVATIONS + ACTIVATIONS),  # back come the output, as every rank gets it, and gradients
        "loss": (ACTIVATIONS, ACTIVATIONS),
        "word": (ACTIVATIONS, ACTIVATIONS),
    }.items():
        for (ledger, device), payload in zip((first[name], last[name]), must, strict=True):
            assert payload <= ledger < 1.01 * payload, name
            assert device == pytest.approx(payload, rel=0.05), name

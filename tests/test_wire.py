"""The ledger tells the truth: what it counts is what a network device saw cross the wire between two hosts."""

import subprocess
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hosts import Host, as_torchrun_tells_it, run_on, two_hosts, wire_bytes
from lightning_distkit import CommHookDDPStrategy, PowerSGDDDPStrategy
from lightning_distkit.callbacks import CompressionStatsLogger
from lightning_distkit.core.compression import HOOKS, PowerSGDState, attach, ledger_of
from tests.hosts import needs_two_hosts

pytestmark = needs_two_hosts

# Large factors: an all-reduce costs gloo about 1.6 kB beside its payload, which is 66 kB or more here.
N_MATRICES, N, M, MATRIX_APPROXIMATION_RANK = 4, 1024, 1024, 16
FLOAT32 = 4  # bytes
# On a wire without a limit small segments go out as they come, and headers and acknowledgements make up to 4 %.
RATE = "1gbit"


def bytes_a_step(host: Host, name: str, n_steps: int = 4) -> tuple[float, float]:
    """One rank's bytes a step by the ledger, and its host's by the network device."""
    torch.manual_seed(0)
    layers = [nn.Linear(M, N, bias=False) for _ in range(N_MATRICES)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    arguments = {}
    if HOOKS[name].make_state is PowerSGDState:
        arguments = {"matrix_approximation_rank": MATRIX_APPROXIMATION_RANK, "start_powerSGD_iter": 2}
    state, hook = HOOKS[name](None, **arguments)
    attach(model, state, hook)
    ledger = ledger_of(state)

    def train(n: int) -> None:
        for _ in range(n):
            model.zero_grad()
            model(torch.randn(2, M)).square().mean().backward()
        # All have sent all; then a moment for what is still on its way, the last acknowledgements.
        dist.barrier()
        time.sleep(0.05)

    train(4)  # the meeting, the model's broadcast, the rebuilding of buckets, the steps before compression
    sent, crossed = ledger.total.nbytes, wire_bytes(host)
    train(n_steps)
    return (ledger.total.nbytes - sent) / n_steps, (wire_bytes(host) - crossed) / n_steps


def bytes_of_hooks(host: Host, names: list[str]) -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    return {name: bytes_a_step(host, name) for name in names}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, tuple[float, float]]]:
    """Rank by rank, what each hook sent: ledger, device."""
    with two_hosts(RATE) as hosts:
        return run_on(hosts, 2, bytes_of_hooks, list(HOOKS), timeout=120)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, tuple[float, float]]]:
    """The same with two ranks a host: of the ring's four links one leads to the other host."""
    with two_hosts(RATE) as hosts:
        return run_on(hosts, 4, bytes_of_hooks, ["powersgd"], timeout=120)


def all_reduced(payload: float, world_size: int) -> float:
    """What a rank sends in a ring all-reduce: (W-1)/W of the payload to add up, and as much to hand round."""
    return 2 * (world_size - 1) / world_size * payload


@pytest.mark.parametrize("name", [name for name in HOOKS if name != "noop"])
def test_the_ledger_counts_what_crosses_the_wire(name: str, two_ranks: list[dict[str, tuple[float, float]]]) -> None:
    for rank in two_ranks:
        ledger, device = rank[name]
        assert device == pytest.approx(ledger, rel=0.05)


@pytest.mark.parametrize("world_size", [2, 4])
def test_powersgd_sends_r_columns_of_n_and_of_m_numbers_a_matrix(
    world_size: int, request: pytest.FixtureRequest
) -> None:
    predicted = all_reduced(N_MATRICES * MATRIX_APPROXIMATION_RANK * (N + M) * FLOAT32, world_size)
    for rank in request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world_size]):
        ledger, device = rank["powersgd"]
        assert ledger == pytest.approx(predicted, rel=0.01)
        assert device == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(("name", "nbytes"), [("allreduce", FLOAT32), ("fp16", 2), ("bf16", 2)])
def test_uncompressed_gradients_cross_whole(
    name: str, nbytes: int, two_ranks: list[dict[str, tuple[float, float]]]
) -> None:
    for rank in two_ranks:
        assert rank[name][1] == pytest.approx(all_reduced(N_MATRICES * N * M * nbytes, 2), rel=0.05)


def test_beside_its_hook_ddp_sends_nothing(two_ranks: list[dict[str, tuple[float, float]]]) -> None:
    for rank in two_ranks:
        ledger, device = rank["noop"]
        assert ledger == 0
        assert device < 2000  # the barrier


class Counting(CompressionStatsLogger):
    """Reads the device's counter beside each log."""

    def __init__(self, host: Host) -> None:
        super().__init__(every_n_steps=4, figure=False)
        self.host = host
        self.crossed: list[int] = []

    def _log(self, trainer: Any, pl_module: Any) -> None:
        super()._log(trainer, pl_module)
        dist.barrier()
        time.sleep(0.05)  # what is still on its way, the last acknowledgements
        self.crossed.append(wire_bytes(self.host))


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(M, N, bias=False) for _ in range(N_MATRICES)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def logged_and_crossed(host: Host, name: str) -> tuple[list[float], list[int]]:
    """What a fit logs as bytes, and the device's counter, at the same steps; one rank a host."""
    as_torchrun_tells_it(hosts=2)
    torch.set_num_threads(1)
    powersgd = {"matrix_approximation_rank": MATRIX_APPROXIMATION_RANK, "start_powerSGD_iter": 2}
    strategy = (
        PowerSGDDDPStrategy(hook=name, **powersgd)
        if HOOKS[name].make_state is PowerSGDState
        else CommHookDDPStrategy(name)
    )
    stats = Counting(host)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    loader = DataLoader(TensorDataset(torch.randn(32, M)), batch_size=2)
    fit = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        callbacks=[stats],
        max_epochs=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        **quiet,
    )
    fit.fit(Wide(), loader)
    return [each["total_nbytes"] for each in stats.history], stats.crossed


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("name", HOOKS)
def test_the_logged_bytes_are_those_that_crossed(name: str) -> None:
    with two_hosts(RATE) as hosts:
        for logged, crossed in run_on(hosts, 2, logged_and_crossed, name, timeout=120):
            assert len(logged) == 4
            # From the second log on: before it the model was broadcast.
            sent = logged[-1] - logged[0]
            assert crossed[-1] - crossed[0] == pytest.approx(sent, rel=0.05, abs=20_000)  # the barriers


def test_no_host_is_left_behind_when_a_rank_raises() -> None:
    with pytest.raises(RuntimeError, match="unknown_hook"), two_hosts() as hosts:
        run_on(hosts, 2, bytes_of_hooks, ["unknown_hook"], timeout=60)
    names = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(str(host.namespace) in names for host in hosts)

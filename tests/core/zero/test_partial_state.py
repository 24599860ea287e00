"""What is saved of a part of a module is as large as the part."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_distkit.core.collectives import Group
from lightning_distkit.core.zero import ZeroOptimizer, shard_gradients

MB = 2**20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        self.heads = nn.ModuleList([nn.Linear(1024, 8), nn.Linear(1024, 8)])
        self.heads[1].weight = self.heads[0].weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.heads[0](self.body(x)))


@pytest.fixture(params=[1, 2])
def net(request: pytest.FixtureRequest) -> Net:
    module = Net()
    optimizer = ZeroOptimizer(torch.optim.SGD, module.parameters(), Group(), lr=0.1)
    if request.param == 2:
        shard_gradients(optimizer)
    assert {param.untyped_storage().data_ptr() for param in module.parameters()} == {
        optimizer.buckets[0].flat.data_ptr()
    }
    return module


def saved(state: object, folder: Path) -> int:
    torch.save(state, folder / "state.pt")
    return (folder / "state.pt").stat().st_size


def nbytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def test_a_part_is_saved_without_its_bucket(net: Net, tmp_path: Path) -> None:
    for part in (net.heads[0], net.body[0], net.heads[1]):
        assert saved(part.state_dict(), tmp_path) < nbytes(part) + 16 * 1024
    assert torch.equal(torch.load(tmp_path / "state.pt")["weight"], net.heads[1].weight)


def test_the_whole_is_saved_once_and_not_copied_before(net: Net, tmp_path: Path) -> None:
    state = net.state_dict()
    assert all(state[name].data_ptr() == param.data_ptr() for name, param in net.named_parameters())
    assert saved(state, tmp_path) < nbytes(net) + 16 * 1024
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in torch.load(tmp_path / "state.pt").items())


def test_what_is_tied_in_a_part_stays_tied(net: Net, tmp_path: Path) -> None:
    state = net.heads.state_dict()
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr() != net.heads[0].weight.data_ptr()
    assert saved(state, tmp_path) < nbytes(net.heads) + 16 * 1024


def test_parameters_themselves_are_given_if_they_are_asked_for(net: Net) -> None:
    assert net.heads[0].state_dict(keep_vars=True)["weight"] is net.heads[0].weight


def test_the_module_can_be_copied_and_pickled(net: Net, tmp_path: Path) -> None:
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert torch.equal(copied.heads[0].weight, net.heads[0].weight)
    assert saved(copied.heads[0].state_dict(), tmp_path) < nbytes(copied.heads[0]) + 16 * 1024

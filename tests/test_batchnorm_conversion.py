"""SyncBatchNorm: its copies, and what becomes of the layers of a model that is converted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import samestep
from samestep.comm.base import Communicator
from samestep.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from samestep.testing.ranks import run_threads

CHANNELS = 3


def test_copies_keep_the_group_and_pickles_mean_the_default_one() -> None:
    def rank(comm: Communicator) -> None:
        bn = SyncBatchNorm(CHANNELS, process_group=comm, momentum=None)
        model = nn.Sequential(bn)
        for twin in (copy.copy(bn), copy.deepcopy(bn), copy.deepcopy(model)[0]):
            assert twin.process_group is comm
            assert twin.momentum is None
        assert copy.copy(bn).weight is bn.weight
        assert copy.deepcopy(bn).weight is not bn.weight
        loaded = pickle.loads(pickle.dumps(model))[0]
        assert loaded.process_group is None
        assert torch.equal(loaded.weight, bn.weight)
        assert bn.process_group is comm

    run_threads(rank, 2)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(CHANNELS, eps=0.5, momentum=None)
        self.again = self.first
        self.inner = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm2d(CHANNELS, affine=False)])
        self.frozen = nn.BatchNorm3d(CHANNELS, track_running_stats=False).eval()
        self.torchs = nn.SyncBatchNorm(CHANNELS, process_group="theirs")
        self.left = nn.InstanceNorm1d(CHANNELS)
        self.nothing: nn.Module | None
        self.register_module("nothing", None)


def test_conversion_reaches_every_layer_and_loses_nothing() -> None:
    model = Parts()
    old, names = model.first, list(model.state_dict())
    handle = old.register_forward_hook(lambda *_: None)
    old.qconfig = "kept"
    assert samestep.convert_sync_batchnorm(model) is model
    kinds = {name: type(part) for name, part in model.named_modules(remove_duplicate=False)}
    ours = {name for name, kind in kinds.items() if kind is SyncBatchNorm}
    assert ours == {"first", "again", "inner.1", "frozen", "torchs"}
    assert not any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())
    assert list(model.state_dict()) == names
    assert model.again is model.first
    assert model.first.weight is old.weight
    assert model.first.running_mean is old.running_mean
    assert (model.first.eps, model.first.momentum, model.first.qconfig) == (0.5, None, "kept")
    assert model.inner[1].weight is None
    assert (model.frozen.training, model.inner[1].training) == (False, True)
    assert model.torchs.process_group == "theirs"
    assert model.first.process_group is None
    assert len(model.first._forward_hooks) == 1
    handle.remove()
    assert len(model.first._forward_hooks) == 0


def test_conversion_gives_the_group_and_converts_a_layer_itself() -> None:
    def rank(comm: Communicator) -> None:
        lone = nn.BatchNorm1d(CHANNELS)
        new = SyncBatchNorm.convert_sync_batchnorm(lone, comm)
        assert type(lone) is nn.BatchNorm1d
        assert type(new) is SyncBatchNorm
        assert new.process_group is comm
        new.bias = None
        assert lone.bias is not None
        again = convert_sync_batchnorm(new)
        assert isinstance(again, SyncBatchNorm)
        assert again.process_group is comm

    run_threads(rank, 1)


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def parametrised() -> nn.Module:
    bn = nn.BatchNorm1d(CHANNELS)
    nn.utils.parametrize.register_parametrization(bn, "weight", nn.Tanh())
    return bn


def patched() -> nn.Module:
    bn = nn.BatchNorm1d(CHANNELS)
    bn.forward = lambda input: input  # type: ignore[method-assign]
    return bn


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Activated(CHANNELS), r"1 \(Activated\) .* has a forward of its own"),
        (patched, "has a forward of its own"),
        (parametrised, "is parametrised"),
        (nn.LazyBatchNorm1d, "is not initialised yet"),
    ],
)
def test_conversion_refuses_what_it_would_break_and_changes_nothing(make: Callable[[], Any], reason: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(CHANNELS), make())
    with pytest.raises(TypeError, match=reason):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_it_is_found_where_torchs_is_looked_for() -> None:
    assert samestep.SyncBatchNorm is SyncBatchNorm
    assert issubclass(SyncBatchNorm, _BatchNorm)
    assert repr(SyncBatchNorm(CHANNELS, eps=0.5)) == repr(nn.SyncBatchNorm(CHANNELS, eps=0.5))

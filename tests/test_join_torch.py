"""join() beside torch's class, and within torch's own Join."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import equal, grads, linear, mlp, samples
from test_join import batch, same, state
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from samestep.comm.base import Communicator
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes


def test_as_torchs_class_and_with_an_optimizer_that_divides_its_work() -> None:
    for wrong in run_processes(compare, 2):
        assert wrong == []


def compare(comm: Communicator) -> list[str]:
    """Train with both classes; return in what they differ. Two ranks: each sum has one order."""
    ours: Callable[..., Any] = DistributedDataParallel
    theirs: Callable[..., Any] = nn.parallel.DistributedDataParallel
    wrong = []
    for counts in ((1, 4), (3, 1), (0, 2), (2, 2)):
        for options in ({}, {"divide_by_initial_world_size": False}):
            for every in (1, 2):
                case = (counts[comm.rank], options, every)
                if not same([train(make, comm.rank, *case) for make in (theirs, ours)]):
                    wrong.append(f"{counts} {options} {every}")
    for counts in ((1, 4), (3, 1)):
        both, plain = train_with_zero(comm.rank, counts), train_with_all_state(comm.rank, counts)
        if not all(torch.allclose(a, b) for a, b in zip(both, plain, strict=True)):
            wrong.append(f"ZeroRedundancyOptimizer {counts}")
    model = ours(linear())
    assert model.join_process_group is dist.group.WORLD
    with model.join():
        again = pickle.loads(pickle.dumps(model))
        assert not again._join_config.enable
    return wrong


def train(make: Callable[..., Any], rank: int, count: int, options: dict[str, bool], every: int) -> list[Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model = make(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with model.join(**options):
        for number in range(count):
            x = samples(4, 10 * rank + number, dtype=torch.float32)
            if number % every == every - 1:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            elif count % every == 0:  # torch's class drops what was accumulated when a rank leaves
                with model.no_sync():
                    model(x).square().mean().backward()
    return [p.detach().clone() for p in net.parameters()]


def train_with_zero(rank: int, counts: tuple[int, ...]) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of a deprecation when it is imported

    model = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with Join([model, optimizer], divide_by_initial_world_size=True):
        for number in range(counts[rank]):
            model.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()
    assert not model._join_config.enable
    return state(model.module)


def train_with_all_state(rank: int, counts: tuple[int, ...]) -> list[Tensor]:
    """Do the same in one process."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(max(counts)):
        optimizer.zero_grad()
        for other, count in enumerate(counts):
            if number < count:
                (model(batch(other, number)).square().mean() / len(counts)).backward()
        optimizer.step()
    return state(model)


def test_gradients_of_two_models_in_one_context() -> None:
    assert run_processes(two_models, 2) == [True, True]


def two_models(comm: Communicator) -> bool:
    models = [DistributedDataParallel(linear(seed)) for seed in (1, 2)]
    with Join([*models]):
        for number in range(1 + comm.rank):
            for model in models:
                model.zero_grad()
                model(batch(comm.rank, number)).sum().backward()
    local = linear(1)
    (local(batch(1, 1)).sum() / 2).backward()
    return comm.rank == 0 or equal(grads(local), grads(models[0]))

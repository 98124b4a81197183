"""Communication hooks where ranks skip steps or have no batches left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import equal, grads, linear, mlp, samples, wrap
from test_comm_hooks import mean
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.parallel.averaging import allreduce_hook
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes, run_threads

HOOKS: dict[str, Callable[..., Any]] = {"user": mean, "ours": allreduce_hook}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("by_initial", [True, False])
def test_join(hook: Callable[..., Any], weighted: bool, by_initial: bool) -> None:
    counts = (1, 3, 2)

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm, bucket_cap_mb=0.0)
        model.register_comm_hook(comm, hook, averages=True)
        seen: list[Tensor | None] = []
        with model.join(divide_by_initial_world_size=by_initial):
            for number in range(counts[comm.rank]):
                model.zero_grad()
                loss = model(samples(2, comm.rank + 10 * number)).square().mean()
                model.backward(loss, weight=1 + comm.rank if weighted else None)
                seen = grads(model)
        return seen

    results = run_threads(rank, 3)
    for last, training in ((1, [1]), (2, [1, 2])):
        number = counts[last] - 1
        weights = {r: 1 + r if weighted else 1 for r in training}
        total = sum(weights.values()) if weighted or not by_initial else 3
        local = mlp()
        for r in training:
            (local(samples(2, r + 10 * number)).square().mean() * weights[r] / total).backward()
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(results[last], grads(local), strict=True))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_skip_step(hook: Callable[..., Any]) -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm, bucket_cap_mb=0.0)
        model.register_comm_hook(comm, hook)
        for number in range(4):
            model.zero_grad()
            loss = model(samples(2, comm.rank)).sum()
            if number in (0, 2) and comm.rank == number % 3:
                model.skip_step()
            else:
                loss.backward()
            assert model.step_skipped == (number in (0, 2))
            assert (grads(model) == [None] * 4) == model.step_skipped
        return grads(model)

    results = run_threads(rank, 3)
    assert all(equal(result, results[0]) for result in results)


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_who_catches_a_hooks_error_may_skip() -> None:
    """All have been told of the error in the exchange of that step: there is no second one."""

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(linear(), comm)
        failing = [False]

        def hook(state: Communicator, bucket: Any) -> Any:
            if failing[0]:
                failing[0] = False
                raise ArithmeticError("no room")
            return mean(state, bucket)

        model.register_comm_hook(comm, hook)
        model(samples(2)).sum().backward()
        failing[0] = comm.rank == 1
        with pytest.raises(ArithmeticError if comm.rank == 1 else ReplicaError):
            model(samples(2)).sum().backward()
        model.skip_step()
        assert model.step_skipped
        model.zero_grad()
        model(samples(2, comm.rank)).sum().backward()
        return grads(model)

    results = run_threads(rank, 2)
    assert equal(*results)


def test_join_with_a_hook_of_torchs_that_keeps_state() -> None:
    first, second = run_processes(power_sgd, 2)
    assert first == second


def power_sgd(comm: Communicator) -> list[Any]:
    model = DistributedDataParallel(mlp(dtype=torch.float32))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for number in range(3 + 2 * comm.rank):
            optimizer.zero_grad()
            model(samples(3, comm.rank + 10 * number, dtype=torch.float32)).square().mean().backward()
            optimizer.step()
    assert model._get_ddp_logging_data()["join_uneven_inputs"]
    return [p.tolist() for p in model.parameters()]

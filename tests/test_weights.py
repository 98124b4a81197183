"""Weighted averaging: the gradient of the mean over all samples, whatever each rank's share was."""

from __future__ import annotations

import pytest
import torch
from models import equal, grads, linear, mlp, samples, wrap
from torch import Tensor

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_threads


@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (5, 0, 2), (0, 0, 1), (7,)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weights_make_uneven_shares_exact(counts: tuple[int, ...], accumulate: bool) -> None:
    whole = samples(sum(counts))
    reference = mlp()
    reference(whole).square().mean().backward()

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        start = sum(counts[: comm.rank])
        mine = whole[start : start + counts[comm.rank]]
        for _ in range(2):
            model.zero_grad()
            if accumulate:  # the first sample alone, the others together
                with model.no_sync():
                    backward(model, mine[:1])
                backward(model, mine[1:])
            else:
                backward(model, mine)
        return grads(model)

    def backward(model: DistributedDataParallel, batch: Tensor) -> None:
        loss = model(batch).square().mean() if len(batch) else None
        model.backward(loss, weight=len(batch))

    results = run_threads(rank, len(counts))
    for result in results:
        assert equal(result, results[0])
        for got, parameter in zip(result, reference.parameters(), strict=True):
            assert torch.allclose(got, parameter.grad, rtol=1e-12, atol=1e-15)  # type: ignore[arg-type]


def test_a_weighted_average_is_added_to_the_gradients_from_before() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        model.backward(model(samples(2, comm.rank)).sum(), weight=1 + comm.rank)
        before = grads(model)
        model.backward(model(samples(3, comm.rank + 10)).sum(), weight=5 - comm.rank)
        after = grads(model)
        model.zero_grad()
        model.backward(model(samples(3, comm.rank + 10)).sum(), weight=5 - comm.rank)
        for a, b, c in zip(before, after, grads(model), strict=True):
            assert torch.equal(a + c, b)  # type: ignore[operator, arg-type]

    run_threads(rank, 2)


def test_a_nan_loss_of_weight_0_is_not_looked_at() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        model.backward(model(samples(2 * (1 - comm.rank))).mean(), weight=2 * (1 - comm.rank))
        assert all(g is not None and bool(g.isfinite().all()) for g in grads(model))

    run_threads(rank, 2)


def test_a_loss_that_knows_no_parameter_counts_with_its_weight() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(linear(), comm)
        for _ in range(2):
            model.zero_grad()
            apart = torch.ones((), dtype=torch.float64, requires_grad=True)
            loss = model(samples(3)).mean() if comm.rank == 0 else apart * 2
            model.backward(loss, weight=3 - 2 * comm.rank)
        return grads(model)

    local = linear()
    local(samples(3)).mean().backward()
    for result in run_threads(rank, 2):
        for got, parameter in zip(result, local.parameters(), strict=True):
            assert torch.allclose(got, parameter.grad * 3 / 4, rtol=1e-14)  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    ("weights", "message"),
    [((1, None), "1 of 2 ranks gave a weight"), ((0, 0), "weights add up to 0")],
)
def test_ranks_that_disagree_about_weights_all_raise(weights: tuple[float | None, ...], message: str) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        with pytest.raises(ReplicaError, match=message):
            model.backward(model(samples(2)).sum(), weight=weights[comm.rank])
        model.zero_grad()
        model.backward(model(samples(2)).sum(), weight=1)
        assert all(g is not None for g in grads(model))

    run_threads(rank, 2)


@pytest.mark.parametrize(
    ("loss", "weight", "message"),
    [
        (torch.ones(()), -1, "rank 0: expected a weight of at least 0, got -1"),
        (torch.ones(()), float("nan"), "expected a weight of at least 0, got nan"),
        (torch.ones(2), 1, r"a weight of 1 needs a scalar loss, got a loss of shape \[2\]"),
        (None, 2, "a weight of 2 needs a scalar loss, got no loss"),
        (None, None, "a backward without a loss needs weight=0"),
    ],
)
def test_a_weight_or_loss_that_means_nothing_is_refused(
    loss: Tensor | None, weight: float | None, message: str
) -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            wrap(linear(), comm).backward(loss, weight=weight)

    run_threads(rank, 1)


def test_a_weight_may_be_a_tensor() -> None:
    def rank(comm: Communicator) -> None:
        model, twin = wrap(linear(), comm), wrap(linear(), comm)
        model.backward(model(samples(2, comm.rank)).mean(), weight=torch.tensor(1 + comm.rank))
        twin.backward(twin(samples(2, comm.rank)).mean(), weight=1 + comm.rank)
        assert equal(grads(model), grads(twin))

    run_threads(rank, 2)


def test_what_is_no_loss_is_refused() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(TypeError, match="rank 0: expected a tensor as loss, got float"):
            wrap(linear(), comm).backward(0.5, weight=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="rank 0: expected a weight of at least 0, got many"):
            wrap(linear(), comm).backward(torch.ones(()), weight="many")  # type: ignore[arg-type]

    run_threads(rank, 1)


def test_weights_and_none_do_not_mix_within_an_accumulation() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        with model.no_sync():
            model(samples(2)).sum().backward()
        with pytest.raises(ReplicaError, match="rank 0: this accumulation began with a backward without a weight"):
            model.backward(model(samples(2)).sum(), weight=1)

    run_threads(rank, 1)

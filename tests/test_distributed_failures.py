"""DistributedDataParallel after exceptions: usable on every rank, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Recorder, grads, linear, mlp, samples, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.testing.ranks import run_threads


class Failing(torch.autograd.Function):
    """Passes its input on, and fails in backward as often as it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: bool) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fail:
            raise ArithmeticError("no gradient here")
        return grad, None


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(1), linear(2)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if x.shape[0] == 0:
            raise ValueError("no samples")
        return self.second(torch.cat([Failing.apply(self.first(x), fail)] * 2, dim=1))


@pytest.mark.parametrize("cap", [None, 0.0])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_after_an_exception_in_backward_the_next_step_is_right(
    failing: set[int], learned: bool, cap: float | None
) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(Fragile(), comm, bucket_cap_mb=cap)
        if learned:
            model(samples(2)).sum().backward()
        model.zero_grad()
        loss = model(samples(2), fail=comm.rank in failing).sum()
        if comm.rank in failing:
            with pytest.raises(ArithmeticError, match="no gradient here"):
                loss.backward()
        elif len(failing) < comm.size:
            with pytest.raises(
                ReplicaError, match=rf"rank {comm.rank}: rank\(s\) \[{', '.join(map(str, failing))}\] left"
            ):
                loss.backward()
        for _ in range(2):
            model.zero_grad()
            model(samples(2, comm.rank)).sum().backward()
        mine = torch.stack([g.sum() for g in grads(model) if g is not None])
        assert len(mine) == 6
        assert bool((comm.all_gather(mine) == mine).all())
        reference = [wrap(Fragile(), comm)]
        reference[0](samples(2, comm.rank)).sum().backward()
        assert all(torch.allclose(a, b) for a, b in zip(grads(model), grads(reference[0]), strict=True))  # type: ignore[arg-type]

    run_threads(rank, 3)


def test_after_an_exception_in_forward_the_next_step_is_right() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(Fragile(), comm)
        for _ in range(2):
            with pytest.raises(ValueError, match="no samples"):
                model(samples(0))
            model(samples(2, comm.rank)).sum().backward()
        assert all(g is not None for g in grads(model))

    run_threads(rank, 2)


def test_an_exception_while_accumulating_exchanges_nothing() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(Fragile(), recorder)
        recorder.log.clear()
        with model.no_sync(), pytest.raises(ArithmeticError):
            model(samples(2), fail=True).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(samples(2)).sum().backward()
        assert recorder.log == []

    run_threads(rank, 1)


def test_a_backward_of_a_rank_without_a_graph_is_torchs_own_error() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        with torch.no_grad():
            output = model(samples(2))
        with pytest.raises(RuntimeError, match="does not require grad"):
            output.sum().backward()

    run_threads(rank, 1)


class Growing(nn.Module):
    """Runs its layer in more re-entrant checkpoints from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = mlp(0), linear(0)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.last(x)
        for _ in range(times):
            x = checkpoint(lambda x: self.layer(torch.cat([x, x], dim=1)), x, use_reentrant=True)
        return x


def test_a_gradient_that_comes_after_its_bucket_left_is_an_error_and_then_known() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(Growing(), comm, bucket_cap_mb=0.0)
        x = samples(2, comm.rank).requires_grad_()
        model(x, 1).sum().backward()
        with pytest.raises(ReplicaError, match=r"parameter layer.*another gradient after its bucket had left"):
            model(x, 2).sum().backward()
        while True:  # a parameter at a time becomes known
            model.zero_grad()
            try:
                model(x, 2).sum().backward()
                break
            except ReplicaError:
                continue
        local = Growing()
        for other in range(comm.size):
            (local(samples(2, other).requires_grad_(), 2).sum() / comm.size).backward()
        assert all(torch.allclose(a, b) for a, b in zip(grads(model), grads(local), strict=True))  # type: ignore[arg-type]

    run_threads(rank, 2)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.table, self.sometimes = linear(0), nn.Embedding(3, 2, sparse=True), linear(1)

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        if all_of_it:
            return self.always(x) + self.sometimes(x) + self.table(torch.tensor([0, 1]))
        result: Tensor = self.always(x)
        return result


def test_a_gradient_laid_aside_for_a_step_that_failed_does_not_come_back() -> None:
    def rank(comm: Communicator) -> None:
        module = Optional()
        model = wrap(module, comm)
        model(samples(2), True).sum().backward()
        # The gradients that no rank has this time are kept, but the step fails.
        if comm.rank == 1:
            with pytest.raises(ArithmeticError):
                module.always(Failing.apply(samples(2).requires_grad_(), True)).sum().backward()
        else:
            with pytest.raises(ReplicaError):
                model(samples(2), False).sum().backward()
        model.zero_grad()
        model(samples(2), False).sum().backward()
        assert [g is None for g in grads(model)] == [False, False, True, True, True]

    run_threads(rank, 2)

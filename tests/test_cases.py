"""What goes wrong elsewhere for those who train on several ranks, one short proof each; the whole kind is tested where
each says."""

from __future__ import annotations

import contextlib

import pytest
import torch
from models import Recorder, equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.errors import MismatchError, PeerLostError, ReplicaError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import RankError, run_processes, run_threads


def test_case_02_a_batch_more_on_one_rank() -> None:
    """With join() all go on; without, an error counts. See test_join.py and test_uneven.py."""

    def rank(comm: Communicator) -> Tensor:
        model = wrap(linear(), comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for number in range(2 + comm.rank):
                optimizer.zero_grad()
                model(samples(2, number)).sum().backward()
                optimizer.step()
        weight = model.module.weight.detach().clone()
        if comm.rank == 0:
            with pytest.raises(MismatchError, match=r"synchronised backward 4; a rank that is not in it has made 3"):
                comm.all_reduce(torch.ones(1))
        else:
            with pytest.raises(MismatchError, match=r"rank 1 is in its synchronised backward 4.*model.join\(\)"):
                model(samples(2)).sum().backward()
        return weight

    assert torch.equal(*run_threads(rank, 2))


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_case_03_nan_or_no_memory_on_one_rank() -> None:
    """One rank's bad step is skipped by all. See test_skip_step.py."""

    def rank(comm: Communicator) -> list[Tensor]:
        model = wrap(linear(), comm)
        optimizer = torch.optim.Adam(model.parameters())
        for number in range(4):
            optimizer.zero_grad()
            try:
                loss = model(samples(2, number)).sum()
                if number == 1 and comm.rank == 1:
                    loss = loss * torch.nan
                if number == 2 and comm.rank == 0:
                    raise torch.OutOfMemoryError
                if loss.isfinite():
                    loss.backward()
                else:
                    model.skip_step()
            except torch.OutOfMemoryError:
                model.skip_step()
            assert model.step_skipped == (number in (1, 2))
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    first, second = run_threads(rank, 2)
    assert all(map(torch.equal, first, second))
    assert all(bool(p.isfinite().all()) for p in first)


def test_case_04_an_error_on_one_rank_is_known_to_all_at_once() -> None:
    """Long before a deadline, and the error itself is what is read. See test_shm_failures.py, test_launch_kills.py."""
    with pytest.raises(RankError) as caught:
        run_processes(one_raises, 3, timeout_s=100)
    assert str(caught.value).startswith("rank 1: Traceback")
    assert "ArithmeticError: the cause" in str(caught.value)
    assert "rank 0" not in str(caught.value), "the others ended as they should"


def one_raises(comm: Communicator) -> None:
    model = DistributedDataParallel(mlp())
    for step in range(3):
        loss = model(samples(2)).square().sum()
        if step == 2 and comm.rank == 1:
            raise ArithmeticError("the cause")
        if step < 2:
            loss.backward()
        else:
            with pytest.raises(PeerLostError, match=r"rank 1"):
                loss.backward()


def test_case_05_the_mean_over_samples_not_over_ranks() -> None:
    """See test_weights.py."""

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(linear(), comm)
        mine = samples(5)[:1] if comm.rank == 0 else samples(5)[1:]
        model.backward(model(mine).square().mean(), weight=len(mine))
        return grads(model)

    whole = linear()
    whole(samples(5)).square().mean().backward()
    for result in run_threads(rank, 2):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(result, grads(whole), strict=True))  # type: ignore[arg-type]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = linear(1), linear(2), linear(3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if both else y


def test_case_06_unused_parameters_need_no_flag() -> None:
    """Unused on all ranks, a gradient stays None; on some, it counts as zero there. See test_parity.py."""

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Branches(), comm)
        for _ in range(2):
            model.zero_grad()
            model(samples(2, comm.rank), comm.rank == 0).sum().backward()
        return grads(model)

    first, second = run_threads(rank, 2)
    assert equal(first, second)
    assert first[4:] == [None, None]
    local = linear(2)
    (local(samples(2, 0)).sum() / 2).backward()
    assert equal(first[2:4], grads(local))


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_case_07_accumulation_in_every_combination(static_graph: bool, find_unused: bool, view: bool) -> None:
    """See test_parity.py, for the cross product with all else."""

    def rank(comm: Communicator) -> list[Tensor | None]:
        options = {"static_graph": static_graph, "find_unused_parameters": find_unused, "gradient_as_bucket_view": view}
        model = wrap(mlp(), comm, **options)
        for _ in range(3):
            model.zero_grad()
            with model.no_sync():
                model(samples(2, comm.rank)).sum().backward()
            model(samples(2, comm.rank + 2)).sum().backward()
        return grads(model)

    local = mlp()
    for number in range(4):
        (local(samples(2, number)).sum() / 2).backward()
    first, second = run_threads(rank, 2)
    assert equal(first, second)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(first, grads(local), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_case_08_no_sync_counts_where_backward_is_called(around: str) -> None:
    """See test_distributed.py."""

    def rank(comm: Communicator) -> bool:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        recorder.log.clear()
        with model.no_sync() if around == "forward" else contextlib.nullcontext():
            loss = model(samples(2)).sum()
        with model.no_sync() if around == "backward" else contextlib.nullcontext():
            loss.backward()
        return any(line.startswith("all_reduce") for line in recorder.log)

    assert run_threads(rank, 2) == [around == "forward"] * 2


def test_case_25_methods_of_the_module() -> None:
    """They are there, and gradients through them are averaged as forward's are. See test_correct_with.py."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.classes = linear(), 2

        def loss(self, x: Tensor) -> Tensor:
            return self.layer(x).sum()

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Net(), comm)
        assert model.classes == 2
        assert model.layer is model.module.layer
        assert model.loss.__name__ == "loss"
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'typo'"):
            _ = model.typo
        model.loss(samples(2, comm.rank)).backward()
        return grads(model)

    local = linear()
    for other in range(2):
        (local(samples(2, other)).sum() / 2).backward()
    for result in run_threads(rank, 2):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(result, grads(local), strict=True))  # type: ignore[arg-type]


def test_case_27_gradients_are_not_held_twice() -> None:
    """They are views of the buckets. See test_distributed.py."""

    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm)
        for _ in range(2):
            model.zero_grad()
            model(samples(2)).sum().backward()
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in buckets(model)}
        assert len(storages) == 1
        numbers = sum(p.numel() for p in model.parameters()) + 4 + 2 + 2  # and the control numbers behind them
        assert sum(storages.values()) == numbers * 8
        assert all(p.grad.untyped_storage().data_ptr() in storages for p in model.parameters() if p.grad is not None)

    run_threads(rank, 2)


def buckets(model: DistributedDataParallel) -> list[Tensor]:
    return [bucket.flat for bucket in model._reducer._buckets]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_case_31_double_backward_and_autograd_grad_are_right_or_refused() -> None:
    """See test_correct_with_autograd.py."""

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        with pytest.raises(ReplicaError, match=r"autograd.grad\(\) was called for parameter"):
            torch.autograd.grad(model(samples(2)).sum(), list(model.parameters()))
        model(samples(2)).sum().backward(create_graph=True)
        slopes = sum(p.grad.sum() for p in model.parameters() if p.grad is not None)
        with pytest.raises(ReplicaError, match="they are averages, which are not connected to a graph"):
            torch.autograd.grad(slopes, model.module[0].weight)
        model.zero_grad()
        penalty(model, samples(2, comm.rank)).backward()
        return grads(model)

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    local = mlp()
    for other in range(2):
        (penalty(local, samples(2, other)) / 2).backward()
    for result in run_threads(rank, 2):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(result, grads(local), strict=True))  # type: ignore[arg-type]

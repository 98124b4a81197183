"""Ring all-reduce: the schedule by itself (pure), and carried out over ranks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from samestep.comm.algorithms import Combine, Schedule, Step, chunk, ring, volume
from samestep.comm.base import Communicator, DoneWork, Work
from samestep.comm.interpreter import run_schedule
from samestep.comm.ops import Op, Recv, Send
from samestep.testing.ranks import run_processes, run_threads


def schedules(ranks: int) -> list[Schedule]:
    return [ring(ranks, rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", range(1, 14))
def test_each_send_has_its_receive_in_the_same_round(ranks: int) -> None:
    assert {len(schedule.steps) for schedule in schedules(ranks)} == {2 * (ranks - 1)}
    for steps in zip(*(schedule.steps for schedule in schedules(ranks)), strict=True):
        sends = [(rank, step.send_to, step.send_chunk) for rank, step in enumerate(steps)]
        receives = [(step.receive_from, rank, step.receive_chunk) for rank, step in enumerate(steps)]
        assert sorted(sends) == sorted(receives)
        assert all(source != target for source, target, _ in sends)
        assert all(step.send_chunk != step.receive_chunk for step in steps)
        assert len({step.combine for step in steps}) == 1


@pytest.mark.parametrize("ranks", range(1, 14))
def test_every_rank_ends_with_every_contribution_once(ranks: int) -> None:
    held = [[[rank] for _ in range(ranks)] for rank in range(ranks)]  # by rank and chunk: who is added up there
    for number in range(2 * (ranks - 1)):
        if number == ranks - 1:
            assert all(sorted(held[rank][rank]) == list(range(ranks)) for rank in range(ranks))
        before = [[list(who) for who in chunks] for chunks in held]
        for rank, schedule in enumerate(schedules(ranks)):
            step = schedule.steps[number]
            arriving = before[step.receive_from][step.receive_chunk]
            ours = held[rank][step.receive_chunk]
            held[rank][step.receive_chunk] = ours + arriving if step.combine is Combine.ADD else arriving
    # Equal lists on all ranks, order included: the same additions, so the same bits.
    for index in range(ranks):
        assert sorted(held[0][index]) == list(range(ranks))
        assert all(held[rank][index] == held[0][index] for rank in range(ranks))


def test_the_ring_of_three_step_by_step() -> None:
    add, copy = Combine.ADD, Combine.COPY
    assert ring(3, 0) == Schedule(
        ranks=3,
        rank=0,
        steps=(Step(2, 1, 1, 2, add), Step(1, 1, 0, 2, add), Step(0, 1, 2, 2, copy), Step(2, 1, 1, 2, copy)),
    )
    assert "Step(send_chunk=2, send_to=1, receive_chunk=1, receive_from=2" in repr(ring(3, 0))


@pytest.mark.parametrize("ranks", range(1, 10))
def test_volume_is_the_least_possible(ranks: int) -> None:
    for rank, schedule in enumerate(schedules(ranks)):
        assert volume(schedule, 7 * ranks) * ranks == 2 * (ranks - 1) * 7 * ranks
        for numel in range(4 * ranks):
            left, right = chunk(numel, ranks, rank), chunk(numel, ranks, (rank + 1) % ranks)
            expected = 2 * numel - len(left) - len(right)
            assert volume(schedule, numel) == expected
            assert abs(expected - 2 * numel * (ranks - 1) / ranks) < 2


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_ranks_that_are_not_there_are_refused(ranks: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not among {ranks} ranks"):
        ring(ranks, rank)


# Carried out.


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * numel + rank)
    magnitudes = 2.0 ** torch.randint(-8, 9, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * magnitudes).to(dtype)


def ring_sum(comm: Communicator, tensor: Tensor) -> Tensor:
    return run_schedule(comm, ring(comm.size, comm.rank), tensor)


def check_sums(results: list[Tensor], numel: int, dtype: torch.dtype) -> None:
    """All ranks hold the same bits, as near to the sum in float64 as that many roundings allow."""
    terms = torch.stack([values(rank, numel, dtype) for rank in range(len(results))]).double()
    bound = (len(results) - 1) * torch.finfo(dtype).eps * terms.abs().sum(0)
    assert all(result.dtype == dtype and torch.equal(result, results[0]) for result in results)
    assert bool(((results[0].double() - terms.sum(0)).abs() <= bound).all())


@pytest.mark.parametrize("ranks", range(1, 7))
def test_every_size_is_summed(ranks: int) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    sizes = range(4 * ranks + 4)
    by_rank = run_threads(
        lambda comm: [[ring_sum(comm, values(comm.rank, n, dtype)) for n in sizes] for dtype in dtypes], ranks
    )
    for index, dtype in enumerate(dtypes):
        for numel in sizes:
            check_sums([results[index][numel] for results in by_rank], numel, dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64], ids=str)
def test_whole_numbers_are_exact(dtype: torch.dtype) -> None:
    terms = torch.arange(44).reshape(4, 11).to(dtype)
    for result in run_threads(lambda comm: ring_sum(comm, terms[comm.rank].clone()), 4):
        assert torch.equal(result, terms.sum(0).to(dtype))


def test_in_place_whatever_the_strides() -> None:
    def on_rank(comm: Communicator) -> None:
        memory = torch.full((4, 6), float(comm.rank))
        gaps = torch.nn.Parameter(memory.t()[::2])
        assert ring_sum(comm, gaps) is gaps
        assert bool((memory[:, ::2] == 3).all())
        assert bool((memory[:, 1::2] == comm.rank).all())
        scalar = torch.tensor(1.5)
        assert float(ring_sum(comm, scalar)) == 4.5
        assert float(scalar) == 4.5

    run_threads(on_rank, 3)


class Wrapped(Communicator):
    """Counts what is sent, and blocks in `start` until the exchange is over, as some transports do."""

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner = inner
        self.sent = 0

    def _start(self, op: Op) -> Work:
        assert isinstance(op, Send | Recv)
        self.sent += op.tensor.numel() if isinstance(op, Send) else 0
        self._inner.start(op).wait()
        return DoneWork()

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        return self._inner.split(ranks)


@pytest.mark.parametrize("ranks", range(1, 7))
def test_a_transport_that_blocks_is_no_deadlock_and_the_volume_is_as_stated(ranks: int) -> None:
    def on_rank(comm: Communicator) -> None:
        for numel in (0, 1, ranks, 3 * ranks + 1):
            wrapped = Wrapped(comm)
            ring_sum(wrapped, values(comm.rank, numel))
            assert wrapped.sent == volume(ring(ranks, comm.rank), numel)

    run_threads(on_rank, ranks, timeout_s=10)


@pytest.mark.parametrize(
    ("schedule", "tensor", "message"),
    [
        (ring(2, 0), torch.ones(2), "rank 0 of 1: got the schedule of rank 0 of 2"),
        (ring(1, 0), torch.ones(2, dtype=torch.bool), "sum is not defined for bool"),
        (ring(1, 0), torch.ones(2).to_sparse(), "only dense tensors"),
    ],
)
def test_what_cannot_be_summed_is_refused(schedule: Schedule, tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_threads(lambda comm: run_schedule(comm, schedule, tensor), 1)


def _over_gloo(comm: Communicator, sizes: tuple[int, ...]) -> list[Tensor]:
    return [ring_sum(comm, values(comm.rank, numel)) for numel in sizes]


def test_over_processes() -> None:
    sizes = (0, 1, 2, 3, 10, 300_000)
    by_rank = run_processes(_over_gloo, 3, sizes)
    for index, numel in enumerate(sizes):
        check_sums([results[index] for results in by_rank], numel, torch.float32)

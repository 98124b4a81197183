"""Sums of shared memory, all of them checked, in the worst of conditions; and that a broken order would show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import shm_stress
import torch
from shm_ranks import gathered
from shm_stress import start_at

from samestep.comm.base import Communicator
from samestep.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, Reduction
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.header import Place, decode, encode, place_in
from samestep.comm.shm.kernel import free_bytes
from samestep.testing.conformance import check_communicator, check_mismatch
from samestep.testing.ranks import RankError, run_processes, run_threads
from samestep.testing.samples import samples, total


@pytest.mark.parametrize(("ranks", "sums"), [(2, 20_000), (3, 10_000), (4, 10_000), (8, 2_000)])
def test_sums_on_more_ranks_than_cores(ranks: int, sums: int) -> None:
    run_processes(shm_stress.add_often, ranks, sums, 7, timeout_s=110.0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_while_counters_wrap_around(ranks: int) -> None:
    run_processes(shm_stress.add_often, ranks, 800, 7, 2**32 - 1000)


@pytest.mark.parametrize("fault", shm_stress.FAULTS)
def test_a_broken_order_is_found(fault: str) -> None:
    with pytest.raises(RankError, match=r"sum \d+ of \d+ elements: expected \d+, got -?\d+ at element"):
        run_processes(shm_stress.add_with_a_fault, 3, fault)


def test_waits_that_signals_interrupt() -> None:
    outcomes = run_processes(shm_stress.interrupt_often, 3, 400, 11)
    assert outcomes[1][0] > 10
    assert {breaks for _, breaks in outcomes} == {outcomes[1][1]}


def test_groups_in_groups_that_come_and_go() -> None:
    for before, after in run_processes(shm_stress.interleave, 4, 60, 5, timeout_s=100.0):
        assert all(after[what] <= before[what] for what in before), (before, after)


def _both(test: Callable[[ShmCommunicator], None], size: int) -> None:
    """Run `test` in threads, each a rank that shares memory with the others."""

    def main(control: Communicator) -> None:
        with gathered(control, slot_bytes=4096) as comm:
            test(comm)

    run_threads(main, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_tensors_of_the_arena_in_every_exchange(dtype: torch.dtype) -> None:
    """As inputs and as outputs, from one end of their memory to the other, two of them side by side."""

    def test(comm: ShmCommunicator) -> None:
        count, size = 6000, comm.size
        first, second = comm.empty((size, count), dtype), comm.empty((size, count), dtype)
        for a, b in ((first, second), (second, first)):
            parts = samples(comm, (size, count), dtype)
            a.copy_(parts[comm.rank])
            comm.start(AllGather(b, a[1])).wait()
            assert torch.equal(b, parts[:, 1])
            comm.start(AllToAll(b.view(-1), a.view(-1), (count,) * size, (count,) * size)).wait()
            assert torch.equal(b, parts[:, comm.rank])
            comm.start(Broadcast(a, size - 1)).wait()
            assert torch.equal(a, parts[-1])
            a.copy_(parts[comm.rank])
            how = Reduction.MAX if dtype is torch.bool else Reduction.SUM
            comm.start(ReduceScatter(b[0], a, how)).wait()
            assert torch.equal(b[0], total(parts, how)[comm.rank])
            comm.start(ReduceScatter(a[comm.rank], a, how)).wait()
            assert torch.equal(a[comm.rank], total(parts, how)[comm.rank])
            comm.start(AllGather(a, a[comm.rank])).wait()
            assert torch.equal(a, total(parts, how))
            comm.barrier()

    _both(test, 3)


def test_sums_of_parts_of_the_arena() -> None:
    """Also those that begin in its midst, or end with it, each rank's at another place."""

    def test(comm: ShmCommunicator) -> None:
        arena, other = comm.empty((70_003,), torch.int64), comm.empty((70_003,), torch.int64)
        for count in (1, 8192, 8193, 30_000, 69_999):
            for start in (0, 1 + comm.rank, len(arena) - count):
                arena.fill_(-1)
                other.fill_(-2)
                part = arena[start : start + count]
                part.copy_(torch.arange(count))
                comm.barrier()
                comm.all_reduce(part)
                assert torch.equal(part, comm.size * torch.arange(count))
                assert int((arena == -1).sum()) == len(arena) - count
                assert bool((other == -2).all())
                comm.barrier()

    _both(test, 3)


def test_every_exchange_while_counters_wrap_around() -> None:
    def test(comm: ShmCommunicator) -> None:
        start_at(comm, 2**32 - 1500)
        check_communicator(comm)
        assert comm._room.meeting > 2**32
        start_at(comm, 2**33 - 40)
        check_mismatch(comm)

    _both(test, 3)


def test_places_far_into_large_tensors() -> None:
    place = Place(2**31, 2**40 + 2**31)
    header = memoryview(encode(AllReduce(torch.ones(3)), 2**32 - 1, place))
    assert place_in(header) == place
    assert decode(header).meeting == 2**32 - 1


def test_more_than_two_gibibytes() -> None:
    """A broadcast, as that needs them on one rank only."""
    if free_bytes() < 6 * 2**30:
        pytest.skip("needs 2.1 GiB of memory, and some to spare")
    run_processes(shm_stress.broadcast_much, 2, 2**31 + 2**26 + 3)

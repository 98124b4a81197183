"""What the ranks of the shared-memory tests do; light to import, as every process of a test imports it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import comm_ranks
import torch
import torch.distributed as dist

from samestep.comm.base import Communicator
from samestep.comm.ops import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Op, ReduceScatter, Send
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.gather import Unshared
from samestep.errors import CommunicatorError, DeadlineError, PeerLostError
from samestep.testing.conformance import check_communicator, check_mismatch
from samestep.testing.samples import refused

VICTIM = comm_ranks.VICTIM
SLOT_BYTES = 2**20


def gathered(
    control: Communicator, timeout_s: float = 30.0, slot_bytes: int = SLOT_BYTES, *, kernels: bool = True
) -> ShmCommunicator:
    made = ShmCommunicator.gather(control, timeout_s=timeout_s, slot_bytes=slot_bytes, kernels=kernels)
    assert isinstance(made, ShmCommunicator), made
    return made


def conform(control: Communicator, slot_bytes: int = SLOT_BYTES, kernels: bool = True) -> None:
    with gathered(control, slot_bytes=slot_bytes, kernels=kernels) as comm:
        check_communicator(comm)
        check_mismatch(comm)


def conform_in_subgroup(control: Communicator) -> bool:
    """Check a group of ranks 0 and 2, and that its split and close leave the whole one alone."""
    with gathered(control) as comm:
        part = comm.split([2, 0])
        assert (part is None) == (comm.rank == 1)
        if part is not None:
            assert isinstance(part, ShmCommunicator), part
            with part:
                check_communicator(part)
        comm.barrier()
        return part is not None


# Failures


def survive(control: Communicator, case: str, path: str) -> str | None:
    return comm_ranks.survive(gathered(control), case, path)


_BIG = 400_003


def _kinds(size: int) -> dict[str, Callable[[], Op]]:
    """Return exchanges that take many meetings, all that there are."""
    whole, part, flat = torch.ones(size * _BIG), torch.ones(_BIG), (_BIG,) * size
    return {
        "all_reduce": lambda: AllReduce(part),
        "broadcast": lambda: Broadcast(part, VICTIM),
        "all_gather": lambda: AllGather(whole, part),
        "reduce_scatter": lambda: ReduceScatter(part, whole),
        "all_to_all": lambda: AllToAll(torch.empty_like(whole), whole, flat, flat),
        "barrier": Barrier,
    }


KINDS = (*_kinds(1), "in place")


def lose_a_rank_somewhere(control: Communicator, kind: str, path: str) -> str:
    """Rank 0 kills the victim in the midst of endless exchanges; all others learn of it."""
    meeting = _meeting(control, path)
    comm = gathered(control, slot_bytes=8192)
    pids = comm.all_gather_object(os.getpid())
    arena = comm.empty((_BIG,))
    make = {**_kinds(comm.size), "in place": lambda: AllReduce(arena)}[kind]
    said = ""
    for turn in range(100_000):
        if comm.rank == 0 and turn == 3:
            os.kill(pids[VICTIM], signal.SIGKILL)
        try:
            comm.start(make()).wait()
        except PeerLostError as error:
            said = str(error)
            break
    again = refused(comm, "a barrier afterwards", comm.barrier, PeerLostError)
    assert again == f"rank {comm.rank}: the group is broken since: {said}", again
    _wait_for_the_others(comm, meeting)
    comm.close()
    return said


def stop_a_rank(control: Communicator, path: str) -> str:
    """Rank 0 stops the victim; the others see the deadline pass; the victim learns of it when it goes on."""
    meeting = _meeting(control, path)
    comm = gathered(control)
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 0:
        comm._waiter._timeout_s = 1.0
        os.kill(pids[VICTIM], signal.SIGSTOP)
        try:
            said = refused(comm, "an exchange with a stopped rank", _endlessly(comm), DeadlineError)
        finally:
            os.kill(pids[VICTIM], signal.SIGCONT)
    else:
        said = refused(comm, "an exchange with a stopped rank", _endlessly(comm), DeadlineError)
    _wait_for_the_others(comm, meeting, but=())
    comm.close()
    return said


def _endlessly(comm: Communicator) -> Callable[[], object]:
    def exchange() -> None:
        for _ in range(100_000):
            comm.all_reduce(torch.ones(7))

    return exchange


def never_come(control: Communicator) -> str:
    """The last rank makes one call less; the first waits for it in vain, and the others hear of that."""
    with gathered(control) as comm:
        tensor = torch.ones(3)
        comm.broadcast(torch.ones(2, 3))
        works = [comm.start(AllReduce(tensor))] if comm.rank == 1 else []
        control.barrier()
        if comm.rank == 0:
            comm._waiter._timeout_s = 0.5
            works = [comm.start(AllReduce(tensor))]
        said = "".join(refused(comm, "an exchange without one rank", work.wait, DeadlineError) for work in works)
        control.barrier()
        if comm.rank == 2:
            said = refused(comm, "an exchange that is over", lambda: comm.all_reduce(tensor), DeadlineError)
        send = Send(tensor, (comm.rank + 1) % comm.size)
        again = refused(comm, "another exchange", lambda: comm.start(send), DeadlineError)
        assert again == f"rank {comm.rank}: the group is broken since: {said}", again
        control.barrier()
    refused(comm, "an exchange after close", comm.barrier, CommunicatorError)
    return said


def fail_within(control: Communicator) -> str:
    """One rank cannot carry out its part, which the others hear of."""
    with gathered(control) as comm:
        comm.barrier()
        if comm.rank == 1:
            comm._room.all_shown = _no_memory  # type: ignore[method-assign]
        said = refused(
            comm, "an exchange that fails on one rank", lambda: comm.all_reduce(torch.ones(3)), CommunicatorError
        )
        control.barrier()
        return said


def _no_memory(*_: object) -> torch.Tensor:
    raise RuntimeError("no memory left")


def _meeting(control: Communicator, path: str) -> dist.FileStore:
    return dist.FileStore(path, control.size)  # type: ignore[attr-defined]


def _wait_for_the_others(comm: Communicator, meeting: dist.FileStore, but: tuple[int, ...] = (VICTIM,)) -> None:
    meeting.set(str(comm.rank), "here")
    meeting.wait([str(rank) for rank in range(comm.size) if rank not in but])


# Memory, stress, growth


def run_out_of_memory(control: Communicator) -> str:
    """Rank 1 has address space for a tensor, but not for its peer's, too: it is not shared, and all is well."""
    count = 2**25
    with gathered(control) as comm:
        if comm.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 6 * count
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        tensor = comm.empty((count,))
        made = ShmCommunicator.gather(control, slot_bytes=count)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert comm._room.num_arena_tensors == 0
        comm.all_reduce(tensor.fill_(comm.rank + 1))
        assert bool((tensor == 3).all())
        assert isinstance(made, Unshared), made
        return made.reason


def make_and_close(control: Communicator, times: int, splits: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return descriptors and mappings of shared memory, before and after many communicators came and went."""

    def one(closes: bool) -> None:
        comm = gathered(control, slot_bytes=65536)
        comm.all_reduce(comm.empty((30_000,)))
        if splits:
            part = comm.split([0, 1])
            assert part is not None
            part.barrier()
            part.close()
        if closes:
            comm.close()

    one(True)
    before = _held()
    for turn in range(times):
        one(turn % 2 == 0)
    control.barrier()
    return before, _held()


def _held() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:samestep" in line for line in maps)

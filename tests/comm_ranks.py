"""What the ranks of the communicator tests do; light to import, as every process of a test imports it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from samestep.comm import c10d
from samestep.comm.base import Communicator
from samestep.comm.c10d import C10dCommunicator
from samestep.comm.checked import CheckedCommunicator
from samestep.comm.ops import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Op, Recv, ReduceScatter, Send
from samestep.comm.select import communicator_for, connect
from samestep.errors import CommunicatorError, DeadlineError, MismatchError, PeerLostError
from samestep.testing.conformance import check_communicator, check_mismatch
from samestep.testing.samples import refused
from samestep.world import World

VICTIM = 2


def conform(comm: Communicator) -> None:
    check_communicator(comm)


def conform_checked(comm: Communicator) -> None:
    check_communicator(CheckedCommunicator(comm))


def find_mismatches(comm: Communicator) -> None:
    check_mismatch(CheckedCommunicator(comm))


def conform_in_subgroup(comm: Communicator) -> bool:
    """Check the communicator of a group that torch made, of ranks 0 and 2; return whether this rank is in it."""
    group = dist.new_group([0, 2])
    inside = group is not dist.GroupMember.NON_GROUP_MEMBER
    if inside:
        check_communicator(communicator_for(group))
    else:
        said = refused(comm, "a group without this rank", partial(communicator_for, group), ValueError)
        assert "not in the process group" in said, said
    comm.barrier()
    return inside


_BIG = 1_000_003


def _all_reduce(comm: Communicator) -> list[Op]:
    return [AllReduce(torch.ones(_BIG)), Barrier()]


def _broadcast(comm: Communicator) -> list[Op]:
    return [Barrier(), Broadcast(torch.ones(_BIG), source=VICTIM)]


def _gather(comm: Communicator) -> list[Op]:
    part = torch.ones(_BIG)
    return [AllGather(part.new_empty(comm.size * _BIG), part), Barrier()]


def _small(comm: Communicator) -> list[Op]:
    part = torch.ones(comm.size)
    ones = (1,) * comm.size
    return [Barrier(), ReduceScatter(part[:1].clone(), part), AllToAll(part.clone(), part, ones, ones)]


def _several(comm: Communicator) -> list[Op]:
    return [AllReduce(torch.ones(_BIG)) for _ in range(6)]


def _messages(comm: Communicator) -> list[Op]:
    """Nobody but rank 1 waits for the victim; 0 waits for 1, and 3 for 0."""
    source = {0: 1, 1: VICTIM, VICTIM: 3, 3: 0}[comm.rank]
    return [Recv(torch.empty(3), source)]


INTERRUPTED: dict[str, Callable[[Communicator], list[Op]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _gather,
    "small ones": _small,
    "several": _several,
    "messages": _messages,
}


def survive(comm: Communicator, case: str, path: str) -> str | None:
    """Rank `VICTIM` starts one exchange and dies. Every other one has to learn of it while all others are still there.

    The others start more exchanges than that, as the first may just have come through.
    """
    meeting = dist.FileStore(path, comm.size)  # type: ignore[attr-defined]
    meeting.set_timeout(timedelta(seconds=15))
    comm.all_reduce(torch.ones(_BIG))
    if comm.rank == VICTIM:
        comm.start(INTERRUPTED[case](comm)[0])
        os._exit(7)
    said = _failing(comm, INTERRUPTED[case](comm), PeerLostError)
    again = _failing(comm, [Barrier()], PeerLostError)
    assert f"rank {comm.rank}: the group is broken since: {said}" == again, again
    meeting.set(str(comm.rank), said)
    meeting.wait([str(rank) for rank in range(comm.size) if rank != VICTIM])
    return said


def _failing(comm: Communicator, ops: list[Op], kind: type[CommunicatorError]) -> str:
    """Start all of `ops` and wait for each; return the first error's message, and see that all are of one kind."""
    errors: list[CommunicatorError] = []
    works = []
    for op in ops:
        try:
            works.append(comm.start(op))
        except CommunicatorError as error:
            errors.append(error)
    for work in works:
        try:
            work.wait()
        except CommunicatorError as error:
            errors.append(error)
            assert work.done()
    assert errors, "no exchange failed"
    assert {type(error) for error in errors} == {kind}, errors
    return str(errors[0])


def miss_the_deadline(comm: Communicator) -> str:
    """Rank 0 never comes to an exchange of a group whose timeout is short, nor to one of a group split from it."""
    brief = C10dCommunicator(dist.new_group(timeout=timedelta(seconds=1)))
    part = brief.split([0, 1])
    said = ""
    if comm.rank == 1:
        assert part is not None
        said = _failing(part, [AllReduce(torch.ones(3))], DeadlineError)
        again = _failing(part, [Send(torch.ones(3), 0)], DeadlineError)
        assert again.endswith(said), again
        part.close()
    if comm.rank == 2:
        said = _failing(brief, [Recv(torch.ones(3), 0, 5)], DeadlineError)
    comm.barrier()
    return said


def fail_to_split(comm: Communicator) -> str:
    """Gloo finds out that a peer is gone while it makes the connections of a new group."""
    with patch.object(c10d, "_subgroup", side_effect=RuntimeError("connectFullMesh failed: Connection closed by peer")):
        said = refused(comm, "split", lambda: comm.split(range(comm.size)), PeerLostError)
    again = refused(comm, "a barrier afterwards", comm.barrier, PeerLostError)
    assert again == f"rank {comm.rank}: the group is broken since: {said}", again
    return said


def close_and_go_on(comm: Communicator) -> list[int]:
    """Closing a group leaves the others alone, and what is not one's own stays open."""
    part = comm.split([0, comm.size - 1])
    again = comm.split([0, comm.size - 1])
    if part is not None and again is not None:
        with part:
            part.barrier()
        part.close()
        again.barrier()
    comm.close()
    C10dCommunicator().close()
    assert dist.is_initialized()
    heard: list[int] = comm.all_gather_object(comm.rank)
    return heard


def meet(comm: Communicator, port: int) -> list[int]:
    """Leave the group that there is, come together by `connect`, part, and be a world of one."""
    _leave(comm)
    world = local_world(comm.rank, comm.size, port)
    with connect(world, timeout_s=30.0) as met:
        assert (met.rank, met.size, dist.get_world_size()) == (world.rank, world.size, world.size)
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=30)
        heard: list[int] = met.all_gather_object(met.rank)
        refused(met, "barriers on some ranks only", _disagree(met), MismatchError)
        with connect(world) as same:
            same.barrier()
        assert dist.is_initialized(), "a group that was there already must stay"
        other = World.single("cpu")
        said = refused(met, "another world than the group's", partial(connect, other), MismatchError)
        assert f"rank {met.rank} of {met.size}, but the world is rank 0 of 1" in said, said
    assert not dist.is_initialized()
    connect(World.single("cpu"))
    return heard


def _leave(comm: Communicator) -> None:
    comm.barrier()  # some rank may still be connecting
    dist.destroy_process_group()


def _disagree(comm: Communicator) -> Callable[[], object]:
    return comm.barrier if comm.rank == 0 else partial(comm.all_reduce, torch.ones(3))


def meet_nobody(comm: Communicator, worlds: list[tuple[int, int]]) -> str:
    """Be this rank of two at this port, where nobody else comes; return the error."""
    _leave(comm)
    rank, port = worlds[comm.rank]
    try:
        connect(local_world(rank, 2, port), timeout_s=1.0)
    except CommunicatorError as error:
        said = f"{type(error).__name__}: {error}"
    assert not dist.is_initialized()
    connect(World.single("cpu"))
    return said


def local_world(rank: int, size: int, port: int, host: str = "127.0.0.1") -> World:
    return World(
        rank=rank,
        local_rank=rank,
        size=size,
        local_size=size,
        node_rank=0,
        num_nodes=1,
        master_addr=host,
        master_port=port,
        device=torch.device("cpu"),
        launcher="env",
    )


def results(comm: Communicator, factor: int, offset: int) -> int:
    comm.barrier()
    return factor * comm.rank + offset


def fail(comm: Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("the cause")
    comm.barrier()


def die(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        os.abort()


def hang(comm: Communicator, folder: str) -> None:
    comm.barrier()
    Path(folder, str(comm.rank)).write_text(str(os.getpid()))
    if comm.rank == 1:
        threading.Event().wait()

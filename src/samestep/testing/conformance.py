"""What every communicator must do, whatever moves its tensors: a check that each implementation passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from samestep.comm.base import Communicator
from samestep.comm.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Op,
    ReduceScatter,
    Reduction,
    describe,
)
from samestep.errors import CommunicatorError, MismatchError
from samestep.testing import collectives, conversations
from samestep.testing.samples import expect, refused, sample, samples, total

__all__ = ["check_communicator", "check_mismatch"]


def check_communicator(comm: Communicator) -> None:
    """Raise AssertionError unless `comm` is a right communicator; every rank of the group calls it.

    The message names the rank, the exchange, the dtype and the shape, what was expected and what came. Errors of an
    exchange itself (CommunicatorError) pass as they are. The ranks share a folder for temporary files, as ranks of one
    host do. After an error the communicator is in no known state; the other ranks find that out at their next exchange
    with this one, or at their deadline.
    """
    for promise in (*collectives.PROMISES, *conversations.PROMISES):
        _keep(comm, promise)


def check_mismatch(comm: Communicator) -> None:
    """Raise AssertionError unless `comm` finds out when ranks ask for different exchanges; every rank calls it.

    Every rank must get a MismatchError that lists every rank's request, and the communicator must stay usable. For
    communicators that promise it: `CheckedCommunicator`, and ranks that are threads. A group of one has nothing to
    disagree about.
    """
    for requests in _CONTRADICTIONS:
        _keep(comm, partial(_contradict, requests))


def _keep(comm: Communicator, promise: Callable[[Communicator], None]) -> None:
    try:
        promise(comm)
    except (AssertionError, CommunicatorError):
        raise
    except Exception as error:
        what = getattr(promise, "__name__", "check_mismatch")
        raise AssertionError(f"rank {comm.rank} of {comm.size}, {what}: {type(error).__name__}: {error}") from error


_Requests = Callable[[Communicator, int], Op]  # what a rank asks for


def _contradict(requests: _Requests, comm: Communicator) -> None:
    if comm.size == 1:
        return
    ops = [requests(comm, rank) for rank in range(comm.size)]
    mine = ops[comm.rank]
    said = refused(comm, f"{describe(mine)} against others", lambda: comm.start(mine).wait(), MismatchError)
    for rank, op in enumerate(ops):
        if f"rank {rank}: {describe(op)}" not in said:
            raise AssertionError(f"rank {comm.rank}: rank {rank}'s {describe(op)} is not in the message {said!r}")
    result = comm.all_reduce(sample(comm, (3,), torch.float32))
    expected = total(samples(comm, (3,), torch.float32), Reduction.SUM)
    expect(comm, f"all_reduce after a mismatch in {describe(mine)}", result, expected)


def _kinds(comm: Communicator, rank: int) -> Op:
    ones = torch.ones(comm.size, device=comm.device)
    if rank == 0:
        return AllReduce(ones)
    return Broadcast(ones) if rank == 1 else ReduceScatter(ones[:1], ones)


def _one_barrier(comm: Communicator, rank: int) -> Op:
    return Barrier() if rank == comm.size - 1 else AllReduce(torch.ones(3, device=comm.device))


def _dtypes(comm: Communicator, rank: int) -> Op:
    return AllReduce(torch.ones(3, device=comm.device, dtype=torch.float64 if rank == 0 else torch.float32))


def _lengths(comm: Communicator, rank: int) -> Op:
    return AllReduce(torch.ones(3 + rank, device=comm.device))


def _emptiness(comm: Communicator, rank: int) -> Op:
    return AllReduce(torch.ones(3 if rank == 0 else 0, device=comm.device))


def _shapes(comm: Communicator, rank: int) -> Op:
    return Broadcast(torch.ones((2, 3) if rank == 0 else (3, 2), device=comm.device))


def _reductions(comm: Communicator, rank: int) -> Op:
    return AllReduce(torch.ones(3, device=comm.device), Reduction.MAX if rank == 1 else Reduction.SUM)


def _sources(comm: Communicator, rank: int) -> Op:
    return Broadcast(torch.ones(3, device=comm.device), source=rank)


def _gathered_lengths(comm: Communicator, rank: int) -> Op:
    part = torch.ones(1 + rank, device=comm.device)
    return AllGather(part.repeat(comm.size), part)


def _gathered_dtypes(comm: Communicator, rank: int) -> Op:
    part = torch.ones(4, device=comm.device, dtype=torch.int32 if rank else torch.float32)
    return AllGather(part.repeat(comm.size), part)


def _scattered_reductions(comm: Communicator, rank: int) -> Op:
    whole = torch.ones(comm.size, device=comm.device)
    return ReduceScatter(whole[:1].clone(), whole, Reduction.SUM if rank else Reduction.PRODUCT)


def _splits(comm: Communicator, rank: int) -> Op:
    """Everyone sends one element to each rank, but rank 1 expects another from rank 0 than from itself."""
    receives = [1] * comm.size
    if rank == 1:
        receives[0], receives[1] = 2, 0
    ones = torch.ones(comm.size, device=comm.device)
    return AllToAll(torch.empty_like(ones), ones, tuple(receives), (1,) * comm.size)


def _split_dtypes(comm: Communicator, rank: int) -> Op:
    ones = torch.ones(comm.size, device=comm.device, dtype=torch.float16 if rank else torch.int16)
    return AllToAll(torch.empty_like(ones), ones, (1,) * comm.size, (1,) * comm.size)


_CONTRADICTIONS: tuple[_Requests, ...] = (
    _kinds,
    _one_barrier,
    _dtypes,
    _lengths,
    _emptiness,
    _shapes,
    _reductions,
    _sources,
    _gathered_lengths,
    _gathered_dtypes,
    _scattered_reductions,
    _splits,
    _split_dtypes,
)

"""Communicators keep their promises, and the check that says so finds the ones that don't."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comm_ranks
import pytest
import torch

from samestep.comm.base import Communicator, DoneWork, Work
from samestep.comm.checked import CheckedCommunicator
from samestep.comm.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Op,
    Recv,
    ReduceScatter,
    Reduction,
    Send,
)
from samestep.errors import MismatchError
from samestep.testing.conformance import check_communicator, check_mismatch
from samestep.testing.ranks import run_processes, run_threads


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads_conform(size: int) -> None:
    run_threads(check_communicator, size)
    run_threads(check_mismatch, size)


@pytest.mark.parametrize("size", [1, 3])
def test_checked_threads_conform(size: int) -> None:
    run_threads(lambda comm: check_communicator(CheckedCommunicator(comm)), size)
    run_threads(lambda comm: check_mismatch(CheckedCommunicator(comm)), size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_conforms(size: int) -> None:
    run_processes(comm_ranks.conform, size)


def test_a_group_that_torch_made_conforms() -> None:
    assert run_processes(comm_ranks.conform_in_subgroup, 3) == [True, False, True]


def test_checked_gloo_conforms() -> None:
    run_processes(comm_ranks.conform_checked, 2)
    run_processes(comm_ranks.find_mismatches, 3)


class Faulty(Communicator):
    """Serves what `inner` serves, as `fault` distorts it."""

    def __init__(self, inner: Communicator, fault: Fault) -> None:
        self.inner, self.fault = inner, fault
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def _start(self, op: Op) -> Work:
        return self.fault(self.inner, op)

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        part = self.inner._split(ranks)
        return None if part is None else Faulty(part, self.fault)


Fault = Callable[[Communicator, Op], Work]


class _Afterwards(Work):
    """Does something to the result each time that it is waited for, or only the first time."""

    def __init__(self, work: Work, act: Callable[[], Any], *, once: bool = True) -> None:
        self.work, self.act, self.once, self.finished = work, act, once, False

    def wait(self) -> None:
        self.work.wait()
        if not (self.once and self.finished):
            self.act()
        self.finished = True

    def done(self) -> bool:
        return self.work.done()


def _corrupts(kind: type[Any], rank: int, field: str = "tensor") -> Fault:
    """Change the last element of some rank's result, unless it is one of the lengths that methods exchange."""

    def fault(comm: Communicator, op: Op) -> Work:
        work = comm.start(op)
        if comm.rank != rank or not isinstance(op, kind) or op.tensor.dtype is torch.int64:
            return work
        result = getattr(op, field).view(-1)
        return _Afterwards(work, lambda: result[-1:].zero_())

    return fault


def _drops(kind: type) -> Fault:
    return lambda comm, op: DoneWork() if type(op) is kind else comm.start(op)


def _swaps_ranks(comm: Communicator, op: Op) -> Work:
    work = comm.start(op)
    if type(op) is AllGather and comm.size > 1:
        rows = op.output.view(comm.size, -1)
        return _Afterwards(work, lambda: rows.copy_(rows.flip(0)))
    return work


def _always_sums(comm: Communicator, op: Op) -> Work:
    if type(op) is ReduceScatter and op.tensor.dtype is not torch.bool:
        return comm.start(ReduceScatter(op.output, op.tensor))
    return comm.start(op)


def _sends_from_the_first(comm: Communicator, op: Op) -> Work:
    return comm.start(Broadcast(op.tensor) if type(op) is Broadcast else op)


def _writes_into_inputs(comm: Communicator, op: Op) -> Work:
    work = comm.start(op)
    return _Afterwards(work, lambda: op.tensor.zero_()) if isinstance(op, ReduceScatter) else work


def _ignores_tags(comm: Communicator, op: Op) -> Work:
    match op:
        case Send(tensor=tensor, peer=peer):
            return comm.start(Send(tensor, peer))
        case Recv(tensor=tensor, peer=peer):
            return comm.start(Recv(tensor, peer))
        case _:
            return comm.start(op)


def _divides_at_each_wait(comm: Communicator, op: Op) -> Work:
    if type(op) is AllReduce and op.reduction is Reduction.MEAN:
        tensor = op.tensor
        return _Afterwards(comm.start(AllReduce(tensor)), lambda: tensor.div_(comm.size), once=False)
    return comm.start(op)


def _rounds_by_rank(comm: Communicator, op: Op) -> Work:
    """Give ranks results that differ in the last bit."""
    work = comm.start(op)
    if type(op) is AllReduce and op.tensor.dtype is torch.float32 and op.tensor.numel() > 1000 and comm.rank == 1:
        bits = op.tensor.view(torch.int32)
        return _Afterwards(work, lambda: bits.bitwise_xor_(1))
    return work


def _is_never_done(comm: Communicator, op: Op) -> Work:
    work = _Afterwards(comm.start(op), lambda: None)
    work.done = lambda: False  # type: ignore[method-assign]
    return work


def _knows_no_int16(comm: Communicator, op: Op) -> Work:
    if type(op) is Broadcast and op.tensor.dtype is torch.int16:
        raise NotImplementedError("no int16")
    return comm.start(op)


def _fails_when_large(comm: Communicator, op: Op) -> Work:
    """Forget what lies beyond the first hundred thousand elements."""
    if type(op) is AllReduce and op.tensor.numel() > 100_000:
        return comm.start(AllReduce(op.tensor.view(-1)[:100_000], op.reduction))
    return comm.start(op)


_FAULTS: dict[str, tuple[Fault, str]] = {
    "corrupt sum": (_corrupts(AllReduce, 1), r"rank 1 of 3, all_reduce\(sum\) of uint8\[3, 5\]: expected .*, got "),
    "corrupt rows": (_corrupts(ReduceScatter, 2, "output"), r"rank 2 of 3, reduce_scatter\(sum\) of uint8\["),
    "corrupt copy": (_corrupts(Broadcast, 2), r"rank 2 of 3, broadcast\(source=0\) of uint8\[3, 5\]"),
    "corrupt list": (_corrupts(AllGather, 0, "output"), r"rank 0 of 3, all_gather of uint8\[3, 5\]"),
    "corrupt parts": (_corrupts(AllToAll, 0, "output"), r"rank 0 of 3, all_to_all of .*uint8\[2\]"),
    "corrupt message": (_corrupts(Recv, 1), r"rank 1 of 3, recv\(peer=0\) of uint8\[3, 5\]"),
    "no sum": (_drops(AllReduce), r"rank 0 of 3, all_reduce\(sum\) of uint8\[3, 5\]"),
    "no barrier": (_drops(Barrier), r"rank \d, barrier: left before rank \d had entered"),
    "no messages": (lambda comm, op: DoneWork() if isinstance(op, Send | Recv) else comm.start(op), r"recv\(peer="),
    "swapped ranks": (_swaps_ranks, r"rank 0 of 3, all_gather of uint8"),
    "always sums": (_always_sums, r"rank 0 of 3, reduce_scatter\((mean|min)\) of "),
    "one source": (_sends_from_the_first, r"rank 0 of 3, broadcast\(source=1\)"),
    "written input": (_writes_into_inputs, r"rank 0 of 3, the input of reduce_scatter"),
    "no tags": (_ignores_tags, r"rank \d of 3, recv\(peer=\d, tag=\d"),
    "two divisions": (_divides_at_each_wait, r"rank 0 of 3, a second wait"),
    "other bits": (_rounds_by_rank, r"all_reduce\(\w+\) of float32\[\d+\]"),
    "never done": (_is_never_done, r"done\(\) is false after wait"),
    "unknown dtype": (
        _knows_no_int16,
        r"rank 0 of 3, broadcast_copies_from_every_source: NotImplementedError: no int16",
    ),
    "small only": (_fails_when_large, r"rank 0 of 3, all_reduce\(sum\) of float32\[300007\]"),
}


@pytest.mark.parametrize("name", _FAULTS)
def test_the_check_bites(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault, said = _FAULTS[name]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a check that fails may leave a file
    with pytest.raises(AssertionError, match=said):
        run_threads(lambda comm: check_communicator(Faulty(comm, fault)), 3, timeout_s=10.0)


class _Numbered(Faulty):
    """Its groups count ranks from the other end."""

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        part = super()._split(ranks)
        if part is not None:
            part.rank = part.size - 1 - part.rank
        return part


class _Everyone(Faulty):
    """Its groups always have all ranks."""

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        return super()._split(tuple(range(self.size)))


@pytest.mark.parametrize("kind", [_Numbered, _Everyone])
def test_the_check_bites_wrong_groups(kind: type[Faulty]) -> None:
    with pytest.raises(AssertionError, match=r"rank \d of 3, split\(\[.*\]\): expected \(rank, size\) "):
        run_threads(lambda comm: check_communicator(kind(comm, lambda inner, op: inner.start(op))), 3, timeout_s=10.0)


def _blames_nobody(comm: Communicator, op: Op) -> Work:
    try:
        comm.start(op).wait()
    except MismatchError:
        raise MismatchError("ranks disagree") from None
    return DoneWork()


@pytest.mark.parametrize(
    ("fault", "said"),
    [(_drops(AllReduce), "nothing was raised"), (_blames_nobody, "is not in the message 'ranks disagree'")],
)
def test_the_mismatch_check_bites(fault: Fault, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run_threads(lambda comm: check_mismatch(Faulty(comm, fault)), 3, timeout_s=10.0)

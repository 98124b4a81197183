"""Communicators keep their promises, and the check that says so finds the ones that don't."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import comm_ranks
import pytest
import torch
from torch import Tensor

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
    check,
    describe,
)
from samestep.errors import MismatchError
from samestep.testing.conformance import check_communicator, check_mismatch
from samestep.testing.ranks import run_processes, run_threads


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads_conform(size: int) -> None:
    run_threads(check_communicator, size)
    run_threads(check_mismatch, size)


@pytest.mark.parametrize("size", [1, 2, 3])
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


def _corrupts(kind: type, rank: int, field: str = "tensor") -> Fault:
    """Change the last element of some rank's result, unless it is one of the lengths that methods exchange."""

    def fault(comm: Communicator, op: Op) -> Work:
        work = comm.start(op)
        if comm.rank != rank or type(op) is not kind or op.tensor.dtype is torch.int64:
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
def test_the_check_bites(name: str) -> None:
    fault, said = _FAULTS[name]
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


_TABLE: list[tuple[Any, type[Exception], str]] = []


def _wrong(op: Any, said: str, kind: type[Exception] = ValueError) -> None:
    _TABLE.append((op, kind, said))


def _flat(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


_wrong(_flat(3), "expected one of AllReduce, .*, got Tensor", TypeError)
_wrong(AllReduce, "expected one of AllReduce, .*, got type", TypeError)
_wrong(AllReduce([1.0]), "all_reduce: expected a tensor as tensor, got list", TypeError)  # type: ignore[arg-type]
_wrong(AllGather(None, _flat(3)), "all_gather: expected a tensor as output, got NoneType", TypeError)  # type: ignore[arg-type]
_wrong(AllReduce(torch.eye(3).to_sparse()), r"tensor is torch.sparse_coo, only dense")
_wrong(AllReduce(torch.zeros(2, 3).t()), r"float32\[3, 2\]: tensor is not contiguous \(strides \(1, 3\)\)")
_wrong(AllGather(torch.zeros(3, 2).t(), _flat(2)), r"output is not contiguous")
_wrong(AllReduce(torch.zeros(2, dtype=torch.complex64).conj()), r"tensor is a lazy view; use its resolve_conj\(\)")
_wrong(Broadcast(_flat(3), 3), r"broadcast\(source=3\) of float32\[3\]: rank 3 is not among the 3 ranks 0 to 2")
_wrong(Broadcast(_flat(3), -1), r"rank -1 is not among")
_wrong(Send(_flat(3), 7), r"send\(peer=7, tag=0\) of float32\[3\]: rank 7 is not among")
_wrong(Recv(_flat(3), 7, 2), r"recv\(peer=7, tag=2\)")
_wrong(Send(_flat(3), 1, -1), r"send\(peer=1, tag=-1\) .*: expected a tag from 0 to 1073741823")
_wrong(Recv(_flat(3), 1, 2**30), r"expected a tag from 0 to 1073741823")
_wrong(
    AllReduce(_flat(3, torch.bool)), r"all_reduce\(sum\) of bool\[3\]: sum is not defined for bool, only for bfloat16"
)
_wrong(
    AllReduce(_flat(3, torch.int32), Reduction.MEAN), r"mean is not defined for int32, only for bfloat16, complex128"
)
_wrong(ReduceScatter(_flat(1), _flat(3), Reduction.BIT_OR), r"bit_or is not defined for float32, only for bool, int16")
_wrong(AllReduce(_flat(3, torch.complex64), Reduction.MAX), r"max is not defined for complex64")
_wrong(ReduceScatter(_flat(2), _flat(7)), r"expected 3 x 2 elements of float32 on the long side, got 7 of float32")
_wrong(ReduceScatter(_flat(2), _flat(6, torch.float64)), r"float32 on the long side, got 6 of float64")
_wrong(AllGather(_flat(5), _flat(2)), r"expected 3 x 2 elements of float32 on the long side, got 5 of float32")
_wrong(AllGather(_flat(6), _flat(2, torch.int64)), r"elements of int64 on the long side, got 6 of float32")
_wrong(AllToAll(_flat(3), _flat(3), (1, 1, 1), (1, 1)), r"tensor has 3 elements; its splits \[1, 1\] must be 3 lengths")
_wrong(AllToAll(_flat(3), _flat(3), (1, 1, 2), (1, 1, 1)), r"output has 3 elements; its splits \[1, 1, 2\]")
_wrong(AllToAll(_flat(3), _flat(3), (1, 1, 1), (3, 1, -1)), r"its splits \[3, 1, -1\] must be")
_wrong(AllToAll(_flat(3), _flat(3, torch.int8), (1, 1, 1), (1, 1, 1)), r"of int8\[3\]: output is float32")
_wrong(AllToAll(_flat(3), torch.zeros(3, 1), (1, 1, 1), (1, 1, 1)), r"expected a flat tensor, got the shape \[3, 1\]")


@pytest.mark.parametrize(("op", "kind", "said"), _TABLE, ids=[re.sub(r"\W+", " ", said)[:40] for _, _, said in _TABLE])
def test_what_no_transport_can_serve(op: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        check(op, 3)


def test_a_message_to_oneself_is_refused() -> None:
    def main(comm: Communicator) -> None:
        for op in (Send(_flat(1), comm.rank), Recv(_flat(1), comm.rank)):
            with pytest.raises(ValueError, match=f"rank {comm.rank}: .* is to itself; copy the tensor instead"):
                comm.start(op)

    run_threads(main, 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.all_gather_uneven(torch.tensor(1.0)), "all_gather_uneven: expected at least one dimension"),
        (lambda c: c.reduce_scatter(_flat(3)), r"reduce_scatter: .* divisible by 2 ranks, got \[3\]"),
        (lambda c: c.reduce_scatter(torch.tensor(1.0)), r"reduce_scatter: .* divisible by 2 ranks, got \[\]"),
        (lambda c: c.all_to_all([_flat(1)]), r"all_to_all: expected 2 tensors .* got shapes \[\[1\]\]"),
        (lambda c: c.all_to_all([torch.tensor(1.0)] * 2), r"all_to_all: expected 2 tensors of at least one dimension"),
        (lambda c: c.all_to_all([_flat(1), torch.zeros(1, 1)]), r"all_to_all: tensors may differ only in their first"),
        (lambda c: c.all_reduce(_flat(1).expand(2)), r"got an expanded one, .*shape \[2\], strides \(0,\)"),
    ],
)
def test_what_the_methods_refuse(call: Callable[[Communicator], object], said: str) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=said):
            call(comm)
        comm.barrier()

    run_threads(main, 2)


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (AllReduce(torch.zeros(3, 4)), "all_reduce(sum) of float32[3, 4]"),
        (ReduceScatter(_flat(1), _flat(3), Reduction.MAX), "reduce_scatter(max) of float32[3]"),
        (Broadcast(_flat(3, torch.bool), 2), "broadcast(source=2) of bool[3]"),
        (AllGather(_flat(3), _flat(1)), "all_gather of float32[1]"),
        (AllToAll(_flat(3), _flat(2), (1, 2), (2, 0)), "all_to_all(sends=[2, 0], receives=[1, 2]) of float32[2]"),
        (Send(torch.tensor(1), 1, 5), "send(peer=1, tag=5) of int64[]"),
        (Barrier(), "barrier"),
    ],
)
def test_requests_describe_themselves(op: Op, said: str) -> None:
    assert describe(op) == said

"""Ranks that are threads of one process: deterministic, no sockets, mistakes named for every rank.

The last rank to arrive at an exchange carries it out for all, so additions happen in rank order whatever the threads'
timing. Most tests run on it; `samestep.testing.run_threads` starts the threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Op,
    Recv,
    ReduceScatter,
    Reduction,
    Send,
    describe,
    signature,
)
from samestep.errors import CommunicatorError, DeadlineError, MismatchError, PeerLostError

__all__ = ["thread_communicators"]


def thread_communicators(size: int, *, timeout_s: float = 30.0) -> list[Communicator]:
    """Make a group of `size` ranks; give one of the communicators to each thread.

    An exchange that some rank has not joined `timeout_s` seconds after another began to wait for it raises
    DeadlineError there, naming who is missing, and breaks the group. Closing a communicator closes those split from it,
    and makes the others' waits for it a PeerLostError.
    """
    if size < 1:
        raise ValueError(f"expected at least 1 rank, got {size}")
    group = _Group(size, timeout_s)
    return [_ThreadCommunicator(group, rank) for rank in range(size)]


@dataclass(eq=False)
class _Exchange:
    """One collective (by its number) or one send with its receive: who has come with what, and how it ended."""

    name: str
    act: Callable[[dict[int, Op]], None]
    ops: dict[int, Op] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    finished: bool = False
    error: Exception | None = None


class _Group:
    """What the threads share; `changed` guards all of it."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.collectives: dict[int, _Exchange] = {}
        self.mailboxes: dict[tuple[int, int, int], deque[_Exchange]] = {}
        self.subgroups: dict[tuple[int, tuple[int, ...]], _Group] = {}
        self.lost: set[int] = set()
        self.broken: tuple[type[CommunicatorError], str] | None = None

    def join(self, exchange: _Exchange, rank: int, op: Op) -> None:
        exchange.ops[rank] = op
        exchange.missing.discard(rank)
        if exchange.missing:
            return
        exchange.finished = True
        try:
            exchange.act(exchange.ops)
        except Exception as error:  # noqa: BLE001 - handed to every rank, which raises it in wait()
            exchange.error = error
        self.changed.notify_all()

    def post(self, source: int, target: int, tag: int, rank: int, op: Op) -> _Exchange:
        """Match sends and receives of one (source, target, tag) in order."""
        box = self.mailboxes.setdefault((source, target, tag), deque())
        exchange = next((e for e in box if rank in e.missing), None)
        if exchange is None:
            exchange = _Exchange(describe(op), _deliver, missing={source, target})
            box.append(exchange)
        self.join(exchange, rank, op)
        if exchange.finished:
            box.remove(exchange)
        return exchange

    def fail(self, error: CommunicatorError) -> CommunicatorError:
        self.broken = type(error), str(error)
        self.changed.notify_all()
        return error


class _ThreadWork(Work):
    def __init__(self, group: _Group, rank: int, exchange: _Exchange) -> None:
        self._group, self._rank, self._exchange = group, rank, exchange

    def done(self) -> bool:
        return self._exchange.finished or self._group.broken is not None

    def wait(self) -> None:
        group, exchange = self._group, self._exchange
        deadline = time.monotonic() + group.timeout_s
        with group.changed:
            while not exchange.finished:
                if group.broken is not None:
                    raise _again(group.broken, self._rank)
                gone = sorted(exchange.missing & group.lost)
                left = deadline - time.monotonic()
                if gone:
                    raise group.fail(
                        PeerLostError(f"rank {self._rank}, {exchange.name}: rank(s) {gone} ended without taking part")
                    )
                if left <= 0:
                    raise group.fail(
                        DeadlineError(
                            f"rank {self._rank}, {exchange.name}: rank(s) {sorted(exchange.missing)} did not come "
                            f"within {group.timeout_s:g} s; here are {sorted(exchange.ops)}"
                        )
                    )
                group.changed.wait(left)
        if exchange.error is not None:
            raise exchange.error


class _ThreadCommunicator(Communicator):
    def __init__(self, group: _Group, rank: int) -> None:
        self.rank, self.size, self.device = rank, group.size, torch.device("cpu")
        self._group = group
        self._count = 0
        self._splits = 0
        self._parts: list[Communicator] = []

    def _start(self, op: Op) -> Work:
        group = self._group
        with group.changed:
            if group.broken is not None:
                raise _again(group.broken, self.rank)
            match op:
                case Send(peer=peer, tag=tag):
                    exchange = group.post(self.rank, peer, tag, self.rank, op)
                case Recv(peer=peer, tag=tag):
                    exchange = group.post(peer, self.rank, tag, self.rank, op)
                case _:
                    exchange = self._collective(op)
        return _ThreadWork(group, self.rank, exchange)

    def _collective(self, op: Op) -> _Exchange:
        group, number = self._group, self._count
        self._count += 1
        exchange = group.collectives.get(number)
        if exchange is None:
            exchange = _Exchange(describe(op), _carry_out, missing=set(range(group.size)))
            group.collectives[number] = exchange
        group.join(exchange, self.rank, op)
        if exchange.finished:
            del group.collectives[number]
        return exchange

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        group = self._group
        key = (self._splits, ranks)
        self._splits += 1
        if self.rank not in ranks:
            return None
        with group.changed:
            subgroup = group.subgroups.setdefault(key, _Group(len(ranks), group.timeout_s))
        part = _ThreadCommunicator(subgroup, ranks.index(self.rank))
        self._parts.append(part)
        return part

    def close(self) -> None:
        for part in self._parts:
            part.close()
        with self._group.changed:
            self._group.lost.add(self.rank)
            self._group.changed.notify_all()


def _again(first: tuple[type[CommunicatorError], str], rank: int) -> CommunicatorError:
    kind, message = first
    return kind(f"rank {rank}: the group is broken since: {message}")


# What an exchange does, once all its ranks are there. Each reads every rank's request and fills every rank's output.


def _deliver(ops: dict[int, Op]) -> None:
    send = next(op for op in ops.values() if isinstance(op, Send))
    recv = next(op for op in ops.values() if isinstance(op, Recv))
    if send.tensor.shape != recv.tensor.shape or send.tensor.dtype != recv.tensor.dtype:
        raise _mismatch(ops)
    recv.tensor.copy_(send.tensor)


def _carry_out(ops: dict[int, Op]) -> None:
    if len({signature(op) for op in ops.values()}) != 1:
        raise _mismatch(ops)
    requests: list[Any] = [ops[rank] for rank in range(len(ops))]  # all of one class, as their signatures are equal
    with torch.no_grad():
        match requests[0]:
            case AllReduce(reduction=reduction):
                _fill([op.tensor for op in requests], _reduced([op.tensor for op in requests], reduction))
            case ReduceScatter(reduction=reduction):
                whole = _reduced([op.tensor.view(-1) for op in requests], reduction)
                for op, part in zip(requests, whole.view(len(requests), -1), strict=True):
                    op.output.view(-1).copy_(part)
            case Broadcast(source=source):
                _fill([op.tensor for op in requests], requests[source].tensor)
            case AllGather():
                whole = torch.cat([op.tensor.view(-1) for op in requests])
                _fill([op.output.view(-1) for op in requests], whole)
            case AllToAll():
                _all_to_all(requests, ops)
            case _:
                pass


def _fill(targets: list[Tensor], value: Tensor) -> None:
    for target in targets:
        if target is not value:
            target.copy_(value)


def _all_to_all(requests: list[AllToAll], ops: dict[int, Op]) -> None:
    for source, sender in enumerate(requests):
        for target, receiver in enumerate(requests):
            if sender.input_splits[target] != receiver.output_splits[source]:
                raise _mismatch(ops)
    parts = [op.tensor.view(-1).split(op.input_splits) for op in requests]
    for target, op in enumerate(requests):
        op.output.view(-1).copy_(torch.cat([sent[target] for sent in parts]))


_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    Reduction.SUM: torch.Tensor.add_,
    Reduction.MEAN: torch.Tensor.add_,
    Reduction.PRODUCT: torch.Tensor.mul_,
    Reduction.MIN: lambda a, b: torch.minimum(a, b, out=a),
    Reduction.MAX: lambda a, b: torch.maximum(a, b, out=a),
    Reduction.BIT_AND: torch.Tensor.bitwise_and_,
    Reduction.BIT_OR: torch.Tensor.bitwise_or_,
    Reduction.BIT_XOR: torch.Tensor.bitwise_xor_,
}


def _reduced(tensors: list[Tensor], reduction: Reduction) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        _COMBINE[reduction](total, tensor)
    if reduction is Reduction.MEAN:  # complex numbers part by part: their own division rounds more than once
        (torch.view_as_real(total) if total.is_complex() else total).div_(len(tensors))
    return total


def _mismatch(ops: dict[int, Op]) -> MismatchError:
    lines = "\n".join(f"  rank {rank}: {describe(op)}" for rank, op in sorted(ops.items()))
    return MismatchError(f"ranks ask for different exchanges; make the same call on every rank:\n{lines}")

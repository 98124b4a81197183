"""Carries out what `ordered` and `algorithms` plan, over any communicator.

Numbers are added in the tensor's own dtype, and every partial is rounded to it: one that travelled and one that did
not are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from samestep.comm.algorithms import Combine, Schedule, Step, chunk
from samestep.comm.base import Communicator, Work
from samestep.comm.memory import contiguous, give_back, writable
from samestep.comm.ops import AllGather, AllReduce, AllToAll, Recv, Send, check
from samestep.comm.ordered import Push, SumPlan, element_range, num_buffers

__all__ = ["Accumulator", "ordered_sum", "run_schedule", "start_ordered_sum"]


class Accumulator:
    """Adds up one rank's shards as they arrive one after another, in the order of the plan.

    It holds `ordered.num_buffers` tensors for partials that wait, made at the first shard and used again for every sum:
    none where the rank owns one shard.
    """

    def __init__(self, plan: SumPlan, rank: int) -> None:
        self._rank = rank
        self._pushes = plan.local(rank)
        self._buffers: list[Tensor] = []
        self._stack: list[Tensor] = []
        self._arrived = 0

    def push(self, shard: int, tensor: Tensor) -> None:
        """Take in `tensor` (any shape, the same for all shards) as the values of `shard`; it is read, never changed.

        The rank's shards come in ascending order; the first one after the last begins a new sum, and the partials of
        the sum before are gone. The last shard's tensor is not copied where it is a partial by itself.

        Raises ValueError, with nothing taken in, for a shard out of turn, a sparse tensor, or one that differs from
        those before in shape, dtype or device.
        """
        if self._arrived == len(self._pushes):
            self.clear()
        self._check(shard, tensor)
        if not self._buffers:
            self._buffers = [
                torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
                for _ in range(num_buffers(self._pushes))
            ]
        push = self._pushes[self._arrived]
        self._stack.append(tensor.detach())
        _complete(self._stack, push)
        self._arrived += 1
        if not push.completes and self._arrived < len(self._pushes):
            top = len(self._stack) - 1
            self._stack[top] = self._buffers[top].copy_(self._stack[top])

    def partials(self) -> list[Tensor]:
        """Return the rank's partials, one for each of its blocks, once all its shards have arrived.

        They are the accumulator's own buffers (and the last shard's tensor, see `push`): good until the next `push`.
        Raises ValueError while shards are missing.
        """
        if self._arrived != len(self._pushes):
            raise ValueError(
                f"rank {self._rank}: {self._arrived} of {len(self._pushes)} shards have arrived; push the others first"
            )
        return list(self._stack)

    def clear(self) -> None:
        """Forget what has arrived: the next shard is the rank's first again. The buffers are kept."""
        self._stack.clear()
        self._arrived = 0

    def _check(self, shard: int, tensor: Tensor) -> None:
        expected = self._pushes[self._arrived].block.start if self._pushes else None
        if shard != expected:
            whose = "it owns none" if expected is None else f"shard {expected} is next; clear() begins the sum anew"
            raise ValueError(f"rank {self._rank}: got shard {shard}, but {whose}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"rank {self._rank}, shard {shard}: expected a dense tensor, got {tensor.layout}")
        for before in self._buffers[:1]:
            if _kind(tensor) != _kind(before):
                raise ValueError(
                    f"rank {self._rank}, shard {shard}: got {_kind(tensor)}, but earlier shards were {_kind(before)}"
                )


def ordered_sum(comm: Communicator, partials: Sequence[Tensor], plan: SumPlan, out: Tensor) -> Tensor:
    """Sum the partials of all ranks into `out` on every rank, with the same bits for any number of ranks; return it.

    `partials` are this rank's, one for each of `plan.blocks[comm.rank]`, of `out`'s shape, dtype and device; any
    strides. The plan, the shape and the dtype are the same on all ranks. `out` may be one of the partials; the others
    keep their values. Each rank sends `ordered.volume` elements.

    Raises ValueError, with nothing sent, for a plan for another number of ranks, partials that don't fit or a dtype
    without a sum; and what `Work.wait` raises, after which `out` is undefined.
    """
    dense = writable(out, comm.rank)
    start_ordered_sum(comm, [contiguous(p) for p in partials], plan, dense).wait()
    return give_back(dense, out)


def start_ordered_sum(comm: Communicator, partials: Sequence[Tensor], plan: SumPlan, out: Tensor) -> Work:
    """Begin an `ordered_sum` of contiguous tensors: send the partials to the owners of their elements.

    Waiting for it adds them and sends the results back, so all ranks wait for their sums in the same order, too. Until
    then, change neither partials nor `out`. Raises ValueError like `ordered_sum`, and for tensors that are not
    contiguous.
    """
    _check_sum(comm, partials, plan, out)
    ranges = [element_range(out.numel(), comm.size, rank) for rank in range(comm.size)]
    ours = len(ranges[comm.rank])
    if len(partials) == 1:
        outgoing = partials[0].view(-1)
    else:
        parts = [p.view(-1)[r.start : r.stop] for r in ranges for p in partials]
        outgoing = torch.cat(parts) if parts else out.new_empty(0)
    rows = out.new_empty((len(plan.pushes), ours))
    receives = tuple(len(blocks) * ours for blocks in plan.blocks)
    sends = tuple(len(partials) * len(r) for r in ranges)
    scattering = comm.start(AllToAll(rows.view(-1), outgoing, receives, sends))
    return _OrderedSum(comm, scattering, rows, plan.pushes, out)


class _OrderedSum(Work):
    def __init__(
        self, comm: Communicator, scattering: Work, rows: Tensor, pushes: tuple[Push, ...], out: Tensor
    ) -> None:
        self._comm, self._scattering, self._rows, self._pushes, self._out = comm, scattering, rows, pushes, out
        self._gathering: Work | None = None

    def wait(self) -> None:
        if self._gathering is None:
            self._scattering.wait()
            self._gathering = _start_gathering(self._comm, _added(self._rows, self._pushes), self._out.view(-1))
        self._gathering.wait()

    def done(self) -> bool:
        return self._gathering is not None and self._gathering.done()


def _start_gathering(comm: Communicator, ours: Tensor, out: Tensor) -> Work:
    if out.numel() % comm.size == 0:
        return comm.start(AllGather(out, ours))
    # Padding the ranges to one length for an AllGather would copy as much as repeating ours does, and send more.
    lengths = tuple(len(element_range(out.numel(), comm.size, rank)) for rank in range(comm.size))
    return comm.start(AllToAll(out, ours.repeat(comm.size), lengths, (len(ours),) * comm.size))


def run_schedule(comm: Communicator, schedule: Schedule, tensor: Tensor) -> Tensor:
    """Sum `tensor` over the ranks, in place, as `schedule` says (this rank's, from `algorithms.ring`); return it.

    `tensor` has any shape and strides, and a dtype that `Communicator.all_reduce` sums; shape and dtype are the same on
    all ranks.

    Raises ValueError, with nothing sent, for a schedule made for another rank or number of ranks or a dtype without a
    sum; and what `Work.wait` raises, after which `tensor` is undefined.
    """
    if (schedule.rank, schedule.ranks) != (comm.rank, comm.size):
        raise ValueError(
            f"rank {comm.rank} of {comm.size}: got the schedule of rank {schedule.rank} of {schedule.ranks}; make it "
            "with the communicator's own size and rank"
        )
    dense = writable(tensor, comm.rank)
    check(AllReduce(dense), comm.rank, comm.size)
    ranges = [chunk(dense.numel(), comm.size, index) for index in range(comm.size)]
    chunks = [dense.view(-1)[r.start : r.stop] for r in ranges]
    scratch = dense.new_empty(max(map(len, ranges)))
    for step in schedule.steps:
        _take(comm, step, chunks, scratch)
    return give_back(dense, tensor)


def _take(comm: Communicator, step: Step, chunks: list[Tensor], scratch: Tensor) -> None:
    mine = chunks[step.receive_chunk]
    arriving = scratch[: len(mine)] if step.combine is Combine.ADD else mine
    send, receive = Send(chunks[step.send_chunk], step.send_to), Recv(arriving, step.receive_from)
    # Both are under way before either is waited for, as a send may end only when its peer receives. A transport whose
    # `start` blocks is safe too: around a ring somebody sends to a lower rank, so not all begin with the same half.
    both = (send, receive) if step.send_to > comm.rank else (receive, send)
    for work in [comm.start(op) for op in both]:
        work.wait()
    if step.combine is Combine.ADD:
        mine.add_(arriving)


def _added(rows: Tensor, pushes: Iterable[Push]) -> Tensor:
    """Add the rows, one for each push, in place; return the sum."""
    stack: list[Tensor] = []
    for row, push in zip(rows, pushes, strict=True):
        stack.append(row)
        _complete(stack, push)
    (total,) = stack
    return total


def _complete(stack: list[Tensor], push: Push) -> None:
    for _ in push.completes:
        right = stack.pop()
        stack[-1].add_(right)


def _check_sum(comm: Communicator, partials: Sequence[Tensor], plan: SumPlan, out: Tensor) -> None:
    if plan.ranks != comm.size:
        raise ValueError(
            f"rank {comm.rank}: got a plan for {plan.ranks} ranks, but the group has {comm.size}; make one for it"
        )
    check(AllReduce(out), comm.rank, comm.size)
    blocks = plan.blocks[comm.rank]
    if len(partials) != len(blocks) or not all(p.is_contiguous() and _kind(p) == _kind(out) for p in partials):
        raise ValueError(
            f"rank {comm.rank}: expected {len(blocks)} contiguous partials of {_kind(out)}, for the shards "
            f"{', '.join(map(str, blocks)) or '(none)'}; got {[_kind(p) for p in partials]}"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"

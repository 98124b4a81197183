"""Ranks joined by a torch.distributed process group, of whatever backend: Gloo, NCCL and others.

What a backend lacks is made up for here: dtypes that it does not know travel as ones that it does, and the mean is a
sum divided on arrival. Its errors are translated into ours.
"""

from __future__ import annotations

import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a default group: its defaults would keep that one
from torch import Tensor

from samestep.comm import c10d_gloo
from samestep.comm.base import Communicator, DoneWork, Work
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
    describe,
)
from samestep.errors import CommunicatorError, DeadlineError, PeerLostError

__all__ = ["C10dCommunicator"]

_REDUCE_OPS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MEAN: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
    Reduction.BIT_AND: dist.ReduceOp.BAND,
    Reduction.BIT_OR: dist.ReduceOp.BOR,
    Reduction.BIT_XOR: dist.ReduceOp.BXOR,
}

# torch 2.13 gave two functions new names and deprecated the old ones, which torch 2.6 knows.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What torch's backends say when a peer is gone, and when time is up; in lower case.
_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "remote process",
    "socket closed",
)
_LATE = ("timed out", "timeout", "time out")


class C10dCommunicator(Communicator):
    """A communicator over `group`, a torch.distributed process group; None is the default group.

    Deadlines are the group's own timeout, also those of groups split from it. Raises RuntimeError if torch.distributed
    is not initialised, ValueError if this process is not in `group`. Closing it destroys the group if `owns_group`,
    else leaves it to whoever made it.

    A failed exchange breaks the group, and all that is left to do with it is to destroy it. With Gloo, this rank's
    connections in it are closed, so that peers learn of it at once; a rank whose large message was cut off learns of it
    within seconds in a collective, and at the deadline in `send` and `recv`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, owns_group: bool = False) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed has no process group: call samestep.connect() or "
                "torch.distributed.init_process_group() first"
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group it was given; use it on its member ranks only")
        # The group is not kept alive from here, so that destroy_process_group() is its end, with Gloo's threads joined.
        # Were they still there when the interpreter ends, one that has to let go of a Python object then would abort
        # the process ("terminate called without an active exception"). torch.distributed.nn.functional, which the first
        # optimizer imports by way of dynamo, would keep the default group, too, as the default of its arguments.
        self._group: Callable[[], dist.ProcessGroup | None] = weakref.ref(group or dist.group.WORLD)
        self.device = _control_device(self.group)
        self._gloo = c10d_gloo.is_gloo(self.group)
        self._owns_group = owns_group
        # One of Gloo's two threads may let go of a work after it was waited for. Were that the end of the work, the
        # thread would need the interpreter's lock for it, while it holds a lock of the group's: with the group's end,
        # which holds the former and needs the latter, they would wait for each other for ever.
        self._recent: deque[Any] = deque(maxlen=2)
        self._broken: tuple[type[CommunicatorError], str] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; CommunicatorError once it is destroyed."""
        group = self._group()
        if group is None:
            raise CommunicatorError(f"rank {self.rank} of {self.size}: the process group has been destroyed")
        return group

    @property
    def timeout_s(self) -> float:
        """The deadline of the group's exchanges, in seconds."""
        return _timeout(self.group, self.device).total_seconds()

    def _start(self, op: Op) -> Work:
        if self._broken is not None:
            raise self._again()
        group = self.group
        try:
            work, finish = self._begin(op, group)
        except RuntimeError as error:
            raise self.failed(op, error) from error
        if work is None:
            return DoneWork()
        if self._gloo:
            self._recent.append(work)
        return _C10dWork(self, op, work, finish)

    def failed(self, op: Op | str, error: RuntimeError) -> CommunicatorError:
        """Translate the backend's `error` in `op`; the first one breaks the group, on the peers, too."""
        if self._broken is not None:
            return self._again()
        said = str(error).lower()
        kind = PeerLostError if any(s in said for s in _LOST) else CommunicatorError
        kind = DeadlineError if kind is CommunicatorError and any(s in said for s in _LATE) else kind
        what = {
            PeerLostError: "a peer died or closed its connection; look for the first error among the other ranks",
            DeadlineError: "a peer did not come in time; look for a rank that stopped or made fewer calls",
            CommunicatorError: "the backend failed",
        }[kind]
        name = op if isinstance(op, str) else describe(op)
        message = f"rank {self.rank} of {self.size}, {name}: {what} ({_first_line(error)})"
        self._broken = kind, message
        if self._gloo:
            c10d_gloo.hang_up(self.group)
        return kind(message)

    def wait_for(self, op: Op, work: Any) -> None:
        """Wait for the backend's `work`; raise RuntimeError if it failed."""
        if self._gloo and not isinstance(op, Send | Recv) and (isinstance(op, Barrier) or op.tensor.is_cpu):
            c10d_gloo.wait(self.group, work)
        else:
            work.wait()

    def _again(self) -> CommunicatorError:
        assert self._broken is not None
        kind, message = self._broken
        return kind(f"rank {self.rank}: the group is broken since: {message}")

    def _begin(self, op: Op, group: dist.ProcessGroup) -> tuple[Any, Callable[[], None] | None]:
        """Give `op` to the backend; return its work (None if nothing had to move) and what to do on arrival."""
        match op:
            case Barrier():
                return dist.barrier(group=group, async_op=True), None
            case AllToAll(output=output, tensor=tensor):
                splits = list(op.output_splits), list(op.input_splits)
                if tensor.dtype not in _MOVABLE:
                    size = tensor.element_size()
                    splits = [n * size for n in splits[0]], [n * size for n in splits[1]]
                output, tensor = _movable(output), _movable(tensor)
                return dist.all_to_all_single(output, tensor, *splits, group=group, async_op=True), None
            case _ if op.tensor.numel() == 0:
                return None, None
            case AllReduce(tensor=tensor, reduction=reduction):
                carrier, how, finish = _reducible(tensor, reduction, self.size)
                return dist.all_reduce(carrier, how, group=group, async_op=True), _back(tensor, carrier, finish)
            case ReduceScatter(reduction=reduction) if reduction not in (Reduction.SUM, Reduction.MEAN):
                return self._reduce_and_take(op)
            case ReduceScatter(output=output, tensor=tensor, reduction=reduction):
                carrier, how, _ = _reducible(tensor.view(-1), reduction, self.size)
                part, _, finish = _reducible(output.view(-1), reduction, self.size)
                work = _reduce_scatter(part, carrier, how, group=group, async_op=True)
                return work, _back(output.view(-1), part, finish)
            case Broadcast(tensor=tensor, source=source):
                return dist.broadcast(_movable(tensor), self._global(source), group=group, async_op=True), None
            case AllGather(output=output, tensor=tensor):
                output, tensor = _movable(output.view(-1)), _movable(tensor.view(-1))
                return _all_gather(output, tensor, group=group, async_op=True), None
            case Send(tensor=tensor, peer=peer, tag=tag):
                return dist.isend(_movable(tensor), self._global(peer), group=group, tag=tag), None
            case Recv(tensor=tensor, peer=peer, tag=tag):
                return dist.irecv(_movable(tensor), self._global(peer), group=group, tag=tag), None

    def _reduce_and_take(self, op: ReduceScatter) -> tuple[Any, Callable[[], None]]:
        """Reduce everything and keep a part: Gloo's reduce_scatter of torch 2.6 sums, whatever it is asked for."""
        whole = op.tensor.view(-1).clone()
        carrier, how, finish = _reducible(whole, op.reduction, self.size)
        back = _back(whole, carrier, finish)

        def arrive() -> None:
            if back is not None:
                back()
            op.output.view(-1).copy_(whole.view(self.size, -1)[self.rank])

        return dist.all_reduce(carrier, how, group=self.group, async_op=True), arrive

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        name = self.broadcast_object(uuid.uuid4().hex)
        if self.rank not in ranks:
            return None
        try:
            group = _subgroup(self.group, ranks, self.device, name)
        except RuntimeError as error:
            raise self.failed("split", error) from error
        return C10dCommunicator(group, owns_group=True)

    def close(self) -> None:
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group(self.group)
            self._group = _gone
            self._recent.clear()


class _C10dWork(Work):
    def __init__(self, owner: C10dCommunicator, op: Op, work: Any, finish: Callable[[], None] | None) -> None:
        self._owner, self._op, self._work, self._finish = owner, op, work, finish
        self._error: CommunicatorError | None = None

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))
        if self._work is None:
            return
        work, self._work = self._work, None
        try:
            self._owner.wait_for(self._op, work)
        except RuntimeError as error:
            self._error = self._owner.failed(self._op, error)
            raise type(self._error)(str(self._error)) from error
        if self._finish is not None:
            self._finish()


# Dtypes that every backend can move as they are; the others travel as bytes.
_MOVABLE = frozenset(
    {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


def _movable(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _MOVABLE else tensor.view(-1).view(torch.uint8)


def _reducible(tensor: Tensor, reduction: Reduction, size: int) -> tuple[Tensor, Any, Callable[[Tensor], None] | None]:
    """Return a tensor that backends can reduce, the reduction to ask for, and what makes its result the right one."""
    how = _REDUCE_OPS[reduction]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    elif tensor.dtype is torch.bool:  # as bytes 0 and 1, of which max is "or" and min is "and"
        tensor = tensor.view(torch.uint8)
        how = {Reduction.BIT_OR: dist.ReduceOp.MAX, Reduction.BIT_AND: dist.ReduceOp.MIN}.get(reduction, how)
    elif tensor.dtype is torch.int16:  # Gloo knows no int16; sums wrap around alike when cut back
        tensor = tensor.to(torch.int32)
    finish = (lambda t: t.div_(size)) if reduction is Reduction.MEAN else None
    return tensor, how, finish


def _back(target: Tensor, carrier: Tensor, finish: Callable[[Tensor], None] | None) -> Callable[[], None] | None:
    copied = target.dtype is torch.int16
    if finish is None and not copied:
        return None

    def arrive() -> None:
        if finish is not None:
            finish(carrier)
        if copied:
            target.copy_(carrier)

    return arrive


def _subgroup(parent: dist.ProcessGroup, ranks: Sequence[int], device: torch.device, name: str) -> dist.ProcessGroup:
    """Make a group of some of `parent`'s ranks, with its backend and its timeout; only these ranks call it.

    `dist.new_group` either has to be called by every rank there is, or names the group after the number of groups that
    the process is in: ranks of different numbers then wait for one another under different names. Hence one step lower.
    """
    world_ranks = [dist.get_global_rank(parent, rank) for rank in ranks]
    inside = dist.distributed_c10d
    group: dist.ProcessGroup
    group, _ = inside._new_process_group_helper(
        len(ranks),
        world_ranks.index(dist.get_rank()),
        world_ranks,
        dist.get_backend_config(parent),
        inside._get_default_store(),
        group_name=name,  # type: ignore[arg-type]
        timeout=_timeout(parent, device),
    )
    inside._world.pg_group_ranks[group] = {world: rank for rank, world in enumerate(world_ranks)}
    return group


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend that keeps none
        return dist.distributed_c10d.default_pg_timeout
    return timeout


def _control_device(group: dist.ProcessGroup) -> torch.device:
    types = {torch.device(d).type for d in group._device_types}
    return torch.device("cpu") if "cpu" in types else torch.device("cuda", torch.cuda.current_device())


def _gone() -> None:
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

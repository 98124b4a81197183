"""Ranks of one host that share memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from samestep.comm.base import Communicator, Work
from samestep.comm.checked import CheckedCommunicator
from samestep.comm.ops import AllReduce, Barrier, Op, Recv, Send, describe
from samestep.comm.shm import exchanges, living
from samestep.comm.shm.board import MASK, State, make_fence
from samestep.comm.shm.gather import Shared, Unshared, share
from samestep.comm.shm.header import Place, decode, encode, place_in, same
from samestep.comm.shm.kernels import version_for
from samestep.comm.shm.room import Room, in_dtype, room_bytes
from samestep.comm.shm.waiting import KINDS, Failure, Waiter
from samestep.comm.shm.work import DelegatedWork, SharedWork
from samestep.errors import CommunicatorError, MismatchError, SamestepError

__all__ = ["ShmCommunicator"]

_SLOT_BYTES = 2**20


class ShmCommunicator(Communicator):
    """A communicator of ranks of one host, on memory that they share; made by `gather`.

    Ranks that ask for different exchanges get a MismatchError that lists every rank's, and the group stays usable. Any
    other error breaks the group, on all ranks. Messages between two ranks (send, recv) and tensors that are not in the
    CPU's memory go through `control`, and new groups begin there.

    An exchange begins in `start`, if none is under way before it: this rank's part is shown to the others. The rest
    is done in `wait`, `done`, later exchanges' `start` and `wait`, and the waits of other groups of this class in this
    process, always in the order of the calls to `start`. So works may be waited for in any order. One thread at a time
    drives a group.
    """

    _scales = True

    def __init__(self, control: Communicator, shared: Shared, timeout_s: float, slot_bytes: int) -> None:
        self.rank, self.size, self.device = control.rank, control.size, torch.device("cpu")
        self._control, self._timeout_s, self._slot_bytes = control, timeout_s, slot_bytes
        self._owned: Communicator | None = None
        self._fence = make_fence()
        self._room = Room(shared.mappings, self.rank, slot_bytes, self._fence, shared.kernels)
        self._own = self._room.boards[self.rank]
        self._waiter = Waiter(
            self._room.boards, self.rank, shared.processes, timeout_s, partial(living.others_go_on, weakref.ref(self))
        )
        self._lock = threading.RLock()
        self._queue: deque[SharedWork] = deque()
        self._broken: tuple[type[CommunicatorError], str] | None = None
        self._closed = ""  # why
        living.join(self)

    @classmethod
    def gather(
        cls,
        control: Communicator,
        *,
        timeout_s: float = 1800.0,
        slot_bytes: int = _SLOT_BYTES,
        kernels: bool = True,
    ) -> ShmCommunicator | Unshared:
        """Make a communicator of `control`'s ranks, if all of them can map each other's memory; else say why not.

        All ranks call it, and get the same answer. `timeout_s` is the deadline of every exchange, in seconds: how long
        one rank waits for the others. Each rank needs four times `slot_bytes` of memory (at least 4096; rounded up to
        pages); large tensors go through in pieces. `kernels` allows compiled loops, which are used if all ranks have
        them; sums have the same bits without. `control` must stay open, and is not closed by this one.
        """
        slot_bytes = -(-max(slot_bytes, 4096) // 4096) * 4096
        shared = share(control, room_bytes(slot_bytes), version_for(control.size) if kernels else 0)
        return shared if isinstance(shared, Unshared) else cls(control, shared, timeout_s, slot_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a tensor in shared memory, of zeros; all ranks call it, with the same arguments.

        All-reduce works on it, and on contiguous parts of it, where it is, without copies. Where memory can't be had on
        some rank, it is an ordinary tensor on all of them, for which everything works alike. It is given back when no
        rank uses it any more; it stays good after `close`. After an error of the group take another one: a peer that
        learns of it later may still write a result to this one.
        """
        num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
        shared = share(self, -(-num_bytes // 4096) * 4096)
        if isinstance(shared, Unshared):
            return torch.zeros(tuple(shape), dtype=dtype)
        own = self._room.add(shared.mappings)
        return in_dtype(own[: torch.Size(shape).numel() * dtype.itemsize], dtype).view(tuple(shape))

    def _start(self, op: Op) -> Work:
        with self._lock:
            self._advance()
            self._raise_if_broken()
            if isinstance(op, Send | Recv) or not (isinstance(op, Barrier) or op.tensor.is_cpu):
                return self._delegate(op)
            work = SharedWork(self, op)
            self._queue.append(work)
            if len(self._queue) == 1:
                self._begin(work)
        return work

    def drive(self, work: SharedWork) -> None:
        """Carry on until `work` is finished, blocking."""
        with self._lock:
            while not work.finished:
                head = self._queue[0]
                failure = self._waiter.wait(head.needs, self._fence, partial(self._name, head.op))
                if failure is not None:
                    self._break(failure, head.needs)
                    return
                self._go_on(head)

    @property
    def busy(self) -> bool:
        """Whether exchanges are under way."""
        return bool(self._queue)

    def poll(self) -> None:
        """Carry on as far as is possible without waiting; notice if the rest will never be."""
        if self._lock.acquire(blocking=False):
            try:
                self._carry_on()
            finally:
                self._lock.release()

    def attend(self, most_s: float) -> None:
        """Carry on with exchanges that nobody may wait for, and see whether that is in vain; then sleep up to `most_s`.

        For a thread beside those that use the group, to be called again and again while exchanges are under way. The
        sleep ends when a peer shows something, and keeps no other thread from the group.
        """
        if not self._lock.acquire(timeout=most_s):
            return
        try:
            target = self._carry_on()
            if target is None:
                return
            waiter = self._waiter
        finally:
            self._lock.release()
        waiter.doze(target, most_s)

    def delegate_failed(self, error: CommunicatorError) -> None:
        state = next(s for s, kind in reversed(KINDS.items()) if isinstance(error, kind))
        with self._lock:
            if self._broken is None and not self._closed:
                meeting = self._queue[0].needs if self._queue else self._room.meeting + 1
                self._break(Failure(state, str(error), False), meeting)

    def close(self, why: str = "the communicator is closed") -> None:
        """Give back this rank's share of the memory; exchanges that it has not taken part in fail on the others.

        `why` is what whoever uses it later is told.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = why
            living.leave(self)
            self._leave(State.CLOSED, self._room.meeting + 1)
            self._let_go()
            owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()

    def forked(self) -> None:
        """In a process forked from a rank, which is none: leave the rank's memory to it."""
        self._lock = threading.RLock()  # the rank may have had it
        if not self._closed:
            self._closed = f"process {os.getpid()} was forked from this rank and is none itself: leave exchanges to it"
            self._let_go()

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        try:
            part = self._control.split(ranks)
            return None if part is None else self._gather_part(part)
        except CommunicatorError as error:
            self.delegate_failed(error)
            raise

    def _gather_part(self, part: Communicator) -> Communicator:
        try:
            made = ShmCommunicator.gather(
                part, timeout_s=self._timeout_s, slot_bytes=self._slot_bytes, kernels=self._room.kernels
            )
        except BaseException:
            part.close()
            raise
        if isinstance(made, Unshared):
            return CheckedCommunicator(part)
        made._owned = part
        return made

    # How an exchange goes on. All of it under the lock.

    def _advance(self) -> None:
        while self._queue and self._waiter.all_reached(self._queue[0].needs):
            self._go_on(self._queue[0])

    def _carry_on(self) -> int | None:
        """Go as far as is possible without waiting; return the meeting that is waited for, unless that is in vain."""
        self._advance()
        if not self._queue:
            return None
        head = self._queue[0]
        failure = self._waiter.look(head.needs, self._fence, partial(self._name, head.op))
        if failure is None:
            return head.needs
        self._break(failure, head.needs)
        return None

    def _begin(self, work: SharedWork) -> None:
        room, op = self._room, work.op
        try:
            place = room.place(op.tensor) if exchanges.is_worth_a_place(op) else None
            op = work.op = exchanges.scaled(room, op, place)
            meeting = room.meeting + 1
            work.header = encode(op, meeting & MASK, place)
            self._own.show(meeting & 1, work.header)
            if place is None:
                work.meetings = exchanges.exchange(room, op)
                self._resume(work)
            else:
                work.needs = room.come()
        except BaseException as error:
            if not self._fail(work, error):
                raise

    def _go_on(self, work: SharedWork) -> None:
        """Do what follows the meeting to which all have come."""
        try:
            self._fence()
            failure = self._waiter.given_up(work.needs, self._fence)
            if failure is not None:
                self._break(failure, work.needs)
                return
            if work.fresh:
                work.fresh = False
                self._compare(work)
            self._resume(work)
        except BaseException as error:
            if not self._fail(work, error):
                raise

    def _fail(self, work: SharedWork, error: BaseException) -> bool:
        """End the group, as this rank can't do its part; tell whether `error` is thus told to those who wait for it.

        It is not if a signal's handler raised it.
        """
        if self._broken is not None:
            return False
        said = f"{self._name(work.op)}: {type(error).__name__}: {error}"
        self._break(Failure(State.FAILED, said, False), self._room.meeting + 1, error)
        return isinstance(error, Exception)

    def _compare(self, work: SharedWork) -> None:
        """See that all ranks ask for the same, and take the way that this needs."""
        turn, room = work.needs & 1, self._room
        headers = [board.header(turn) for board in room.boards]
        if all(same(work.header, header) for header in headers):
            if work.meetings is None:
                assert isinstance(work.op, AllReduce)
                work.meetings = self._where_it_lies(work.op, [place_in(h) for h in headers])
        elif len({decode(header).text for header in headers}) > 1:
            work.meetings = self._disagree(work.op)
        else:  # some have it in the arena, others not: once more, through the slots
            work.meetings = exchanges.exchange(room, work.op)

    def _where_it_lies(self, op: AllReduce, places: Sequence[Place]) -> exchanges.Meetings:
        if len({place.number for place in places}) > 1:  # a rank may have given up the memory that another one names
            return exchanges.exchange(self._room, op)
        return exchanges.reduce_in_place(self._room, op, places)

    def _resume(self, work: SharedWork) -> None:
        assert work.meetings is not None
        try:
            work.needs = next(work.meetings)
        except StopIteration:
            self._finish(work)
        except exchanges.Disagreement:
            work.meetings = self._disagree(work.op)
            self._resume(work)
        except MismatchError as error:
            self._finish(work, error)

    def _disagree(self, op: Op) -> exchanges.Meetings:
        room = self._room
        most = room.slot_bytes - 8
        text = describe(op).encode()[:most]
        room.next(torch.int64, 1).fill_(len(text))
        room.next(torch.uint8, len(text), 8).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        met = room.come()
        yield met
        lines = []
        for rank in range(room.size):
            length = int(room.shown(met, rank, torch.int64, 1))
            said = room.shown(met, rank, torch.uint8, length, 8).numpy().tobytes().decode(errors="replace")
            lines.append(f"\n  rank {rank}: {said}")
        raise MismatchError(f"ranks ask for different exchanges; make the same call on every rank:{''.join(lines)}")

    def _finish(self, work: SharedWork, error: SamestepError | None = None) -> None:
        work.meetings, work.error, work.finished = None, error, True
        self._queue.popleft()
        if self._queue:
            self._begin(self._queue[0])

    # How it ends.

    def _delegate(self, op: Op) -> Work:
        try:
            return DelegatedWork(self, self._control.start(op))
        except CommunicatorError as error:
            self.delegate_failed(error)
            raise

    def _raise_if_broken(self) -> None:
        if self._closed:
            raise CommunicatorError(f"{self._who()}: {self._closed}")
        if self._broken is not None:
            raise self._again()

    def _again(self) -> CommunicatorError:
        assert self._broken is not None
        kind, said = self._broken
        return kind(f"rank {self.rank}: the group is broken since: {said}")

    def _break(self, failure: Failure, meeting: int, cause: BaseException | None = None) -> None:
        """End the group for this rank, which takes no part in `meeting` any more, and tell the others why.

        The first work under way gets the error, the others get it again.
        """
        head = self._queue.popleft() if self._queue else None
        error = failure.error(self._who() if head is None else self._name(head.op))
        self._broken = type(error), str(error)
        self._own.tell_error(failure.cause)
        self._leave(failure.state, meeting)
        if head is not None:
            error.__cause__ = cause
            head.meetings, head.error, head.finished = None, error, True
        self._abandon(self._again())

    def _let_go(self) -> None:
        self._abandon(CommunicatorError(f"{self._who()}: {self._closed}"))
        self._room.close()
        del self._waiter, self._own

    def _abandon(self, error: SamestepError) -> None:
        for work in self._queue:
            work.meetings, work.error, work.finished = None, error, True
        self._queue.clear()

    def _leave(self, state: State, meeting: int) -> None:
        if self._broken is None or state is not State.CLOSED:  # the error stays readable for those who come late
            self._fence()
            self._own.leave(state, meeting, self._fence)
            self._fence()
            self._own.wake()

    def _who(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def _name(self, op: Op) -> str:
        return f"{self._who()}, {describe(op)}"

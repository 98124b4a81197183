"""What the ranks of the stress tests do; light to import, as every process of a test imports it."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shm_ranks import gathered
from torch import Tensor

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import AllReduce
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.room import NUM_SLOTS
from samestep.errors import CommunicatorError
from samestep.testing.stress import check_sums

SLOT_BYTES = 4096


def add_often(control: Communicator, sums: int, seed: int, meeting: int = 0) -> None:
    with gathered(control, slot_bytes=SLOT_BYTES) as comm:
        if meeting:
            start_at(comm, meeting)
        check_sums(comm, sums, seed)
        assert comm._room.meeting > 2**32 or not meeting, "the counters have not wrapped around"


def start_at(comm: ShmCommunicator, meeting: int) -> None:
    """Have all ranks go on as if they had come to `meeting` meetings."""
    comm._control.barrier()
    comm._room.meeting = meeting
    comm._own.come_to(meeting)
    comm._control.barrier()


def broadcast_much(control: Communicator, num_bytes: int) -> None:
    """The source has zeros that nobody wrote, which take no memory, and ones here and there."""
    places = [0, 2**31 - 1, 2**31, num_bytes - 1]
    with gathered(control) as comm:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        if comm.rank == 0:
            tensor[places] = 1
        comm.broadcast(tensor)
        assert tensor[places].tolist() == [1] * len(places)
        assert int(tensor.count_nonzero()) == len(places)


# Faults


def _publish_first(comm: ShmCommunicator) -> None:
    """The counter is seen before the data: what a missing barrier amounts to where stores are not seen in order."""
    room, late = comm._room, list[tuple[Tensor, Tensor]]()
    come, all_shown, next_ = room.come, room.all_shown, room.next

    def come_first() -> int:
        met = come()
        for slot, data in late:
            slot.copy_(data)
        late.clear()
        return met

    def all_shown_late(meeting: int, tensor: Tensor) -> list[Tensor]:
        parts = all_shown(meeting, tensor)
        if meeting <= room.meeting:
            return parts
        late.append((parts[room.rank], torch.empty_like(tensor)))
        return [*parts[: room.rank], late[-1][1], *parts[room.rank + 1 :]]

    def next_late(dtype: torch.dtype, count: int, start: int = 0) -> Tensor:
        slot = next_(dtype, count, start)
        late.append((slot, torch.empty_like(slot)))
        return late[-1][1]

    room.come, room.all_shown, room.next = come_first, all_shown_late, next_late  # type: ignore[method-assign]


def _read_first(comm: ShmCommunicator) -> None:
    """The data are read before the counters are: what a missing barrier amounts to where loads are not in order."""
    waiter, dice = comm._waiter, random.Random(1)
    wait = waiter.wait

    def hasty(target: int, *rest: Callable[[], object]) -> object:
        head = comm._queue[0]
        if not head.fresh and dice.random() < 0.5:  # else the headers would tell
            return None
        return wait(target, *rest)  # type: ignore[arg-type]

    waiter.wait = hasty  # type: ignore[method-assign, assignment]


def _reuse_early(comm: ShmCommunicator) -> None:
    """There are half as many slots as are needed."""
    room = comm._room
    room._slots = [[slots[turn % (NUM_SLOTS // 2)] for turn in range(NUM_SLOTS)] for slots in room._slots]


def _go_on_early(comm: ShmCommunicator) -> None:
    """A rank goes on from the last meeting of a sum in place while others still write to its tensor."""
    waiter = comm._waiter
    wait = waiter.wait

    def hasty(target: int, *rest: Callable[[], object]) -> object:
        head = comm._queue[0]
        if not head.fresh and isinstance(head.op, AllReduce) and comm._room.place(head.op.tensor) is not None:
            return None
        return wait(target, *rest)  # type: ignore[arg-type]

    waiter.wait = hasty  # type: ignore[method-assign, assignment]


FAULTS: dict[str, Callable[[ShmCommunicator], None]] = {
    "publishes before it writes": _publish_first,
    "reads before all have come": _read_first,
    "uses slots again too early": _reuse_early,
    "goes on while others write": _go_on_early,
}


def add_with_a_fault(control: Communicator, fault: str) -> None:
    """Every rank has the fault from the first sum on; the first wrong one ends it, on all ranks."""
    with gathered(control, slot_bytes=SLOT_BYTES) as comm:
        empty = comm.empty

        def empty_before_the_fault(*args: Any) -> Tensor:
            tensor = empty(*args)
            FAULTS[fault](comm)
            return tensor

        comm.empty = empty_before_the_fault  # type: ignore[method-assign]
        check_sums(comm, 100_000, 3)


# Signals


class _InterruptError(Exception):
    """What a signal's handler raises."""


def interrupt_often(control: Communicator, sums: int, seed: int) -> tuple[int, int]:
    """On rank 1 a timer's handler raises at any moment of a wait. Each sum is right in the end, or an error on all.

    Returns how often a wait was interrupted, and how often the group broke.
    """
    dice, armed = random.Random(seed), []

    def ring(*_: object) -> None:
        if armed:
            armed.clear()
            raise _InterruptError

    signal.signal(signal.SIGALRM, ring)
    turn = interrupts = breaks = 0
    while turn < sums:
        with gathered(control, slot_bytes=SLOT_BYTES) as comm:
            try:
                while turn < sums:
                    tensor = torch.full((3000 if turn % 3 else 20_000,), turn + comm.rank)
                    work = comm.start(AllReduce(tensor))
                    while comm.rank == 1 and not _waited(work, dice, armed):
                        interrupts += 1
                    work.wait()
                    assert bool((tensor == turn * comm.size + sum(range(comm.size))).all())
                    turn += 1
            except CommunicatorError as error:
                if "_InterruptError: " not in str(error):
                    raise
                breaks += 1
            turn = max(control.all_gather_object(turn))
    return interrupts, breaks


def _waited(work: Work, dice: random.Random, armed: list[bool]) -> bool:
    try:
        if dice.random() < 0.2:
            armed.append(True)
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 1e-3))
        work.wait()
    except _InterruptError:
        return False
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


# Many groups


def interleave(control: Communicator, rounds: int, seed: int) -> tuple[dict[str, int], dict[str, int]]:
    """Make groups, and groups in groups, close some, and have exchanges of all of them under way at once.

    Works are waited for in another order on each rank. Returns what the process held before and after.
    """
    _some_rounds(control, 3, seed)
    before = _held()
    _some_rounds(control, rounds, seed)
    return before, _held()


def _some_rounds(control: Communicator, rounds: int, seed: int) -> None:
    same, own = random.Random(seed), random.Random(seed + control.rank + 1)
    with gathered(control, slot_bytes=SLOT_BYTES) as whole:
        groups: list[ShmCommunicator | None] = []
        for turn in range(rounds):
            if len(groups) < 5:
                groups.append(_part(same.choice([whole, *groups[-1:]]), same, control.size))
            if turn % 4 == 3:
                closing = groups.pop(same.randrange(len(groups)))
                if closing is not None:
                    closing.close()
            _exchange_in_all([whole, *groups], same, own)
        for group in groups:
            if group is not None:
                group.close()
        control.barrier()


def _part(group: ShmCommunicator | None, same: random.Random, size: int) -> ShmCommunicator | None:
    """Split `group` into one of some ranks; all ranks of all groups draw the same numbers."""
    wanted = [same.random() for _ in range(size)]
    if group is None:
        return None
    ranks = [rank for rank in range(group.size) if wanted[rank] < 0.7] or [0]
    part = group.split(ranks)
    assert part is None or isinstance(part, ShmCommunicator), part
    return part


def _exchange_in_all(groups: list[ShmCommunicator | None], same: random.Random, own: random.Random) -> None:
    works: list[tuple[Work, Tensor, int]] = []
    for _ in range(8):
        group, count = same.choice(groups), same.choice((3, 3000, 20_000))
        if group is not None:
            tensor = torch.full((count,), group.rank, dtype=torch.int64)
            works.append((group.start(AllReduce(tensor)), tensor, sum(range(group.size))))
    own.shuffle(works)
    for work, tensor, expected in works:
        if own.random() < 0.3:
            work.done()
        work.wait()
        assert bool((tensor == expected).all()), (expected, tensor.unique())


def _held() -> dict[str, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": maps.count("memfd:samestep"),
    }

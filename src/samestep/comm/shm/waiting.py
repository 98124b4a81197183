"""Waits until all ranks have come to a meeting: awake for a moment, then asleep, watching the peers and the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samestep.comm.shm.board import COUNTER, HALF, MASK, STATE, Board, State, make_fence
from samestep.comm.shm.header import decode
from samestep.comm.shm.kernel import is_alive
from samestep.errors import CommunicatorError, DeadlineError, PeerLostError

__all__ = ["Failure", "Waiter"]

# How often to look (0.1 us each) before the core is offered to others (0.7 us if nobody wants it), and how often to do
# that before sleep: about 100 us where every rank has a core to itself, as to be woken costs 10 to 50.
_LOOKS, _OFFERS = 16, 48
# Where ranks share cores, the peer cannot run while this one looks.
_LOOKS_CROWDED, _OFFERS_CROWDED = 2, 8
# The longest sleep, after which peers are looked at, in seconds; and when something else may have to be done meanwhile.
_SLEEP_S, _NAP_S = 0.1, 0.0005

KINDS: dict[State, type[CommunicatorError]] = {
    State.FAILED: CommunicatorError,
    State.PEER_LOST: PeerLostError,
    State.LATE: DeadlineError,
}


@dataclass(frozen=True)
class Failure:
    """Why a group is of no more use: `cause` is what the first rank that noticed said."""

    state: State
    cause: str
    heard: bool  # from another rank

    def error(self, who: str) -> CommunicatorError:
        text = f"{who}: the group is broken since: {self.cause}" if self.heard else self.cause
        return KINDS[self.state](text)


class Waiter:
    """Waits, in the place of rank `rank`, for all others.

    `processes[r]` is the number and the start time of rank r's process. `idle` is called before each sleep; it does
    what can be done meanwhile and tells whether there may soon be more.
    """

    def __init__(
        self,
        boards: Sequence[Board],
        rank: int,
        processes: Sequence[tuple[int, int]],
        timeout_s: float,
        idle: Callable[[], bool],
    ) -> None:
        self._boards, self._rank, self._processes = boards, rank, processes
        self._timeout_s, self._idle = timeout_s, idle
        self._own = boards[rank]
        self._awaited, self._next_look, self._deadline = -1, 0.0, 0.0
        self._others = [board for r, board in enumerate(boards) if r != rank]
        self._words = [board.words for board in self._others]
        crowded = len(boards) > len(os.sched_getaffinity(0))
        self._looks, self._offers = (_LOOKS_CROWDED, _OFFERS_CROWDED) if crowded else (_LOOKS, _OFFERS)

    def all_reached(self, target: int) -> bool:
        """Tell whether all have come to the meeting `target`."""
        return all((words[COUNTER] - target) & MASK < HALF for words in self._words)

    def given_up(self, target: int, fence: Callable[[], None]) -> Failure | None:
        """Find out whether a rank that has come to the meeting `target` got an error there, as it waited too long.

        Asked also when all have come: else who comes late would go on with tensors that their ranks have done with.
        """
        for board in self._others:
            if board.words[STATE] > State.CLOSED:
                fence()
                if board.left_at(target):
                    return Failure(board.state, board.error, True)
        return None

    def wait(self, target: int, fence: Callable[[], None], what: Callable[[], str]) -> Failure | None:
        """Return once all have come to the meeting `target`, or why not all will; `what` says what for."""
        for words, board in zip(self._words, self._others, strict=True):
            if (words[COUNTER] - target) & MASK >= HALF and not self._awake(words, target):
                failure = self._asleep(board, target, fence, what)
                if failure is not None:
                    return failure
        return None

    def look(self, target: int, fence: Callable[[], None], what: Callable[[], str]) -> Failure | None:
        """Return why not all will come to the meeting `target`, if that can be told by now, without waiting.

        The deadline counts from the first look for a meeting.
        """
        failure = self._left(target, fence, what) or self.given_up(target, fence)
        if failure is not None:
            return failure
        now = time.monotonic()
        if target != self._awaited:
            self._awaited, self._next_look, self._deadline = target, now + _SLEEP_S, now + self._timeout_s
        if now < min(self._next_look, self._deadline):
            return None
        self._next_look = now + _SLEEP_S
        failure = self._dead(target, fence, what)
        if failure is None and now >= self._deadline and not self.all_reached(target):
            return self._late(target, what)
        return failure

    def doze(self, target: int, most_s: float) -> None:
        """Sleep up to `most_s`, until a rank that is missing at the meeting `target` shows something, or for no reason.

        For a thread beside the one that waits. If there are several, they may miss what wakes them.
        """
        for board in self._others:
            if not board.reached(target):
                fence = make_fence()  # that of the group is its driver's
                self._own.doze(1)
                fence()
                board.sleep(target, most_s)
                self._own.doze(0)
                return

    def _awake(self, words: memoryview, target: int) -> bool:
        for _ in range(self._offers):
            for _ in range(self._looks):
                if (words[COUNTER] - target) & MASK < HALF:
                    return True
            os.sched_yield()
        return False

    def _asleep(self, board: Board, target: int, fence: Callable[[], None], what: Callable[[], str]) -> Failure | None:
        self._own.sleeping = 1
        fence()
        try:
            while not board.reached(target):
                failure = self.look(target, fence, what)
                if failure is not None:
                    return failure
                nap = _NAP_S if self._idle() else _SLEEP_S
                board.sleep(target, max(0.0, min(nap, self._deadline - time.monotonic())))
        finally:
            self._own.sleeping = 0
        return None

    def _left(self, target: int, fence: Callable[[], None], what: Callable[[], str]) -> Failure | None:
        """Find out whether a rank that is missing has closed its communicator, or has failed."""
        for rank, board in self._missing(target):
            state = board.state
            if state is not State.HERE:
                fence()
                if board.reached(target):
                    continue
                if state is State.CLOSED:
                    return Failure(
                        State.PEER_LOST, f"{what()}: rank {rank} closed its communicator without taking part", False
                    )
                return Failure(state, board.error, True)
        return None

    def _dead(self, target: int, fence: Callable[[], None], what: Callable[[], str]) -> Failure | None:
        dead = [rank for rank, _ in self._missing(target) if not is_alive(*self._processes[rank])]
        fence()
        dead = [rank for rank in dead if not self._boards[rank].reached(target)]
        if not dead:
            return None
        names = ", ".join(f"rank {rank} (process {self._processes[rank][0]})" for rank in dead)
        return Failure(
            State.PEER_LOST,
            f"{what()}: {names} died; look for what ended it: its own traceback or log, or the kernel's",
            False,
        )

    def _late(self, target: int, what: Callable[[], str]) -> Failure:
        missing = [rank for rank, _ in self._missing(target)]
        doing = "".join(
            f"\n  rank {rank}: {self._doing(rank, here=rank not in missing)}" for rank in range(len(self._boards))
        )
        return Failure(
            State.LATE,
            f"{what()}: rank(s) {missing} did not come within {self._timeout_s:g} s; look for a rank that stopped or "
            f"made fewer calls:{doing}",
            False,
        )

    def _doing(self, rank: int, *, here: bool) -> str:
        headers = [decode(self._boards[rank].header(turn)) for turn in range(2)]
        last = max(headers, key=lambda h: (h.meeting - headers[0].meeting + HALF) & MASK)
        if here:
            return f"is in {last.text}"
        return f"has not come; its last exchange is {last.text}" if last.text else "has not come to any exchange yet"

    def _missing(self, target: int) -> list[tuple[int, Board]]:
        return [(rank, board) for rank, board in enumerate(self._boards) if not board.reached(target)]

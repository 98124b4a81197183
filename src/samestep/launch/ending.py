"""Decides how a run ends: who is told by which signal, when patience is over, and what the exit code is.

Pure. Each function takes the state of the run and what has just happened, and returns the next state and the
signal to send now, or None. SIGKILL is meant for a rank's whole process group, any other signal for the rank
alone.
"""

import errno
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from samestep.launch.told import NOTHING_TOLD, Told

__all__ = [
    "Elsewhere",
    "Exit",
    "Interrupt",
    "OutputLost",
    "State",
    "ended_elsewhere",
    "exit_code",
    "exited",
    "interrupted",
    "output_lost",
    "timed",
]

# One press of Ctrl-C may arrive twice: from the terminal, and passed on by a program that started the
# launcher.
_SAME_PRESS_S = 0.1


@dataclass(frozen=True)
class Exit:
    """A rank has ended: with an exit code of 0 or more, or by signal n, which is -n here.

    `told` is the last signal that the agent had sent to it before. `report` is what the rank itself said of its
    failure, and `remark` what is known besides.
    """

    rank: int
    pid: int
    returncode: int
    told: int | None = None
    report: Told = NOTHING_TOLD
    remark: str = ""

    @property
    def failed(self) -> bool:
        """Whether this is anything but a good end."""
        return self.returncode != 0

    @property
    def raised(self) -> bool:
        """Whether it was ended on purpose when an exception was ending it already."""
        return self.obeyed and self.report.when is not None

    @property
    def obeyed(self) -> bool:
        """Whether the rank ended as the agent's signal asked: by it, or with the exit code that stands for it."""
        return self.told is not None and self.returncode in (-self.told, 128 + self.told)


@dataclass(frozen=True)
class Interrupt:
    """The agent was told to end by a signal."""

    signum: int


@dataclass(frozen=True)
class OutputLost:
    """What the agent writes to is gone, such as the reader of a pipe."""

    stream: str
    errno: int


@dataclass(frozen=True)
class Elsewhere:
    """Something on another machine ends the attempt here: `lines` tell it, and `exit_code` would be the launcher's.

    `quoted` is what a rank there said of its failure. `then` says what may follow: a restart if there are any left, one
    that doesn't count, as another machine has come to take part, or nothing.
    """

    lines: tuple[str, ...]
    exit_code: int = 1
    quoted: tuple[str, ...] = ()
    then: Literal["restart", "rejoin", "end"] = "restart"


@dataclass(frozen=True)
class State:
    """What is known of a run: the ranks that live, the exits in order of time, and why it is being ended, if it is."""

    living: frozenset[int]
    patience_s: float
    exits: tuple[Exit, ...] = ()
    cause: Exit | Interrupt | OutputLost | Elsewhere | None = None
    told: int | None = None
    deadline: float | None = None
    pressed: float | None = None


Step = tuple[State, int | None]


def exited(state: State, exits: Sequence[Exit], now: float) -> Step:
    """Some ranks have ended, as far as is known at the same time. The first failure ends the others.

    Of failures seen at the same time, a death by signal counts as the earlier one: peers of a killed rank
    fail because their connection closes, while nothing that a failing peer does kills a rank by a signal. Of
    exceptions that nobody caught the time is known: who ended later may have failed earlier. An exception that tells
    of a lost peer is a consequence, whatever its time: the lost one may have tidied up before it told of its own.
    """
    ordered = sorted(exits, key=lambda e: (e.returncode >= 0, _precedence(e), e.rank))
    state = replace(state, living=state.living - {e.rank for e in exits}, exits=(*state.exits, *ordered))
    first = next((e for e in ordered if e.failed), None)
    if state.cause is None and first is not None:
        return _end(state, first, signal.SIGTERM, now)
    if isinstance(state.cause, Exit) and state.cause.report.when is not None:
        state = replace(state, cause=min((state.cause, *exits), key=_precedence))
    return state, None


def interrupted(state: State, signum: int, now: float) -> Step:
    """The agent was sent `signum`: it is passed on, and Ctrl-C in a run that is already ending means: at once."""
    if signum != signal.SIGINT:
        return _tell(state, signum) if state.cause else _end(state, Interrupt(signum), signum, now)
    if state.pressed is not None and now - state.pressed < _SAME_PRESS_S:
        return state, None
    state = replace(state, pressed=now)
    return _tell(state, signal.SIGKILL) if state.cause else _end(state, Interrupt(signum), signum, now)


def output_lost(state: State, lost: OutputLost, now: float) -> Step:
    """Nobody reads `lost.stream` any more, so the run is ended."""
    if state.cause is None:
        return _end(state, lost, signal.SIGTERM, now)
    return state, None


def ended_elsewhere(state: State, cause: Elsewhere, now: float) -> Step:
    """Another machine's news end the run here, unless it is ending already."""
    if state.cause is None:
        return _end(state, cause, signal.SIGTERM, now)
    return state, None


def timed(state: State, now: float) -> Step:
    """Time has passed: ranks that were told to end and did not by the deadline are killed."""
    if state.deadline is None or now < state.deadline:
        return state, None
    return _tell(replace(state, deadline=None), signal.SIGKILL)


def exit_code(state: State) -> int:
    """The launcher's own exit code: that of the first failure in time, 128 + n for signal n, 0 where all is well."""
    match state.cause:
        case None:
            return 0
        case Exit(returncode=code) as first:
            return 1 if first.raised else code if code >= 0 else 128 - code
        case Interrupt(signum=signum):
            return 128 + signum
        case OutputLost(errno=number):
            return 128 + signal.SIGPIPE if number == errno.EPIPE else 1
        case Elsewhere(exit_code=code):
            return code


def _precedence(e: Exit) -> tuple[bool, float]:
    """Which of two failures whose time is known is the first: one that tells of a lost peer is none, if it can be."""
    known = e.failed and e.report.when is not None
    return (e.report.is_consequence, e.report.when) if known and e.report.when is not None else (True, inf)


def _end(state: State, cause: Exit | Interrupt | OutputLost | Elsewhere, signum: int, now: float) -> Step:
    return _tell(replace(state, cause=cause, deadline=now + state.patience_s), signum)


def _tell(state: State, signum: int) -> Step:
    if not state.living or state.told == signal.SIGKILL:
        return state, None
    return replace(state, told=signum), signum

"""Writes the lines that tell how a run ended. Pure.

The first failure in time comes last, as that is what is read first; its consequences come before it.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.launch.ending import Elsewhere, Exit, Interrupt, OutputLost, State

__all__ = ["Report", "how", "report", "signal_name"]


def signal_name(signum: int) -> str:
    """The name of a signal, such as "SIGKILL"; a number without a name is "signal 40"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


@dataclass(frozen=True)
class Report:
    """What a person should read: lines of the launcher's, and below them what the rank that failed first has said."""

    lines: tuple[str, ...] = ()
    quoted: tuple[str, ...] = ()


def report(state: State, host: str = "") -> Report:
    """Returns what a person should read once all ranks have ended; nothing where all is well.

    `host` is the name of this machine. Consequences of the first failure have a line each; last comes the first
    failure, with what its rank said of it.
    """
    match state.cause:
        case None:
            return Report()
        case Exit() as first:
            others = [e for e in state.exits if e.failed and e != first]
            quoted = tuple(first.report.text.rstrip().splitlines())
            last = f"{_who(first, host)} failed first: it {how(first)}{':' if quoted else ''}"
            return Report((*_others(others, f", after rank {first.rank} had failed"), last), quoted)
        case Interrupt(signum=signum):
            failed = [e for e in state.exits if e.failed and not (e.obeyed and e.told != signal.SIGKILL)]
            return Report((*_others(failed, f", after {signal_name(signum)}"), f"ended by {signal_name(signum)}"))
        case OutputLost(stream=stream, errno=number):
            return Report((f"{stream} can't be written to ({os.strerror(number)}), so the run was ended",))
        case Elsewhere(lines=lines, quoted=quoted):
            return Report((*_others([e for e in state.exits if e.failed], ""), *lines), quoted)


def _others(exits: Sequence[Exit], after: str) -> list[str]:
    """A line for each, but one for all that were ended on purpose."""
    willful = [e for e in exits if not e.obeyed or e.raised]
    obedient = _obedient([e for e in exits if e not in willful])
    return [*obedient, *(f"{_who(e)} {how(e)}{after}{_summary(e)}" for e in willful)]


def _obedient(exits: Sequence[Exit]) -> list[str]:
    """One line for all that were ended on purpose, however many there are."""
    lines = []
    for signum in sorted({e.told for e in exits if e.obeyed and e.told is not None}):
        ranks = [e.rank for e in exits if e.obeyed and e.told == signum]
        verb = "killed" if signum == signal.SIGKILL else "ended"
        lines.append(f"{_ranks(ranks)} {verb} by the launcher ({signal_name(signum)})")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    return f"ranks {', '.join(map(str, sorted(ranks)))} were"


def _who(e: Exit, host: str = "") -> str:
    return f"rank {e.rank} (pid {e.pid} on {host})" if host else f"rank {e.rank} (pid {e.pid})"


def _summary(e: Exit) -> str:
    return f": {e.report.summary}" if e.report.summary else ""


def how(e: Exit) -> str:
    """How a rank ended, to follow "it"."""
    if e.raised:
        return "raised an exception"
    if e.returncode < 0:
        remark = f" ({e.remark})" if e.remark else ""
        return f"was killed by {signal_name(-e.returncode)}{remark}"
    return f"exited with code {e.returncode}"

"""Writes the lines that tell how a run ended. Pure.

The first failure in time comes last, as that is what is read first; its consequences come before it.
"""

import os
import signal
from collections.abc import Sequence

from samestep.launch.ending import Exit, Interrupt, OutputLost, State

__all__ = ["how", "report", "signal_name"]


def signal_name(signum: int) -> str:
    """The name of a signal, such as "SIGKILL"; a number without a name is "signal 40"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def report(state: State) -> list[str]:
    """Returns what a person should read once all ranks have ended; nothing where all is well."""
    match state.cause:
        case None:
            return []
        case Exit() as first:
            others = [e for e in state.exits if e.failed and e != first]
            after = f"after rank {first.rank} had failed"
            return [
                *_obedient(others),
                *(f"{_who(e)} {how(e)}, {after}" for e in others if not e.obeyed),
                f"{_who(first)} failed first: it {how(first)}",
            ]
        case Interrupt(signum=signum):
            after = f"after {signal_name(signum)}"
            killed = [e for e in state.exits if e.obeyed and e.told == signal.SIGKILL]
            failed = [e for e in state.exits if e.failed and not e.obeyed]
            return [
                *_obedient(killed),
                *(f"{_who(e)} {how(e)}, {after}" for e in failed),
                f"ended by {signal_name(signum)}",
            ]
        case OutputLost(stream=stream, errno=number):
            return [f"{stream} can't be written to ({os.strerror(number)}), so the run was ended"]


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


def _who(e: Exit) -> str:
    return f"rank {e.rank} (pid {e.pid})"


def how(e: Exit) -> str:
    """How a rank ended, to follow "it"."""
    if e.returncode < 0:
        return f"was killed by {signal_name(-e.returncode)}"
    return f"exited with code {e.returncode}"

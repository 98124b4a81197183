"""Turns the bytes that ranks write into whole, prefixed lines.

Pure: bytes go in, bytes to be written come out; nobody here knows a file descriptor. There is one printer for
each place that the launcher writes to. A file or a pipe gets every byte as the rank wrote it, line by line. A
terminal also gets *live lines*, at the bottom of the screen: what a progress bar of rank 0 draws over and
over with carriage returns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from samestep.launch.rows import Rows

__all__ = [
    "Assembler",
    "FilePrinter",
    "Printer",
    "Source",
    "Terminal",
    "TerminalPrinter",
    "printer",
    "rank_prefix",
    "terminal_from",
]

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = b"\x1b[0m"
_ERASE_ROW = b"\x1b[2K"
_ERASE_ROW_ABOVE = b"\x1b[1A\x1b[2K"
# A live line that is wider than the terminal is cut off, not wrapped: a wrapped one could not be erased.
_WRAP_OFF, _WRAP_ON = b"\x1b[?7l", b"\x1b[?7h"


@dataclass(frozen=True)
class Source:
    """One stream of one rank."""

    rank: int
    stream: str


@dataclass(frozen=True)
class Terminal:
    """A terminal that understands escape sequences: its size in characters, and whether to use colour."""

    columns: int
    lines: int
    colour: bool = True


def terminal_from(environment: Mapping[str, str], columns: int, lines: int) -> Terminal | None:
    """Describes the terminal that `environment` tells of, or None where `TERM` says it is a dumb one.

    A size of 0 (some pseudo-terminals have no size) counts as 80 columns, 24 lines. `NO_COLOR` is honoured.
    """
    if environment.get("TERM", "").lower() in ("", "dumb", "unknown"):
        return None
    return Terminal(columns or 80, lines or 24, colour=not environment.get("NO_COLOR"))


def rank_prefix(rank: int) -> str:
    """What stands before each line of `rank`, without colour."""
    return f"[{rank}] "


class Assembler:
    """Cuts a stream of bytes, whatever the chunks in which it comes, into whole lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def __len__(self) -> int:
        """How many bytes came after the last newline."""
        return len(self._rest)

    @property
    def rest(self) -> bytes:
        """What came after the last newline."""
        return bytes(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Takes the next chunk; returns the lines that are whole now, each with its newline, or nothing."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            return b""
        lines = bytes(self._rest) + data[:end]
        self._rest = bytearray(data[end:])
        return lines

    def flush(self) -> bytes:
        """Returns the unfinished last line with a newline added, or nothing where there is none."""
        lines = bytes(self._rest) + b"\n" if self._rest else b""
        self._rest.clear()
        return lines


class Printer(Protocol):
    """Knows what to write, in which order, to one place: every method returns the bytes to be written now."""

    def feed(self, source: Source, data: bytes) -> bytes:
        """Takes a chunk of what `source` wrote."""

    def close(self, source: Source) -> bytes:
        """Notes that nothing more will come from `source`; its last line is finished for it."""

    def say(self, text: str) -> bytes:
        """Takes a line of the launcher's own, given without a newline."""


def printer(terminal: Terminal | None, *, prefix: bool = True) -> Printer:
    """The printer for a terminal, or for a file or pipe where `terminal` is None."""
    return TerminalPrinter(terminal, prefix=prefix) if terminal else FilePrinter(prefix=prefix)


class FilePrinter:
    """Passes whole lines on, every byte as it came, with a prefix if wanted."""

    def __init__(self, *, prefix: bool = True) -> None:
        self._prefix = prefix
        self._assemblers: dict[Source, Assembler] = {}

    def feed(self, source: Source, data: bytes) -> bytes:
        return self._prefixed(source, self._assemblers.setdefault(source, Assembler()).feed(data))

    def close(self, source: Source) -> bytes:
        return self._prefixed(source, self._assemblers.pop(source, Assembler()).flush())

    def say(self, text: str) -> bytes:
        return text.encode(errors="backslashreplace") + b"\n"

    def _prefixed(self, source: Source, lines: bytes) -> bytes:
        if not (lines and self._prefix):
            return lines
        prefix = rank_prefix(source.rank).encode()
        return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


class TerminalPrinter:
    """Keeps the live lines of rank 0 below the whole lines of all ranks.

    Each time something new comes, the live lines are erased, whole lines are printed where they stood, and
    the live lines are drawn again below.
    """

    def __init__(self, terminal: Terminal, *, prefix: bool = True) -> None:
        self._terminal = terminal
        self._prefix = prefix
        self._screens: dict[Source, Rows] = {}
        self._drawn: list[bytes] = []
        # One row stays free for what scrolls by above the live ones.
        self._max_live = max(0, terminal.lines - 1)

    def feed(self, source: Source, data: bytes) -> bytes:
        if source not in self._screens:
            self._screens[source] = Rows(self._max_live if source.rank == 0 else 0)
        return self._show(self._lines(source, self._screens[source].feed(data)))

    def close(self, source: Source) -> bytes:
        rows = self._screens.pop(source).close() if source in self._screens else []
        return self._show(self._lines(source, rows))

    def say(self, text: str) -> bytes:
        return self._show([text.encode(errors="backslashreplace")])

    def _lines(self, source: Source, rows: list[bytes]) -> list[bytes]:
        prefix = self._prefix_bytes(source.rank)
        return [prefix + row + _RESET if b"\x1b" in row else prefix + row for row in rows]

    def _prefix_bytes(self, rank: int) -> bytes:
        text = rank_prefix(rank).encode() if self._prefix else b""
        if not (text and self._terminal.colour):
            return text
        return b"\x1b[%dm" % _COLOURS[rank % len(_COLOURS)] + text[:-1] + _RESET + b" "

    def _show(self, lines: list[bytes]) -> bytes:
        live = [row for source, rows in self._screens.items() for row in self._lines(source, rows.live())]
        live = live[-self._max_live :]  # both streams of rank 0 may have bars
        if not lines and live == self._drawn:
            return b""
        shown = _erase(len(self._drawn)) + b"".join(line + b"\n" for line in lines) + _draw(live)
        self._drawn = live
        return shown


def _erase(num_rows: int) -> bytes:
    return b"\r" + _ERASE_ROW + _ERASE_ROW_ABOVE * (num_rows - 1) if num_rows else b""


def _draw(rows: list[bytes]) -> bytes:
    return _WRAP_OFF + b"\r\n".join(rows) + _WRAP_ON if rows else b""

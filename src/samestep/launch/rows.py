"""What one stream looks like on a terminal: rows that are final, and rows that a progress bar may yet draw anew.

Pure. As much of a terminal is modelled as progress bars use: carriage return, newline, cursor up, erase line. A bar of
several rows (rich) moves up to its first row and draws all of them again; nested bars (tqdm) move down and back up.
"""

import re

__all__ = ["Rows"]

# What is acted upon, besides newline. The cursor is shown again (?25h) when rich has finished a bar.
_ACTED_UPON = re.compile(rb"(\r|\x1b\[\d{0,4}[AF]|\x1b\[[02]?K|\x1b\[\?25h)")
_SHOW_CURSOR = b"\x1b[?25h"
# Colours ("m") and links are passed on, whole. Any other sequence is dropped, for the screen is not the rank's alone.
_SEQUENCE = re.compile(
    rb"(\x1b\[[0-9;:]*m|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\))|\x1b(?:\[[0-?]*[ -/]*[@-~]?|[ -/]+[0-~]?|[0-~])?"
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]{0,32}|\][^\x07\x1b\n]{0,500}\x1b?)?\Z")
_MAX_UNFINISHED_BYTES = 512
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")

# So many rows of a bar are expected before it has shown how many it has.
_FIRST_ROWS = 10
# A row longer than this is data, not a progress bar; drawing it anew for each chunk would take for ever.
_MAX_BAR_BYTES = 1 << 16


class Rows:
    """Takes the bytes of one stream. At most `max_live` rows are held back as live ones; 0 means none ever."""

    def __init__(self, max_live: int) -> None:
        self._max_held = max(0, max_live - 1)
        self._is_live = max_live > 0
        self._rows: list[bytearray | None] = [bytearray()]  # None: above what is still here, and not written anew yet
        self._cursor = 0  # the row that text goes to
        self._final: list[bytes] = []
        self._unfinished = b""
        self._num_held = 0  # rows above the cursor that are not final yet
        self._num_newlines = 0  # since the last sign of a bar
        self._is_at_begin = True  # of a row, since a newline
        self._starts_anew = False  # the next text replaces the row
        self._starts_frame = False  # the next text is the first of a bar drawn anew; what is above it is final
        self._has_ended = False  # the bar; the next text is not part of it
        self._is_bar = False  # the row under the cursor is drawn anew again and again

    def feed(self, data: bytes) -> list[bytes]:
        """Takes the next chunk; returns the rows that are final now, without newlines."""
        data = self._unfinished + data
        unfinished = _UNFINISHED.search(data, max(0, len(data) - _MAX_UNFINISHED_BYTES))
        self._unfinished = unfinished[0] if unfinished else b""
        first, *others = data[: len(data) - len(self._unfinished)].split(b"\n")
        self._write(first)
        for line in others:
            self._newline()
            self._write(line)
        final, self._final = self._final, []
        return final

    def live(self) -> list[bytes]:
        """The rows that are shown now and may yet change."""
        if not self._is_live or not (self._is_bar or len(self._rows) > 1):
            return []
        if sum(len(row) for row in self._rows if row) > _MAX_BAR_BYTES:
            return []
        return self._left()

    def close(self) -> list[bytes]:
        """The rows that are left at the end of the stream."""
        return self._left()

    def _left(self) -> list[bytes]:
        rows = [bytes(row) for row in self._rows if row is not None]
        while rows and not _COLOUR.sub(b"", rows[-1]).strip():
            rows.pop()
        return rows

    def _newline(self) -> None:
        self._end_bar_if_told()
        self._num_newlines += 1
        if self._num_newlines > self._num_held:  # these are lines, not the rows of a bar
            self._num_held = 0
            self._is_bar = False
        self._is_at_begin, self._starts_anew, self._starts_frame = True, False, False
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append(bytearray())
        self._release(self._cursor - self._num_held)

    def _write(self, line: bytes) -> None:
        if b"\r" not in line and b"\x1b" not in line:
            self._text(line)
            return
        for number, part in enumerate(_ACTED_UPON.split(line)):
            if number % 2 == 0:
                self._text(_SEQUENCE.sub(_kept, part))
            elif part == b"\r":
                self._starts_anew = True
                self._starts_frame |= not self._is_at_begin
            elif part == _SHOW_CURSOR:
                self._has_ended = True
            elif part.endswith(b"K"):
                self._erase(to_end=part != b"\x1b[2K")
            else:
                self._up(int(part[2:-1] or 1))

    def _text(self, text: bytes) -> None:
        if not text:
            return
        self._end_bar_if_told()
        if self._starts_frame:
            self._release(self._cursor)
        if self._starts_anew:
            self._rows[self._cursor] = None
            self._is_bar, self._num_newlines = True, 0
        row = self._rows[self._cursor]
        if row is None:
            row = self._rows[self._cursor] = bytearray()
        row += text
        self._is_at_begin = self._starts_anew = self._starts_frame = False

    def _erase(self, *, to_end: bool) -> None:
        if self._starts_anew or not to_end:
            self._rows[self._cursor] = bytearray()
            self._hold(_FIRST_ROWS)

    def _up(self, num_rows: int) -> None:
        num_rows = min(num_rows, self._max_held)
        missing: list[bytearray | None] = [None] * (num_rows - self._cursor)
        self._rows[:0] = missing
        self._cursor += len(missing) - num_rows
        self._hold(num_rows)

    def _hold(self, num_rows: int) -> None:
        self._num_held = min(max(self._num_held, num_rows), self._max_held)
        self._num_newlines = 0

    def _end_bar_if_told(self) -> None:
        if self._has_ended:
            self._has_ended = self._is_bar = False
            self._num_held = 0
            self._release(self._cursor)

    def _release(self, num_rows: int) -> None:
        if num_rows > 0:
            self._final += [bytes(row) for row in self._rows[:num_rows] if row is not None]
            del self._rows[:num_rows]
            self._cursor -= num_rows


def _kept(sequence: "re.Match[bytes]") -> bytes:
    return sequence[1] or b""

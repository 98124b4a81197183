"""What a person would see on a terminal, for tests that have only the bytes."""

import re

__all__ = ["Screen"]


class Screen:
    """As much of a terminal as is needed to see what a person would see: rows, a cursor, a few sequences."""

    TOKEN = re.compile(rb"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|((?:[^\x1b\r\n])+)|(\x1b\[?)")

    def __init__(self, columns: int) -> None:
        self.rows = [""]
        self.row = self.column = 0
        self.columns, self.wraps = columns, True

    def write(self, data: bytes) -> None:
        for match in self.TOKEN.finditer(data):
            argument, final, cr, lf, text, unfinished = match.groups()
            if unfinished:
                continue
            if text is not None:
                self._put(text.decode(errors="replace"))
            elif cr:
                self.column = 0
            elif lf:
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif final == b"K":
                assert argument == b"2"
                self.rows[self.row] = ""
            elif final == b"A":
                self.row -= int(argument)
                assert self.row >= 0
            elif final in b"hl":
                assert argument == b"?7"
                self.wraps = final == b"h"
            else:
                assert final == b"m"

    def _put(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                assert not self.wraps, "live lines must not wrap"
                continue
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

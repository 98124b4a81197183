"""What a rank tells the launcher of its failure, through a pipe of its own. Pure.

There are two kinds: an exception that nobody caught, with its traceback and the time, and what faulthandler writes when
the interpreter itself crashes, which has no form of ours.
"""

from dataclasses import dataclass

__all__ = ["NOTHING_TOLD", "Told", "from_bytes", "record"]

_BEGIN = b"\x1e"
# What exceptions say where a connection of Gloo's, of the store's or of ours has broken.
_SIGNS_OF_A_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "peerlosterror",
)
# Half of what a pipe holds, so that telling never waits for the launcher.
_MAX_BYTES = 1 << 15


@dataclass(frozen=True)
class Told:
    """The text, as Python shows it, and for an exception the time on the monotonic clock, in seconds."""

    text: str = ""
    when: float | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether this is what a rank meets when another one has gone."""
        last = self.summary.lower()
        return any(sign in last for sign in _SIGNS_OF_A_LOST_PEER)

    @property
    def summary(self) -> str:
        """One line of it: what stands last in a traceback, or first in a crash; nothing where nothing was told."""
        lines = self.text.strip().splitlines()
        if not lines:
            return ""
        return lines[0 if self.when is None else _last_at_margin(lines)].strip()


NOTHING_TOLD = Told()


def record(traceback: str, when: float) -> bytes:
    """What to write for an exception; a long traceback is shortened in its middle."""
    text = traceback.encode(errors="backslashreplace")
    if len(text) > _MAX_BYTES:
        text = text[: _MAX_BYTES // 2] + b"\n  [...]\n" + text[-_MAX_BYTES // 2 :]
    return _BEGIN + f"{when!r}\n".encode() + text.replace(_BEGIN, b"?") + _BEGIN


def from_bytes(data: bytes) -> Told:
    """What all the bytes of a rank say. An exception explains more than a crash that it led to, so it comes first."""
    crash, *rest = data.split(_BEGIN)
    if not rest:
        return Told(crash.decode(errors="replace"))
    head, _, text = rest[0].partition(b"\n")
    crash += b"".join(rest[1:2])
    try:
        when = float(head)
    except ValueError:  # cut off
        when = None
    return Told((text + crash).decode(errors="replace"), when)


def _last_at_margin(lines: list[str]) -> int:
    """The line with the exception's name: a message of several lines may follow it."""
    begun = max((n for n, line in enumerate(lines) if line.startswith("Traceback ")), default=-1)
    found = (n for n, line in enumerate(lines) if n > begun and line and not line.startswith((" ", "\t")))
    return next(found, len(lines) - 1)

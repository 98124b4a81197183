"""What each rank shows the others: how far it is, what it is doing, and how it ended. One writer, many readers.

Every rank has one board, the first page of its memory. Each of its words has a cache line to itself:

    counter   how many meetings the rank has come to; it grows by one, and wraps around at 2**32
    sleeping  1 while the rank sleeps, or is about to; beside it, in the same line, the same of another thread, which
              carries on with exchanges that nobody waits for
    state     0, or how the rank left: see `State`
    left at   the first meeting that the rank did not wait for to the end, once `state` says that it left

and then come two headers, shown in turn (what the rank's current exchange is), and the text of its error.

The order of memory accesses. A rank writes data, then its counter; another reads the counter, then the data. It is
right if the data cannot become visible after the counter, nor be read before it. x86-64 promises that (stores are seen
in their order, loads are done in theirs) but for a store followed by a load; Arm64 promises nothing. `fence` makes the
order total on both: it gives a lock back and takes it again. On x86-64 each of the two is a locked instruction, a full
barrier. On Arm64 giving back is a store with release semantics (STLR, or CASL and the like), which nothing before it
can pass, and taking is a load with acquire semantics (LDAXR, CASA), which nothing after it can precede; and a release
is not passed by an acquire that follows it (they are RCsc, and here they meet in the same word). So all that stands
before the fence is done before all that stands after it.

    write data; fence; counter = n; fence; if sleeping[peer]: wake          (publish)
    sleeping = 1; fence; if counter[peer] < n: futex(counter[peer])         (sleep)
    if counter[peer] >= n: fence; read data                                 (observe)

Publish and sleep each store and then load, with a fence between: one of the two must see the other's store, so no rank
sleeps through its peer's publishing. The futex compares once more, in the kernel. Single words are read and written
whole: a memoryview of format "I" copies four aligned bytes, which compiles to one load or store.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from samestep.comm.shm.kernel import futex_wait, futex_wake
from samestep.comm.shm.memory import Mapping

__all__ = ["Board", "State", "make_fence"]

BOARD_BYTES = 4096
MASK, HALF = 2**32 - 1, 2**31

COUNTER, SLEEPING, STATE, _LEFT_AT = 0, 16, 32, 48  # in words of 4 bytes: lines of 64 bytes
DOZING = SLEEPING + 1
_HEADERS, _HEADER_BYTES = (256, 1536), 1280
_ERROR, _ERROR_BYTES = 2816, 1264  # the last 16 bytes of the page stay free


class State(enum.IntEnum):
    """How a rank has left its group: it closed it, or met an error of a kind."""

    HERE = 0
    CLOSED = 1
    FAILED = 2
    PEER_LOST = 3
    LATE = 4


def make_fence() -> Callable[[], None]:
    """Return a function that is a full memory barrier; each communicator has its own, so no two threads share one."""
    lock = threading.Lock()
    lock.acquire()
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        try:
            release()
        finally:  # also if a signal's handler raises in between
            acquire()

    return fence


class Board:
    """A rank's own board, or this process's view of a peer's."""

    def __init__(self, mapping: Mapping) -> None:
        self._bytes = mapping.bytes_view()[:BOARD_BYTES]
        self.words = self._bytes.cast("I")
        self._address = mapping.address

    def reached(self, target: int) -> bool:
        """Tell whether the rank has come to the meeting `target`; the caller fences before it reads what was shown."""
        return (self.words[COUNTER] - target) & MASK < HALF

    def come_to(self, target: int) -> None:
        """Say that the rank has come to the meeting `target`; between two fences."""
        self.words[COUNTER] = target & MASK

    def wake(self) -> None:
        futex_wake(self._address + 4 * COUNTER)

    def sleep(self, target: int, timeout_s: float) -> None:
        """Sleep until the rank shows something new, unless it has come to `target` or left; or for no reason."""
        seen = self.words[COUNTER]
        if (seen - target) & MASK >= HALF and not self.words[STATE]:
            futex_wait(self._address + 4 * COUNTER, seen, timeout_s)

    @property
    def sleeping(self) -> int:
        return self.words[SLEEPING] | self.words[DOZING]

    @sleeping.setter
    def sleeping(self, value: int) -> None:
        self.words[SLEEPING] = value

    def doze(self, value: int) -> None:
        """Say that a thread beside the one that waits sleeps (1), or does no more (0)."""
        self.words[DOZING] = value

    @property
    def state(self) -> State:
        return State(self.words[STATE])

    @property
    def error(self) -> str:
        """The text of the error, once `state` says that there is one (and a fence was passed)."""
        return bytes(self._bytes[_ERROR : _ERROR + _ERROR_BYTES]).rstrip(b"\0").decode(errors="replace")

    def tell_error(self, text: str) -> None:
        self._bytes[_ERROR : _ERROR + _ERROR_BYTES] = _fitted(text, _ERROR_BYTES).ljust(_ERROR_BYTES, b"\0")

    def leave(self, state: State, meeting: int, fence: Callable[[], None]) -> None:
        """Say how the rank left, whose first meeting without it is `meeting`; its error, if any, has been told."""
        self.words[_LEFT_AT] = meeting & MASK
        fence()
        self.words[STATE] = state

    def left_at(self, meeting: int) -> bool:
        """Tell whether the rank, which left, did so before the end of `meeting`; a fence was passed since `state`."""
        return (meeting - self.words[_LEFT_AT]) & MASK < HALF

    def show(self, turn: int, header: bytes) -> None:
        """Show `header` (at most 1280 bytes) at the next meeting, whose number has the parity `turn`."""
        start = _HEADERS[turn]
        self._bytes[start : start + len(header)] = header

    def header(self, turn: int, num_bytes: int = _HEADER_BYTES) -> memoryview:
        start = _HEADERS[turn]
        return self._bytes[start : start + num_bytes]


def _fitted(text: str, num_bytes: int) -> bytes:
    data = text.encode()
    return data if len(data) <= num_bytes else data[: num_bytes - 3] + b"..."

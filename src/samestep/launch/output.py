"""Writes to the launcher's own stdout and stderr without ever waiting for their readers.

What can't be written yet is kept, in order. Where both are the same file, pipe or terminal, they share one
queue and one printer, so lines keep their order and live lines are erased before anything else is written
below them.
"""

import errno
import os
import stat
from collections.abc import Mapping

from samestep.errors import LaunchError
from samestep.launch.logs import Printer, Terminal, printer, terminal_from

__all__ = ["Output", "outputs", "terminal_of"]

# A pipe that is ready takes this much without blocking (PIPE_BUF on Linux), so a writer need not set
# O_NONBLOCK on an open file that it shares with the shell. A regular file never blocks.
_PIPE_BYTES, _FILE_BYTES = 4096, 1 << 18


class Output:
    """One file descriptor of the launcher's, with a queue before it and the printer that fills it.

    `error` is the number of the OSError that ended it, or None. After that, everything is dropped.
    """

    def __init__(self, fd: int, printer: Printer, stream: str) -> None:
        self.fd = fd
        self.printer = printer
        self.stream = stream
        self.error: int | None = None
        self._queue = bytearray()
        self._write_bytes = _FILE_BYTES if stat.S_ISREG(os.fstat(fd).st_mode) else _PIPE_BYTES

    @property
    def num_pending_bytes(self) -> int:
        """How much waits for the reader."""
        return len(self._queue)

    def put(self, data: bytes) -> None:
        """Appends to the queue."""
        if self.error is None:
            self._queue += data

    def say(self, text: str) -> None:
        """Appends a line of the launcher's own."""
        self.put(self.printer.say(f"samestep: {text}"))

    def quote(self, text: str) -> None:
        """Appends a line as it is."""
        self.put(self.printer.say(text))

    def pump(self) -> None:
        """Writes what the reader will take now. To be called when the descriptor is ready for writing."""
        try:
            written = os.write(self.fd, self._queue[: self._write_bytes])
        except BlockingIOError:
            return
        except OSError as e:
            self.error = e.errno or errno.EIO
            self._queue.clear()
        else:
            del self._queue[:written]

    def drop(self) -> None:
        """Forgets what waits for the reader."""
        self._queue.clear()


def outputs(stdout: int, stderr: int, environment: Mapping[str, str], *, prefix: bool = True) -> dict[str, Output]:
    """Makes the output of each stream; it is one object for both where both are the same open place.

    Raises LaunchError where one is not open.
    """
    for name, fd in (("stdout", stdout), ("stderr", stderr)):
        try:
            os.fstat(fd)
        except OSError as e:
            raise LaunchError(f"{name} (descriptor {fd}) is not open; send it to /dev/null to be rid of it") from e
    out = Output(stdout, printer(terminal_of(stdout, environment), prefix=prefix), "stdout")
    if _same_place(stdout, stderr):
        return {"stdout": out, "stderr": out}
    err = Output(stderr, printer(terminal_of(stderr, environment), prefix=prefix), "stderr")
    return {"stdout": out, "stderr": err}


def terminal_of(fd: int, environment: Mapping[str, str]) -> Terminal | None:
    """The terminal that `fd` is open on, or None where it is none, or a dumb one."""
    if not os.isatty(fd):
        return None
    size = os.get_terminal_size(fd)
    return terminal_from(environment, size.columns, size.lines)


def _same_place(a: int, b: int) -> bool:
    first, second = os.fstat(a), os.fstat(b)
    return (first.st_dev, first.st_ino, first.st_rdev) == (second.st_dev, second.st_ino, second.st_rdev)

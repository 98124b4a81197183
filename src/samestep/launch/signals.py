"""Collects the signals that end a run, so that they are handled in the agent's loop and nowhere else."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

from samestep.errors import LaunchError

__all__ = ["ENDING", "Signals", "collect_signals"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Signals:
    """The signals that have arrived and were not taken yet; `fd` becomes readable when one arrives."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._arrived: list[tuple[int, float]] = []

    def note(self, signum: int, _frame: FrameType | None) -> None:
        """The handler."""
        self._arrived.append((signum, time.monotonic()))

    def take(self) -> list[tuple[int, float]]:
        """Returns the signals that came since the last call, each with its time on the monotonic clock."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass
        arrived, self._arrived = self._arrived, []
        return arrived


@contextlib.contextmanager
def collect_signals(signums: Iterable[signal.Signals] = ENDING) -> Iterator[Signals]:
    """Collects the signals that end a run inside the block; afterwards all handlers are what they were.

    Those that were ignored stay so (`nohup`, `&` in a script), for ranks too. Exit codes of children are kept even
    where the launcher was started with SIGCHLD ignored. Raises LaunchError outside the main thread, where Python takes
    no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("workers can only be started from the main thread, as only there signals can be handled")
    readable, writable = os.pipe()
    old = {}
    try:
        os.set_blocking(readable, False)
        os.set_blocking(writable, False)
        signals = Signals(readable)
        old_fd = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        try:
            old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for signum in signums:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    old[signum] = signal.signal(signum, signals.note)
            yield signals
        finally:
            for signum, handler in old.items():
                # None stands for a handler that was not set from Python; there is no way to set it again.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(old_fd)
    finally:
        os.close(readable)
        os.close(writable)

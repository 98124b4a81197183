"""A small process that ends what the workers left behind, should the agent be killed with no chance to do so.

The kernel kills the ranks themselves when the agent dies (see worker.py), but not the processes that they
have started. The guard knows the process group of each worker. It reads from a pipe whose only writer is the
agent: when the pipe closes without a goodbye, the agent is dead, and the guard kills the groups and ends.
"""

import contextlib
import os
import signal

from samestep.errors import LaunchError
from samestep.launch.kernel import name_process

__all__ = ["Guard", "watch_from"]

_GOODBYE = b"."


class Guard:
    """Started by the agent before any worker; messages to it are single short writes, so they never mix."""

    def __init__(self) -> None:
        readable, self.fd = os.pipe()
        try:
            self.pid = os.fork()
        except OSError as e:
            os.close(readable)
            os.close(self.fd)
            raise LaunchError(f"no process could be started: {e.strerror}") from e
        if self.pid == 0:
            _become_guard(readable)
        os.close(readable)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, pgid: int) -> None:
        """Adds a process group. The worker calls this itself, so there is no moment at which it is not watched."""
        _send(self.fd, b"+%d\n" % pgid)

    def forget(self, pgid: int) -> None:
        """Drops a process group. To be called before its leader is reaped, as the number is free after that."""
        _send(self.fd, b"-%d\n" % pgid)

    def close(self) -> None:
        """Ends the guard: all groups have been ended by the agent."""
        _send(self.fd, _GOODBYE)
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def watch_from(fd: int) -> None:
    """Has the guard whose descriptor this is watch the process group of this process."""
    _send(fd, b"+%d\n" % os.getpid())


def _send(fd: int, message: bytes) -> None:
    # Somebody may have killed the guard. Then it protects nobody, and the run goes on.
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, message)


def _become_guard(fd: int) -> None:
    """Runs in the forked child, which never returns from here."""
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        os.closerange(3, fd)
        os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
        name_process("samestep-guard")
        for pgid in _left_behind(fd):
            # ProcessLookupError is the good case. PermissionError: all that is left runs as somebody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pgid, signal.SIGKILL)
    finally:
        os._exit(0)


def _left_behind(fd: int) -> set[int]:
    """Reads messages to the end; returns the groups still watched, or none after a goodbye."""
    received = b""
    while chunk := os.read(fd, 65536):
        received += chunk
    if received.endswith(_GOODBYE):
        return set()
    groups: set[int] = set()
    for message in received.split():
        pgid = int(message[1:])
        groups.add(pgid) if message.startswith(b"+") else groups.discard(pgid)
    return groups

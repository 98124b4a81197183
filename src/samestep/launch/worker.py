"""One worker process: how it is started, signalled, and cleared away with all that it has started."""

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

from samestep.errors import LaunchError
from samestep.launch.guard import Guard
from samestep.launch.spec import LaunchSpec, worker_environment

__all__ = ["Worker", "start_worker", "usable_cores"]

_PR_SET_PDEATHSIG = 1


class Worker:
    """A process that runs one rank, the leader of a session and a process group of its own.

    Its number is safe to signal until `clear_away`, which reaps it: until then the kernel gives neither its
    pid nor its process group's to anybody else.
    """

    def __init__(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        self.rank = rank
        self.pid = process.pid
        self.pipes = {name: p.fileno() for name, p in (("stdout", process.stdout), ("stderr", process.stderr)) if p}
        self.pidfd = _pidfd(process.pid)
        self._process = process
        for fd in self.pipes.values():
            os.set_blocking(fd, False)

    def has_ended(self) -> bool:
        """Whether the rank has ended; it is not reaped by this."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def send(self, signum: int) -> None:
        """Signals the rank alone, so that it can still use its children; with SIGKILL all of its process group."""
        if signum == signal.SIGKILL:
            self._kill_group()
        else:
            os.kill(self.pid, signum)

    def clear_away(self, guard: Guard) -> int:
        """Kills what is left of the process group, waits for the rank and returns its exit code, or -n for signal n."""
        self._kill_group()
        # A rank that is ended by force here may take a moment; until it is reaped its numbers stay its own.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        guard.forget(self.pid)
        if self.pidfd is not None:
            os.close(self.pidfd)
        return self._process.wait()

    def read(self, stream: str, num_bytes: int) -> bytes | None:
        """Up to `num_bytes` from a pipe: nothing at its end, None while there is nothing to read."""
        try:
            return os.read(self.pipes[stream], num_bytes)
        except BlockingIOError:
            return None

    def read_rest(self, stream: str) -> bytes:
        """What lies in a pipe of a rank that has ended, and no more: a process that escaped may still write there."""
        fd = self.pipes[stream]
        (available,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))
        return os.read(fd, available) if available else b""

    def close_pipe(self, stream: str) -> None:
        """Closes the agent's end of a pipe."""
        del self.pipes[stream]
        pipe = self._process.stdout if stream == "stdout" else self._process.stderr
        assert pipe is not None
        pipe.close()

    def _kill_group(self) -> None:
        # PermissionError: what is left of the group runs as somebody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def start_worker(spec: LaunchSpec, rank: int, guard: Guard) -> Worker:
    """Starts one rank: stdin from /dev/null, stdout and stderr to pipes.

    Raises LaunchError where the system refuses.
    """
    try:
        process = subprocess.Popen(
            spec.command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=worker_environment(spec, rank),
            start_new_session=True,
            preexec_fn=_bind_to_agent(guard),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        raise LaunchError(f"rank {rank} of {spec.nproc_per_node} could not be started: {e}") from e
    return Worker(rank, process)


def usable_cores() -> int:
    """How many CPU cores this process, and so each worker, may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _bind_to_agent(guard: Guard) -> Callable[[], None]:
    """Makes what runs in a worker between fork and exec: from there on, it dies with the agent.

    The kernel sends the signal when the thread that forked ends, so workers are started by the main thread.
    Other systems than Linux have no such signal; there the guard alone does this.
    """
    agent = os.getpid()
    # Loaded here, as little as possible is to happen after fork.
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def bind() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the guard may have been killed
        guard.watch(os.getpid())
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:  # it died before we were bound to it
            os.kill(os.getpid(), signal.SIGKILL)

    return bind


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, or None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None

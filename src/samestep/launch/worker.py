"""One worker process: how it is signalled, read, and cleared away with all that it has started; and fresh ones."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from samestep.errors import LaunchError
from samestep.launch.guard import Guard
from samestep.launch.kernel import die_with_parent, pidfd
from samestep.launch.spec import LaunchSpec, worker_command, worker_environment

__all__ = ["Pipes", "Spawner", "Starter", "Worker", "bind_to_agent", "bootstrap", "usable_cores"]

# What comes from a worker: its output, and what it tells of a failure.
_STREAMS = ("stdout", "stderr", "told")


class Worker:
    """A process that runs one rank, the leader of a session and a process group of its own.

    It is a child of this process, and its number is safe to signal until `clear_away`, which reaps it: until then the
    kernel gives neither its pid nor its process group's to anybody else. `pipes` are the reading ends, by stream.
    """

    def __init__(self, rank: int, local_rank: int, pid: int, pipes: dict[str, int]) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.pipes = pipes
        self.pidfd = pidfd(pid)
        self.told = bytearray()
        for fd in pipes.values():
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
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

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
        os.close(self.pipes.pop(stream))

    def _kill_group(self) -> None:
        # PermissionError: what is left of the group runs as somebody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Pipes:
    """A pipe for each stream of a worker to be: `theirs` are closed here in any case, `ours` if nobody takes them."""

    def __init__(self) -> None:
        self.ours: dict[str, int] = {}
        self.theirs: dict[str, int] = {}

    def __enter__(self) -> "Pipes":
        with contextlib.ExitStack() as made:
            made.callback(self.__exit__)
            for stream in _STREAMS:
                self.ours[stream], self.theirs[stream] = os.pipe()
            made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (*self.theirs.values(), *self.ours.values()):
            os.close(fd)

    def take(self) -> dict[str, int]:
        """Hands the reading ends over."""
        taken, self.ours = self.ours, {}
        return taken


class Starter(Protocol):
    """A way to start workers."""

    @property
    def is_ready(self) -> bool:
        """Whether `start` need not wait for anything."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Become readable when there is something to `look` at."""

    def look(self) -> list[str]:
        """Takes what has come at `fds`; returns lines to be shown."""

    def start(self, spec: LaunchSpec, local_ranks: Sequence[int]) -> Iterator[Worker]:
        """Starts ranks and yields each: stdin from /dev/null, output to pipes.

        Raises LaunchError where the system refuses; those that were yielded are there then.
        """

    def close(self) -> None:
        """Ends what is left besides the workers."""


class Spawner:
    """Starts each worker as a fresh interpreter, or whatever the command is."""

    is_ready = True
    fds: tuple[int, ...] = ()

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def look(self) -> list[str]:
        return []

    def start(self, spec: LaunchSpec, local_ranks: Sequence[int]) -> Iterator[Worker]:
        for local_rank in local_ranks:
            yield self._start(spec, local_rank)

    def close(self) -> None:
        pass

    def _start(self, spec: LaunchSpec, local_rank: int) -> Worker:
        rank, command = spec.ranks[local_rank], worker_command(spec, local_rank)
        try:
            with Pipes() as pipes:
                told = pipes.theirs["told"]
                if spec.runs_python:
                    script = (str(told), f"samestep-r{rank}", str(int(spec.drop_in)), *command[1:])
                    command = (command[0], "-c", bootstrap("samestep.launch.script"), *script)
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=pipes.theirs["stdout"],
                    stderr=pipes.theirs["stderr"],
                    pass_fds=(told,) if spec.runs_python else (),
                    env=worker_environment(spec, local_rank),
                    start_new_session=True,
                    preexec_fn=bind_to_agent(self._guard),
                )
                process.returncode = 0  # it is ours to reap, not Popen's
                return Worker(rank, local_rank, process.pid, pipes.take())
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            raise LaunchError(f"rank {rank} of {spec.world_size} could not be started: {e}") from e


def usable_cores() -> int:
    """How many CPU cores this process, and so each worker, may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bootstrap(module: str) -> str:
    """The code for `python -c` that calls the `main` of a module of ours.

    The current folder is no place to look for modules of ours, or of Python's.
    """
    return (
        "import sys; at_start = set(sys.modules); getattr(sys.flags, 'safe_path', False) or sys.path.pop(0);"
        f"from {module} import main; main(sys.argv[1:], at_start)"
    )


def bind_to_agent(guard: Guard) -> Callable[[], None]:
    """Makes what runs in a worker between fork and exec: from there on, it dies with the agent.

    The kernel sends the signal when the thread that forked ends, so workers are started by the main thread.
    Other systems than Linux have no such signal; there the guard alone does this.
    """
    agent = os.getpid()

    def bind() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the guard may have been killed
        guard.watch(os.getpid())
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() != agent:  # it died before we were bound to it
            os.kill(os.getpid(), signal.SIGKILL)

    return bind

"""Starts workers as forks of a process that has torch loaded already: the launcher's side.

The zygote is a child of the launcher. To start a worker it forks twice, and the process in between ends at once, so
that the kernel makes the launcher, which adopts orphans, the worker's parent: it can be waited for and dies with the
launcher as a fresh worker would, and the zygote may die without harm to anybody.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

from samestep.launch.failures import signal_name
from samestep.launch.guard import Guard
from samestep.launch.kernel import adopt_orphans, stop_adopting
from samestep.launch.spec import LaunchSpec, shared_environment, worker_command, worker_environment
from samestep.launch.worker import Pipes, Spawner, Starter, Worker, bind_to_agent, bootstrap

__all__ = ["Zygote"]

# A fork takes milliseconds. On a machine that swaps it may take longer; then a fresh interpreter takes its place.
_FORK_S = 30.0
_END_S = 5.0
# The exit code of a zygote that could not import what the script wants; the script meets the same and shows it.
_CANT_LOAD = 3
# A message carries no more than 253 descriptors, four for each worker.
_AT_ONCE = 32


class Zygote:
    """A `Starter`. Where the zygote can't do its work, fresh interpreters take its place, and `look` says so."""

    def __init__(self, spec: LaunchSpec, guard: Guard) -> None:
        self._guard = guard
        self._spawner: Starter = Spawner(guard)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = -1
        self._begun_line = b""
        self._is_loaded = False
        self._notes: list[str] = []
        if adopt_orphans():
            self._begin(spec)

    @property
    def is_ready(self) -> bool:
        return self._is_loaded or self._process is None

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self._process is None else (self._socket.fileno(), self._output)

    def look(self) -> list[str]:
        """Takes what the zygote says: that it has loaded torch, warnings on the way, or nothing for ever."""
        self._read_output()
        if self._process is not None and not self._is_loaded:
            with contextlib.suppress(BlockingIOError):
                self._is_loaded = bool(self._socket.recv(1, socket.MSG_DONTWAIT))
                if not self._is_loaded:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_END_S)  # its socket has closed, so it is about to end
                    self._end()
        elif self._process is not None and self._process.poll() is not None:
            self._end()
        notes, self._notes = self._notes, []
        return notes

    def start(self, spec: LaunchSpec, local_ranks: Sequence[int]) -> Iterator[Worker]:
        waiting = list(local_ranks)
        while waiting and self._process is not None:
            try:
                for worker in self._fork(spec, waiting[:_AT_ONCE]):
                    waiting.remove(worker.local_rank)
                    yield worker
            except (OSError, EOFError) as e:
                rank = spec.ranks[waiting[0]]
                self._end()
                self._notes.append(f"rank {rank} could not be forked ({e}) and is started as a fresh interpreter")
        yield from self._spawner.start(spec, waiting)

    def close(self) -> None:
        self._end()
        stop_adopting()

    def reap_orphans(self, others: Collection[int]) -> None:
        """Lets go of adopted processes that have ended; `others` are the children that somebody else waits for."""
        known = {*others, self._guard.pid, *([self._process.pid] if self._process else [])}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in known:
                return
            os.waitpid(found.si_pid, 0)

    def _begin(self, spec: LaunchSpec) -> None:
        self._socket, theirs = socket.socketpair()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        command = (str(theirs.fileno()), str(self._guard.fd), str(os.getpid()), *spec.command[1:])
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-c", bootstrap("samestep.launch.forking"), *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), self._guard.fd),
                env=shared_environment(spec),
                start_new_session=True,
                preexec_fn=bind_to_agent(self._guard),
            )
        except (OSError, subprocess.SubprocessError) as e:
            self._notes.append(f"workers are started as fresh interpreters, as the zygote could not be: {e}")
            os.close(self._output)
            self._socket.close()
        finally:
            theirs.close()
            os.close(output)

    def _fork(self, spec: LaunchSpec, local_ranks: Sequence[int]) -> Iterator[Worker]:
        jobs = [
            {
                "argv": worker_command(spec, local_rank)[1:],
                "environment": worker_environment(spec, local_rank),
                "name": f"samestep-r{spec.ranks[local_rank]}",
                "drop_in": spec.drop_in,
            }
            for local_rank in local_ranks
        ]
        with ExitStack() as stack:
            births = [stack.enter_context(_Birth()) for _ in local_ranks]
            message = json.dumps(jobs).encode()
            self._socket.settimeout(_FORK_S)
            fds = [fd for birth in births for fd in birth.fds]
            socket.send_fds(self._socket, [len(message).to_bytes(8, "big")], fds)
            self._socket.sendall(message)
            for birth, local_rank in zip(births, local_ranks, strict=True):
                yield Worker(spec.ranks[local_rank], local_rank, birth.pid(), birth.pipes.take())

    def _read_output(self, *, is_last: bool = False) -> None:
        """Notes the whole lines of what it has written, which come in pieces; the last need not have an end."""
        if self._process is None:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                *lines, self._begun_line = (self._begun_line + data).split(b"\n")
                self._notes.extend(line.decode(errors="replace") for line in lines)
        if is_last and self._begun_line:
            self._notes.append(self._begun_line.decode(errors="replace"))
            self._begun_line = b""

    def _end(self) -> None:
        """Sees to it that there is no zygote; notes how it ended if that was not by this."""
        if self._process is None:
            return
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._guard.forget(self._process.pid)
        self._process.wait()
        self._socket.close()
        self._read_output(is_last=True)
        os.close(self._output)
        self._process, self._is_loaded = None, False
        if code not in (None, _CANT_LOAD):
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            self._notes.append(f"the zygote {how}; workers to come are started as fresh interpreters")


class _Birth:
    """What a worker to be gets: its ends of pipes, and of a socket where it says its number and waits until we know."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.pipes = Pipes()

    def __enter__(self) -> "_Birth":
        self.pipes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()
        self.pipes.__exit__()

    @property
    def fds(self) -> list[int]:
        return [self._theirs.fileno(), *self.pipes.theirs.values()]

    def pid(self) -> int:
        self._theirs.close()
        self._ours.settimeout(_FORK_S)
        said = self._ours.recv(8)
        if len(said) < 8:
            raise EOFError("the zygote has ended, or can't fork")
        self._ours.sendall(b"g")
        return int.from_bytes(said, "big")

"""The process that starts the workers of one machine, watches them and passes their output on.

One thread, one loop: it waits for output, for the end of a rank, for a signal or a deadline, asks `ending`
what to do, and does it. When it returns, every process that it started is gone, with all that those had
started in their process groups, and signal handlers and file descriptors are what they were.
"""

import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from samestep.launch.ending import (
    Exit,
    Interrupt,
    OutputLost,
    State,
    Step,
    exit_code,
    exited,
    interrupted,
    output_lost,
    timed,
)
from samestep.launch.failures import report
from samestep.launch.guard import Guard
from samestep.launch.logs import Source
from samestep.launch.output import Output, outputs, terminal_of
from samestep.launch.port import reserved_port
from samestep.launch.signals import Signals, collect_signals
from samestep.launch.spec import LaunchSpec, thread_note
from samestep.launch.worker import Worker, start_worker

__all__ = ["run", "watch"]

_READ_BYTES = 1 << 16
# So much may wait for a slow reader; then ranks wait too, as they would if they wrote to that reader
# themselves.
_MAX_PENDING_BYTES = 1 << 20
# How often to look at ranks where the system can't tell when a process ends.
_POLL_S = 0.05


def run(spec: LaunchSpec, *, stdout: int = 1, stderr: int = 2) -> int:
    """Runs the workers of `spec` to their end and returns the exit code that the launcher should have.

    That is 0 if all ranks returned 0; else that of the first rank to fail, 128 + n if it died by signal n. It
    is 128 + n too if the launcher itself was ended by signal n, and 141 if the reader of its output went
    away. `stdout` and `stderr` are the file descriptors to write to.

    SIGINT, SIGTERM and SIGHUP are passed on to the ranks; the first failure of a rank ends the others by
    SIGTERM. Whoever is still there after `spec.shutdown_timeout_s`, or at a second SIGINT, is killed.

    Raises what `watch` raises.
    """
    return exit_code(watch(spec, report, stdout=stdout, stderr=stderr))


def watch(spec: LaunchSpec, summary: Callable[[State], Sequence[str]], *, stdout: int = 1, stderr: int = 2) -> State:
    """Runs the workers of `spec` to their end as `run` does, and returns how they ended.

    The lines that `summary` makes of that are written to `stderr` last.

    Raises LaunchError where the master port can't be had, a worker can't be started, `stdout` or `stderr` is not open,
    or this is not the main thread; no worker is left then.
    """
    # First of all, as a descriptor that is closed would be given to the next thing that is opened.
    places = outputs(stdout, stderr, spec.environment, prefix=spec.prefix)
    with collect_signals() as signals, reserved_port(spec.master_addr, spec.master_port) as port:
        spec = replace(spec, master_port=port, terminal=terminal_of(stdout, spec.environment))
        with _Agent(spec, places, signals) as agent:
            agent.start()
            while agent.is_running:
                agent.turn()
            return agent.finish(summary)


class _Agent:
    def __init__(self, spec: LaunchSpec, outputs: dict[str, Output], signals: Signals) -> None:
        self._spec = spec
        self._outputs = outputs
        self._signals = signals
        self._state = State(frozenset(range(spec.nproc_per_node)), spec.shutdown_timeout_s)
        self._workers: dict[int, Worker] = {}
        self._guard = Guard()
        self._selector = selectors.PollSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ)

    def __enter__(self) -> "_Agent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Only after an error are there still workers here."""
        for worker in list(self._workers.values()):
            self._clear_away(worker)
        self._guard.close()
        self._selector.close()

    @property
    def is_running(self) -> bool:
        return bool(self._workers)

    def start(self) -> None:
        if note := thread_note(self._spec):
            self._outputs["stderr"].say(note)
        for rank in range(self._spec.nproc_per_node):
            worker = self._workers[rank] = start_worker(self._spec, rank, self._guard)
            if worker.pidfd is not None:
                self._selector.register(worker.pidfd, selectors.EVENT_READ)

    def turn(self) -> None:
        """Waits until something happens, then deals with all that has happened."""
        self._choose_what_to_wait_for()
        for key, _ in self._selector.select(self._timeout_s()):
            if isinstance(key.data, Output):
                key.data.pump()
            elif isinstance(key.data, Source):
                self._read(key.data)
        for signum, when in self._signals.take():
            self._apply(interrupted(self._state, signum, when))
        self._take_exits()
        self._take_losses()
        self._apply(timed(self._state, time.monotonic()))

    def finish(self, summary: Callable[[State], Sequence[str]]) -> State:
        """Reports, waits until all is written and returns how the run ended.

        A slow reader is waited for, as any program does in a pipe; not so where the launcher was told to end.
        """
        for line in summary(self._state):
            self._outputs["stderr"].say(line)
        patience = self._spec.shutdown_timeout_s if isinstance(self._state.cause, Interrupt) else None
        end = None if patience is None else time.monotonic() + patience
        while any(output.num_pending_bytes for output in self._outputs.values()):
            self._choose_what_to_wait_for()
            for key, _ in self._selector.select(None if end is None else max(0.0, end - time.monotonic())):
                if isinstance(key.data, Output):
                    key.data.pump()
            if self._signals.take() or (end is not None and time.monotonic() >= end):
                for output in self._outputs.values():
                    output.drop()
        self._take_losses()
        return self._state

    def _choose_what_to_wait_for(self) -> None:
        for output in set(self._outputs.values()):
            self._wait_for(output.fd, selectors.EVENT_WRITE, output, output.num_pending_bytes > 0)
        for worker in self._workers.values():
            for stream, fd in worker.pipes.items():
                has_room = self._outputs[stream].num_pending_bytes < _MAX_PENDING_BYTES
                self._wait_for(fd, selectors.EVENT_READ, Source(worker.rank, stream), has_room)

    def _wait_for(self, fd: int, events: int, data: Output | Source, wanted: bool) -> None:
        known = fd in self._selector.get_map()
        if wanted and not known:
            self._selector.register(fd, events, data)
        elif known and not wanted:
            self._selector.unregister(fd)

    def _timeout_s(self) -> float | None:
        """How long there is nothing to do unless something happens; None if for ever."""
        deadline = self._state.deadline
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        if any(worker.pidfd is None for worker in self._workers.values()):
            waits.append(_POLL_S)
        return min(waits, default=None)

    def _read(self, source: Source) -> None:
        worker = self._workers[source.rank]
        data = worker.read(source.stream, _READ_BYTES)
        if data:
            output = self._outputs[source.stream]
            output.put(output.printer.feed(source, data))
        elif data is not None:
            self._close(worker, source.stream)

    def _close(self, worker: Worker, stream: str) -> None:
        self._wait_for(worker.pipes[stream], selectors.EVENT_READ, Source(worker.rank, stream), False)
        worker.close_pipe(stream)
        output = self._outputs[stream]
        output.put(output.printer.close(Source(worker.rank, stream)))

    def _take_exits(self) -> None:
        ended = [worker for worker in self._workers.values() if worker.has_ended()]
        if ended:
            exits = [Exit(w.rank, w.pid, self._clear_away(w), self._state.told) for w in ended]
            self._apply(exited(self._state, exits, time.monotonic()))

    def _clear_away(self, worker: Worker) -> int:
        if worker.pidfd is not None:
            self._selector.unregister(worker.pidfd)
        returncode = worker.clear_away(self._guard)
        for stream in list(worker.pipes):
            output = self._outputs[stream]
            output.put(output.printer.feed(Source(worker.rank, stream), worker.read_rest(stream)))
            self._close(worker, stream)
        del self._workers[worker.rank]
        return returncode

    def _take_losses(self) -> None:
        for output in set(self._outputs.values()):
            if output.error is not None:
                lost = OutputLost(output.stream, output.error)
                self._apply(output_lost(self._state, lost, time.monotonic()))

    def _apply(self, step: Step) -> None:
        self._state, signum = step
        if signum is not None:
            for worker in self._workers.values():
                worker.send(signum)

"""The process that starts the workers of one machine, watches them and passes their output on.

One thread, one loop: it waits for output, for the end of a rank, for a signal, for news of other machines or a
deadline, asks `ending` what to do, and does it. When it is left, every process that it started is gone, with all that
those had started in their process groups.
"""

import selectors
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from samestep.launch.ending import (
    Elsewhere,
    Exit,
    Interrupt,
    OutputLost,
    State,
    Step,
    ended_elsewhere,
    exited,
    interrupted,
    output_lost,
    timed,
)
from samestep.launch.failures import Report
from samestep.launch.guard import Guard
from samestep.launch.log_files import LogFiles, LogSettings
from samestep.launch.logs import Source
from samestep.launch.memory import OomEvidence
from samestep.launch.output import Output, outputs, terminal_of
from samestep.launch.port import reserved_port
from samestep.launch.signals import Signals, collect_signals
from samestep.launch.spec import LaunchSpec, thread_note
from samestep.launch.told import from_bytes
from samestep.launch.worker import Spawner, Starter, Worker
from samestep.launch.zygote import Zygote

__all__ = ["Agent", "News", "watch"]

_READ_BYTES = 1 << 16
# So much may wait for a slow reader; then ranks wait too, as they would if they wrote to that reader
# themselves.
_MAX_PENDING_BYTES = 1 << 20
# How often to look at ranks where the system can't tell when a process ends.
_POLL_S = 0.05


class News(Protocol):
    """What comes from other machines, by way of a child process."""

    @property
    def pid(self) -> int:
        """The process."""

    @property
    def fd(self) -> int:
        """Becomes readable when there is some."""

    @property
    def deadline(self) -> float | None:
        """When to look at the latest, on the monotonic clock."""

    def look(self) -> Elsewhere | None:
        """Takes what has come; returns what ends the attempt here, if anything does."""

    def tell(self, failure: Exit) -> None:
        """A rank of this machine failed first."""


def watch(spec: LaunchSpec, *, stdout: int = 1, stderr: int = 2) -> State:
    """Runs the workers of `spec`, all on this machine, to their end, and returns how they ended.

    SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks; the first failure of a rank ends the others by
    SIGTERM. Whoever is still there after `spec.shutdown_timeout_s`, or at a second SIGINT, is killed. `stdout` and
    `stderr` are the file descriptors to write to.

    Raises LaunchError where the master port can't be had, a worker can't be started, `stdout` or `stderr` is not open,
    or this is not the main thread; no worker is left then.
    """
    # First of all, as a descriptor that is closed would be given to the next thing that is opened.
    places = outputs(stdout, stderr, spec.environment, prefix=spec.prefix)
    with collect_signals() as signals, reserved_port(spec.master_addr, spec.master_port) as port:
        spec = replace(spec, master_port=port, terminal=terminal_of(stdout, spec.environment))
        with (
            Guard() as guard,
            LogFiles(LogSettings(), "") as files,
            Agent(places, signals, guard, Spawner(guard), files) as agent,
        ):
            if note := thread_note(spec):
                agent.say(note)
            state = agent.attempt(spec)
            agent.finish(Report())
            return state


class Agent:
    """Makes one attempt after the other; `state` is that of the latest. What it is given is its caller's to close."""

    def __init__(
        self, outputs: Mapping[str, Output], signals: Signals, guard: Guard, starter: Starter, files: LogFiles
    ) -> None:
        self.state = State(frozenset(), 0.0)
        self.news: News | None = None
        self._outputs = outputs
        self._signals = signals
        self._guard = guard
        self._starter = starter
        self._files = files
        self._workers: dict[int, Worker] = {}
        self._selector = selectors.PollSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ)
        self._known: set[int] = set()  # what is registered besides, and may have to be unregistered
        self._oom = OomEvidence()

    def __enter__(self) -> "Agent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Only after an error are there still workers here."""
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            stack.callback(self._oom.close)
            for worker in list(self._workers.values()):
                stack.callback(self._clear_away, worker)

    def say(self, line: str) -> None:
        """Shows a line of the launcher's own."""
        self._outputs["stderr"].say(line)

    def show(self, report: Report) -> None:
        """Shows a report."""
        for line in report.lines:
            self.say(line)
        for line in report.quoted:
            self._outputs["stderr"].quote(line)

    def attempt(self, spec: LaunchSpec) -> State:
        """Runs the workers of `spec` to their end.

        Raises LaunchError where a worker can't be started or a log file can't be made; workers may be left then until
        the agent is left.
        """
        self.state = State(frozenset(spec.ranks), spec.shutdown_timeout_s)
        self._oom.close()
        self._oom = OomEvidence()  # what an earlier attempt met says nothing of this one
        self._files.open_attempt(spec.attempt, range(spec.nproc_per_node))
        self.wait(lambda: self._starter.is_ready)
        if self.state.cause is None:
            for worker in self._starter.start(spec, range(spec.nproc_per_node)):
                self._take(worker)
        self._look_at_starter()
        self.state = replace(self.state, living=frozenset(self._workers))
        while self._workers:
            self._turn()
        return self.state

    def wait(self, condition: Callable[[], bool]) -> None:
        """Does what there is to do until `condition` is met or something ends the attempt."""
        while not condition() and self.state.cause is None:
            self._turn()

    def finish(self, report: Report) -> None:
        """Shows a report and waits until all is written.

        A slow reader is waited for, as any program does in a pipe; not so where the launcher was told to end.
        """
        self.show(report)
        patience = self.state.patience_s if isinstance(self.state.cause, Interrupt) else None
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

    def _take(self, worker: Worker) -> None:
        self._workers[worker.rank] = worker
        if worker.pidfd is not None:
            self._selector.register(worker.pidfd, selectors.EVENT_READ)

    def _turn(self) -> None:
        """Waits until something happens, then deals with all that has happened."""
        self._choose_what_to_wait_for()
        for key, _ in self._selector.select(self._timeout_s()):
            if isinstance(key.data, Output):
                key.data.pump()
            elif isinstance(key.data, Source):
                self._read(key.data)
        for signum, when in self._signals.take():
            self._apply(interrupted(self.state, signum, when))
        self._look_at_starter()
        self._take_exits()
        self._take_losses()
        if self.news is not None and (elsewhere := self.news.look()):
            self._apply(ended_elsewhere(self.state, elsewhere, time.monotonic()))
        self._apply(timed(self.state, time.monotonic()))

    def _choose_what_to_wait_for(self) -> None:
        for output in set(self._outputs.values()):
            self._wait_for(output.fd, selectors.EVENT_WRITE, output, output.num_pending_bytes > 0)
        for worker in self._workers.values():
            for stream, fd in worker.pipes.items():
                has_room = stream == "told" or self._outputs[stream].num_pending_bytes < _MAX_PENDING_BYTES
                self._wait_for(fd, selectors.EVENT_READ, Source(worker.rank, stream), has_room)
        for fd in (*self._starter.fds, *([self.news.fd] if self.news else [])):
            self._wait_for(fd, selectors.EVENT_READ, None, True)

    def _wait_for(self, fd: int, events: int, data: Output | Source | None, wanted: bool) -> None:
        known = fd in self._known
        if wanted and not known:
            self._selector.register(fd, events, data)
            self._known.add(fd)
        elif known and not wanted:
            self._selector.unregister(fd)
            self._known.remove(fd)

    def _timeout_s(self) -> float | None:
        """How long there is nothing to do unless something happens; None if for ever."""
        deadlines = [self.state.deadline, self.news.deadline if self.news else None]
        waits = [max(0.0, deadline - time.monotonic()) for deadline in deadlines if deadline is not None]
        if any(worker.pidfd is None for worker in self._workers.values()):
            waits.append(_POLL_S)
        return min(waits, default=None)

    def _look_at_starter(self) -> None:
        before = self._starter.fds
        for line in self._starter.look():
            self.say(line)
        for fd in set(before) - set(self._starter.fds):
            self._wait_for(fd, 0, None, False)

    def _read(self, source: Source) -> None:
        worker = self._workers[source.rank]
        data = worker.read(source.stream, _READ_BYTES)
        if data:
            self._pass_on(worker, source, data)
        elif data is not None:
            self._close(worker, source)

    def _pass_on(self, worker: Worker, source: Source, data: bytes) -> None:
        if source.stream == "told":
            worker.told += data
            return
        sink = self._files.sink(worker.local_rank, source.stream)
        if warning := sink.write(data):
            self.say(warning)
        if sink.screen:
            output = self._outputs[source.stream]
            output.put(output.printer.feed(source, data))

    def _close(self, worker: Worker, source: Source) -> None:
        self._wait_for(worker.pipes[source.stream], selectors.EVENT_READ, source, False)
        worker.close_pipe(source.stream)
        if source.stream != "told":
            output = self._outputs[source.stream]
            output.put(output.printer.close(source))

    def _take_exits(self) -> None:
        ended = [worker for worker in self._workers.values() if worker.has_ended()]
        if not ended:
            return
        had_failed = isinstance(self.state.cause, Exit)
        self._apply(exited(self.state, [self._exit_of(worker) for worker in ended], time.monotonic()))
        if self.news is not None and isinstance(self.state.cause, Exit) and not had_failed:
            self.news.tell(self.state.cause)
        if isinstance(self._starter, Zygote):
            others = [] if self.news is None else [self.news.pid]
            self._starter.reap_orphans([*(worker.pid for worker in self._workers.values()), *others])

    def _exit_of(self, worker: Worker) -> Exit:
        told = self.state.told
        code = self._clear_away(worker)
        by_others = code == -signal.SIGKILL and told != signal.SIGKILL
        remark = (self._oom.was_killed(worker.pid) if by_others else None) or ""
        return Exit(worker.rank, worker.pid, code, told, from_bytes(bytes(worker.told)), remark)

    def _clear_away(self, worker: Worker) -> int:
        if worker.pidfd is not None:
            self._selector.unregister(worker.pidfd)
        returncode = worker.clear_away(self._guard)
        for stream in list(worker.pipes):
            source = Source(worker.rank, stream)
            self._pass_on(worker, source, worker.read_rest(stream))
            self._close(worker, source)
        del self._workers[worker.rank]
        return returncode

    def _take_losses(self) -> None:
        for output in set(self._outputs.values()):
            if output.error is not None:
                lost = OutputLost(output.stream, output.error)
                self._apply(output_lost(self.state, lost, time.monotonic()))

    def _apply(self, step: Step) -> None:
        self.state, signum = step
        if signum is not None:
            for worker in self._workers.values():
                worker.send(signum)

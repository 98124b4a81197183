"""A thread that carries on with exchanges that nobody waits for.

Exchanges through shared memory go on when some thread of the process sees to them. torch's own DistributedDataParallel
waits for futures in C++, and a program may begin an exchange and compute for a while before it waits, while its peers
wait for it. So there is one thread for all groups of the process. It is started with the first work that did not end
at once, sleeps while there is none, and ends with the last group. A callback of a future may itself wait for a future:
so before the thread runs callbacks, another takes its place.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

__all__ = ["Attended", "enter", "leave", "look_after", "step_aside"]

# How long to sleep at most between two looks at a group whose peers show nothing, and if there are several such groups,
# as a sleep is for the peers of one.
_SLEEP_S, _NAP_S = 0.01, 0.0005
# How long the thread may take to end, in seconds: a callback of a future that waits for a peer keeps it.
_PATIENCE_S = 5.0


class Attended(Protocol):
    """A group of which works may be under way."""

    @property
    def busy(self) -> bool: ...

    def attend(self, most_s: float) -> None:
        """Carry on with the works; if some are still under way, sleep up to `most_s` for the peers."""


class _Progress:
    """The threads: one leads, and carries on; others run callbacks, or wait until there is no leader."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._groups: weakref.WeakSet[Attended] = weakref.WeakSet()
        self._busy: list[Attended] = []
        self._threads: set[threading.Thread] = set()
        self._leader: threading.Thread | None = None
        self._num_waiting = 0

    def enter(self, group: Attended) -> None:
        with self._changed:
            self._groups.add(group)

    def leave(self, group: Attended) -> None:
        with self._changed:
            self._groups.discard(group)
            self._busy = [g for g in self._busy if g is not group]
            last = not self._groups
        if last:
            self.end()

    def look_after(self, group: Attended) -> None:
        with self._changed:
            if any(g is group for g in self._busy):
                return
            self._busy.append(group)
            self._call_for_a_leader()

    def step_aside(self) -> None:
        with self._changed:
            if self._leader is threading.current_thread():
                self._leader = None
                self._call_for_a_leader()

    def end(self) -> None:
        with self._changed:
            threads, self._threads, self._leader = self._threads, set(), None
            self._changed.notify_all()
        if threads:
            atexit.unregister(self.end)
        for thread in threads - {threading.current_thread()}:
            thread.join(_PATIENCE_S)

    def _call_for_a_leader(self) -> None:
        if self._leader is not None:
            return
        if self._num_waiting:
            self._changed.notify()
            return
        if not self._threads:
            # A daemon thread that is still in torch when the interpreter ends would abort the process.
            atexit.register(self.end)
        thread = threading.Thread(target=self._run, name="samestep progress", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while busy := self._lead(me):
            for group in busy:
                group.attend(_SLEEP_S if len(busy) == 1 else _NAP_S)
            del busy, group
            with self._changed:
                if self._leader is me:
                    self._leader = None

    def _lead(self, me: threading.Thread) -> list[Attended]:
        """Become the leader once there is none and something to do, and return that; nothing, if it all ends."""
        with self._changed:
            while me in self._threads:
                self._busy = [g for g in self._busy if g.busy]
                if self._busy and self._leader is None:
                    self._leader = me
                    return list(self._busy)
                self._num_waiting += 1
                self._changed.wait()
                self._num_waiting -= 1
        return []


_progress: _Progress | None = None


def enter(group: Attended) -> None:
    """Note that `group` exists."""
    _of_this_process().enter(group)


def leave(group: Attended) -> None:
    """Note that `group` has ended; with the last one, the thread does, too."""
    _of_this_process().leave(group)


def look_after(group: Attended) -> None:
    """Carry on with the works of `group`, in the thread, until all have ended."""
    _of_this_process().look_after(group)


def step_aside() -> None:
    """Have another thread carry on: this one is about to run callbacks, which may wait for what is under way."""
    _of_this_process().step_aside()


def _of_this_process() -> _Progress:
    """Return what there is in this process: one that was forked has no thread, and its parent's lock may be taken."""
    global _progress
    if _progress is None or _progress.pid != os.getpid():
        _progress = _Progress()
    return _progress

"""All groups that share memory in this process: while one waits, the exchanges of the others go on."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["Member", "go_on", "join", "leave", "others_go_on"]


class Member(Protocol):
    """A group, as the others see it. It can be referred to weakly, and be told apart."""

    @property
    def busy(self) -> bool:
        """Whether exchanges are under way."""
        ...

    def poll(self) -> None:
        """Carry on as far as is possible without waiting."""
        ...

    def forked(self) -> None:
        """Let go of everything, in a process forked from this one."""
        ...


_members: weakref.WeakSet[Member] = weakref.WeakSet()
_lock = threading.Lock()
_knows_forks = False


def join(member: Member) -> None:
    global _knows_forks
    with _lock:
        if not _knows_forks:
            os.register_at_fork(after_in_child=_forked)
            _knows_forks = True
        _members.add(member)


def leave(member: Member) -> None:
    with _lock:
        _members.discard(member)


def others_go_on(waiting: weakref.ref[Member]) -> bool:
    """Carry on with the exchanges of all others than the one that waits; tell whether there are some."""
    return go_on(waiting())


def go_on(but: Member | None = None) -> bool:
    """Carry on with the exchanges of all groups `but` one; tell whether there are some."""
    with _lock:
        busy = [member for member in _members if member is not but and member.busy]
    for member in busy:
        member.poll()
    return bool(busy)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for member in list(_members):
        member.forked()
    _members.clear()

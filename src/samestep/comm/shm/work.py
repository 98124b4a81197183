"""Exchanges under way in a group of ranks that share memory."""

from __future__ import annotations

import threading
from typing import Protocol

from samestep.comm.base import Work
from samestep.comm.ops import Op
from samestep.comm.shm.exchanges import Meetings
from samestep.comm.shm.living import go_on
from samestep.errors import CommunicatorError, SamestepError

__all__ = ["DelegatedWork", "Owner", "SharedWork"]


# How long to wait for a message before exchanges are looked after again.
_NAP_S = 0.0005


class Owner(Protocol):
    """Who drives the exchanges of a group."""

    def drive(self, work: SharedWork) -> None: ...

    def poll(self) -> None: ...

    def delegate_failed(self, error: CommunicatorError) -> None: ...


class SharedWork(Work):
    """An exchange that has been asked for; those of one group are carried out in the order of their starts."""

    __slots__ = ("error", "finished", "fresh", "header", "meetings", "needs", "op", "owner")

    def __init__(self, owner: Owner, op: Op) -> None:
        self.owner, self.op = owner, op
        self.meetings: Meetings | None = None
        self.needs = 0  # the meeting to which all have to have come before it goes on
        self.header = b""
        self.fresh = True  # it has not been compared with what the other ranks ask for
        self.finished = False
        self.error: SamestepError | None = None

    def wait(self) -> None:
        if not self.finished:
            self.owner.drive(self)
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error.__cause__

    def done(self) -> bool:
        if not self.finished:
            self.owner.poll()
        return self.finished


class DelegatedWork(Work):
    """An exchange that another communicator carries out; its failure is the group's."""

    def __init__(self, owner: Owner, inner: Work) -> None:
        self._owner, self._inner = owner, inner

    def wait(self) -> None:
        """Wait; exchanges over shared memory that are under way go on meanwhile, as the peer may need them first."""
        try:
            if go_on():
                self._wait_beside()
            else:
                self._inner.wait()
        except CommunicatorError as error:
            self._owner.delegate_failed(error)
            raise

    def _wait_beside(self) -> None:
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                self._inner.wait()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        waiting = threading.Thread(target=wait, name="samestep-message", daemon=True)
        waiting.start()
        while waiting.is_alive() and go_on():
            waiting.join(_NAP_S)
        waiting.join()
        if errors:
            raise errors[0]

    def done(self) -> bool:
        return self._inner.done()

"""How a rank takes part in an exchange without a backward of its own, or after one that failed."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from samestep.parallel.control import Control, Outcome
from samestep.parallel.progress import Progress
from samestep.parallel.standing import Standing

__all__ = ["WithoutBackward"]


class WithoutBackward(ABC):
    """That part of `Reducer`, which has the other: a backward from its first hook to its end."""

    sync: bool
    _open: bool  # a backward is under way, or was left
    _syncing: bool  # it is a synchronised one
    _shadowing: bool
    _used: bytearray
    _weight: float | None
    _tail: Tensor
    _closing: weakref.ref[object] | None
    _control: Control
    _standing: Standing
    progress: Progress
    _also: Callable[[int], None]

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that only this rank knows."""
        return any(self._used)

    def contribute_nothing(self) -> None:
        """Take part in a synchronised backward of the other ranks without one of this rank's own."""
        if self.sync:
            self._begin()
            self._exchange_all()

    def complete(self) -> None:
        """Take part after a weighted backward that came through none of the parameters, and so opened nothing."""
        if self._weight is not None:
            self.contribute_nothing()

    def shadow(self) -> None:
        """Take part in a synchronised backward of ranks that still train, as one that has joined.

        Contributes what was accumulated and not exchanged. The gradients become those of the other ranks, for an
        optimizer that divides its work among all. What is wrong with the others' step, they are told.
        """
        self._shadowing = True
        try:
            nothing = not self.accumulating and self._weight is None and self._standing.outcome is Outcome.DONE
            if nothing:
                self._standing.outcome = Outcome.JOINED
            self._begin()
            self._syncing = True
            with self.progress:
                self._start_rest(failed=nothing)
            self._exchange_all()
        finally:
            self._shadowing = False

    def skip(self) -> None:
        """Take part in a synchronised backward of the other ranks by asking all of them to skip the step.

        A backward of this rank that was left with an exception is the one; else it is the next. Without `sync`, that is
        told in the synchronised backward at the accumulation's end.
        """
        standing = self._standing
        standing.refuse_within_backward()
        if standing.void:  # all have taken part, and know that the step is not to be taken
            standing.void, standing.skipped = False, True
            self.drop()
            return
        interrupted = self._open and self._syncing
        if not interrupted:
            self.settle()
        standing.outcome = Outcome.SKIPPED
        if not (interrupted or self.sync):
            return
        if not interrupted:
            self._begin()
        with self.progress:
            self._start_rest(failed=True)
        self._exchange_all()
        self._catch_up()

    def skipped(self) -> bool:
        """Tell whether the last synchronised backward was skipped; on a device the host waits for its exchange."""
        self._catch_up()
        return self._standing.skipped

    def settle(self) -> None:
        """Make good for a backward that ended with an exception: tell the ranks that wait for this one that it failed.

        This rank's gradients are dropped. Nothing happens after a backward that ended well, or while one is open.
        """
        self._standing.void = False
        if not self._open or (self._closing is not None and self._closing() is not None):
            return
        if not self._syncing:  # what was laid aside is added on the other ranks, and so here
            self._open, self._weight = False, None
            self._used[:] = bytes(len(self._used))
            self.drop()
            return
        try:
            with self.progress:
                self._start_rest(failed=True)
                self._wait_all()
            self._also(0 if self._defers else self._control.judge(self._tail).source)
            self._raise_hook_error()
        finally:
            self.drop()
            self._forget()

    def _catch_up(self) -> bool:
        """Look at the control numbers that were put off, if any were, and do what they say."""
        verdict = self._standing.catch_up()
        if verdict is None:
            return False
        if verdict.skipping:
            self.drop()
        self._standing.note(verdict)
        return True

    # What the other part has

    @property
    @abstractmethod
    def _defers(self) -> bool: ...

    @abstractmethod
    def drop(self) -> None: ...

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _start_rest(self, *, failed: bool = False) -> None: ...

    @abstractmethod
    def _wait_all(self) -> None: ...

    @abstractmethod
    def _raise_hook_error(self) -> None: ...

    @abstractmethod
    def _exchange_all(self) -> None: ...

    @abstractmethod
    def _forget(self) -> None: ...

"""Exchanges under way as torch.distributed sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from samestep.comm.base import Work

__all__ = ["BackendWork", "Owner"]

_NO_TIMEOUT = timedelta()


class Owner(Protocol):
    """The process group that a work belongs to."""

    def settle_all(self) -> None: ...

    def wait_within(self, work: BackendWork, timeout_s: float) -> None: ...


class BackendWork(dist.Work):
    """A call of torch.distributed: `started` are its exchanges, in order; `finish` puts their results in place.

    It is settled, once, by whichever thread first sees that its exchanges have ended: the one that waits for it, one
    that makes a later call, or the progress thread. That thread also runs the callbacks of its futures.
    """

    def __init__(
        self, owner: Owner, started: Sequence[Work], results: list[Tensor], finish: Callable[[], None] | None
    ) -> None:
        super().__init__()
        self._owner, self._started, self._results, self._finish = owner, started, results, finish
        self._lock = threading.Lock()
        self._settled = False
        self._error: Exception | None = None
        self._futures: list[Future[None]] = []

    def settle(self) -> bool:
        """Tell whether the work has ended, and if so, see to what has to be done then."""
        if not self._settled:
            if not self.is_over():
                return False
            self._settle()
        return True

    def is_over(self) -> bool:
        """Tell whether the exchanges have ended, if the work is settled or not."""
        return all(work.done() for work in self._started)

    @property
    def has_futures(self) -> bool:
        return bool(self._futures)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True once the results are there; raise what `Work.wait` of our own raises.

        Raises DeadlineError if they are not there after `timeout`; the exchange goes on then.
        """
        if not self._settled:
            if timeout > _NO_TIMEOUT:
                self._owner.wait_within(self, timeout.total_seconds())
            self._settle()
            self._owner.settle_all()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def is_completed(self) -> bool:
        if not self._settled and self.settle():
            self._owner.settle_all()
        return self._settled

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors that have the result.

        It is one that follows another: torch's C++ code sees no error in a future to which Python gave an exception,
        but it does in one whose callback raised.
        """
        ended: Future[None] = Future()
        future = ended.then(lambda _: self._outcome())
        with self._lock:
            if not self._settled:
                self._futures.append(ended)
                return future
        ended.set_result(None)
        return future

    def _outcome(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._results

    def _settle(self) -> None:
        """Wait for the exchanges, put the results in place, and complete the futures."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                self._settle()
            return
        error = None
        for work in self._started:
            try:
                work.wait()
            except Exception as failed:  # noqa: BLE001 - raised by whoever waits, and set in futures
                error = error or failed
        with self._lock:
            if self._settled:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as failed:  # noqa: BLE001 - the same
                    error = failed
            self._error, self._started, self._finish = error, (), None
            self._settled = True
            futures, self._futures = self._futures, []
        for future in futures:
            future.set_result(None)

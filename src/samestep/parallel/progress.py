"""How many synchronised backwards there have been, and what that tells when an exchange fails.

Every rank takes part in each of them, so the count is the same on all ranks but for one under way: a rank that is in
number n has seen n - 1 completed, and so has a rank that is not in it. Nothing has to be exchanged to know that. Which
ranks are in it, a transport tells that knows who has come; for others, those that notice write it to the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import AllReduce, Op
from samestep.errors import CommunicatorError, MismatchError, PeerLostError

__all__ = ["Progress"]

# How long to wait for all other ranks' word of where they are, once an exchange has failed, and at least for each.
_WORD_S, _LOOK_S = 1.0, 0.01


class Progress:
    """Counts the synchronised backwards of `communicator`'s ranks. As a context it explains errors of exchanges."""

    def __init__(self, communicator: Communicator) -> None:
        self.number = 0
        self._communicator = communicator

    def begin(self) -> Communicator:
        """Count one more; return the communicator for its first exchange, which says what it is for."""
        self.number += 1
        return _Announcing(self._communicator, self)  # kept, it would keep the group alive, in a circle

    def __str__(self) -> str:
        return f"gradients of synchronised backward {self.number}; a rank that is not in it has made {self.number - 1}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CommunicatorError | MismatchError) and self.number:
            raise type(error)(f"{error}\n{self._explanation(error)}") from error

    def _explanation(self, error: CommunicatorError | MismatchError) -> str:
        communicator, number = self._communicator, self.number
        here, made = f"is in its synchronised backward {number}", f"{number - 1} made"
        missing = _missing(communicator, number) if _names_nobody(error) else None
        if missing is None:
            counts = f"rank {communicator.rank} {here}, a rank that is not in it has {made}"
        else:
            ranks = range(communicator.size)
            counts = ", ".join(f"rank {r} has {made}" if r in missing else f"rank {r} {here}" for r in ranks)
        ended = " and ended without an error of its own" if isinstance(error, PeerLostError) else ""
        return (
            f"  {counts}. If a rank has fewer batches than others{ended}, give all as many, or train within "
            "`with model.join():`"
        )


class _Announcing(Communicator):
    """Says with each all-reduce which backward it belongs to."""

    _scales = True  # as far as `inner` does

    def __init__(self, inner: Communicator, progress: Progress) -> None:
        self.inner, self._progress = inner, progress
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def _start(self, op: Op) -> Work:
        return self.inner.start(replace(op, purpose=self._progress) if isinstance(op, AllReduce) else op)

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        return self.inner._split(ranks)


def _names_nobody(error: CommunicatorError | MismatchError) -> bool:
    """Tell whether the transport did not know which peer it was; see `C10dCommunicator.failed`."""
    return ": a peer " in str(error)


def _missing(communicator: Communicator, number: int) -> Sequence[int] | None:
    """Return the ranks that are not in backward `number`, by what all that are in it write to the group's store.

    None if that can't be told, as there is no store any more.
    """
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    if len(others) == 1:
        return others
    heard: SimpleQueue[Sequence[int] | None] = SimpleQueue()
    # In a thread, as the store may be at a rank that does not answer.
    thread = threading.Thread(target=lambda: heard.put(_ask(communicator, others, number)), daemon=True)
    thread.start()
    try:
        return heard.get(timeout=2 * _WORD_S)
    except Empty:
        return None


def _ask(communicator: Communicator, others: Sequence[int], number: int) -> Sequence[int] | None:
    inside, deadline = dist.distributed_c10d, time.monotonic() + _WORD_S
    missing = []
    try:
        group: Any = getattr(communicator, "group", None)
        prefix = f"samestep/backward/{inside._get_process_group_name(group)}/{number}"
        store = dist.PrefixStore(prefix, inside._get_default_store())  # type: ignore[attr-defined]
        store.set(str(communicator.rank), "")
        for rank in others:
            try:
                store.wait([str(rank)], timedelta(seconds=max(_LOOK_S, deadline - time.monotonic())))
            except RuntimeError:  # too late, or no store
                if not store.check([str(rank)]):
                    missing.append(rank)
    except (RuntimeError, ValueError, CommunicatorError):
        return None
    return missing

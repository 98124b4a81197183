"""What Gloo leaves to its users: to notice soon that a peer is gone, and to let the others know.

When a connection breaks, Gloo wakes those who wait for messages that had not begun. Who waits for one that was being
sent or received sleeps on until the group's timeout (`Pair::signalException` in gloo/transport/tcp/pair.cc passes over
the operation under way). And a rank that found out keeps its other connections, so its own peers wait on.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["hang_up", "is_gloo", "wait"]

# The last of Gloo's tags, of 31 bits; callers get those of 30 bits, so nobody ever sends with it.
_NEVER_SENT = 2**31 - 1

# How long to wait before the first and between later looks at the connections, in seconds. Each look leaves about a
# hundred bytes behind, here and on each peer.
_FIRST_LOOK_S = 0.5
_LOOK_S = 8.0


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Tell whether tensors on the CPU go through Gloo in `group`, and barriers, too."""
    backends = dist.get_backend_config(group)
    return "cpu:gloo" in backends and "nccl" not in backends


def wait(group: dist.ProcessGroup, work: Any) -> None:
    """Wait for `work`, a collective of `group`; raise RuntimeError if it failed or if a connection is broken.

    In the latter case the work may stay stuck in one of Gloo's threads until the group's timeout.
    """
    pause_s = _FIRST_LOOK_S
    while True:
        try:
            work.wait(timedelta(seconds=pause_s))
        except RuntimeError:
            if work.is_completed():
                work.wait()
                return
        else:
            return
        try:
            _look(group)
        except RuntimeError:
            if not work.is_completed():
                _keep(group)
            raise
        pause_s = min(2 * pause_s, _LOOK_S)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a broken group, so that those who wait for this rank learn of it.

    Gloo closes all of a rank's connections when it has waited too long for one message, so this waits for one that
    nobody sends. Neither shutdown() nor abort() closes any; they last until the last reference to the group is gone.
    """
    for peer in _peers(group):
        with suppress(RuntimeError):
            _receive(group, peer).wait(timedelta(milliseconds=1))


def _look(group: dist.ProcessGroup) -> None:
    """Raise RuntimeError if a connection is broken: a receive cannot even begin there."""
    for peer in _peers(group):
        _receive(group, peer)


def _keep(group: dist.ProcessGroup) -> None:
    """Never let go of `group`: with its last reference it would wait for its threads, one of which is stuck."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _receive(group: dist.ProcessGroup, peer: int) -> Any:
    return group.recv([torch.empty(1)], peer, _NEVER_SENT)


def _peers(group: dist.ProcessGroup) -> list[int]:
    return [peer for peer in range(group.size()) if peer != group.rank()]

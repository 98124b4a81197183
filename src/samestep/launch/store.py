"""Connects to the store at which nodes meet, or holds it; torch is imported when this is done."""

import contextlib
import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from samestep.launch.addresses import address_towards, is_this_machine
from samestep.launch.nodes import MeetingSettings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["Connection", "NoStoreError", "connected"]

# Between two attempts to reach a store that is not there yet.
_PAUSE_S = 0.25
_PROBE_S = 2.0
# How long a store may take to answer for the first time.
_ANSWER_S = 10.0


class NoStoreError(Exception):
    """There is no store, and there won't be one; the message is for the user."""


@dataclass(frozen=True)
class Connection:
    """Two ways to the same store, as one waits in it while the other acts; `is_host` if this process holds it."""

    store: "TCPStore"
    follower: "TCPStore"
    is_host: bool
    addr: str


def connected(settings: MeetingSettings, pause: Callable[[float], None], deadline: float) -> Connection:
    """Holds the store if that is this node's part and nobody else does, or else connects to it.

    Asks again until `deadline` (monotonic), with `pause` in between, which shows life. Raises NoStoreError.
    """
    hosts = is_this_machine(settings.endpoint) if settings.is_host is None else settings.is_host
    while True:
        store = _held(settings, pause) if hosts else None
        is_host = store is not None
        addr = None if is_host else _probe(settings)
        if store is None and isinstance(addr, str):
            store = _client(settings, pause)
        if store is not None and (follower := _client(settings, pause)) is not None:
            addr = settings.local_addr or (address_towards(settings.endpoint) if addr is None else addr)
            return Connection(store, follower, is_host, str(addr or settings.endpoint))
        if time.monotonic() >= deadline:
            raise NoStoreError(
                f"no node answers at {settings.place} ({_told(addr)}), asked from {socket.gethostname()} for"
                f" {settings.join_timeout_s:.0f} s. The node with this address holds the store at which all meet: start"
                " samestep run there as well, and let its port through; --rdzv-conf join_timeout=SECONDS waits longer"
            )
        pause(_PAUSE_S)


def _held(settings: MeetingSettings, pause: Callable[[float], None]) -> "TCPStore | None":
    """The store, held by this process; None if somebody else has the port."""
    try:
        # As torch's server does, on all interfaces; it says less well what is wrong.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", settings.port))
            tried.listen()
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return None
        raise NoStoreError(f"port {settings.port} can't be used: {os.strerror(e.errno or 0)}; give another") from e
    try:
        return _made(settings, pause, is_master=True)
    except RuntimeError as e:
        if "EADDRINUSE" in str(e):  # another node of this machine was faster
            return None
        raise NoStoreError(
            f"this node is to hold the store at {settings.place}, but can't reach it there: {_first_line(e)}"
        ) from e


def _client(settings: MeetingSettings, pause: Callable[[float], None]) -> "TCPStore | None":
    """A connection to the store; None if nobody listens there any more."""
    try:
        return _made(settings, pause, is_master=False)
    except (RuntimeError, TimeoutError) as e:
        if not isinstance(_probe(settings), str):
            return None
        raise NoStoreError(
            f"what listens at {settings.place} does not answer as torch's store does, so another program has this port:"
            " end it, or give another port in --rdzv-endpoint"
        ) from e


def _made(settings: MeetingSettings, pause: Callable[[float], None], *, is_master: bool) -> "TCPStore":
    """A store, or TimeoutError; in a thread, as torch waits for ever for the answer of something that is silent."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    answers: queue.SimpleQueue[TCPStore | RuntimeError] = queue.SimpleQueue()

    def make() -> None:
        try:
            answers.put(
                TCPStore(
                    settings.endpoint,
                    settings.port,
                    is_master=is_master,
                    timeout=timedelta(seconds=_ANSWER_S),
                    wait_for_workers=False,
                )
            )
        except RuntimeError as e:
            answers.put(e)

    threading.Thread(target=make, daemon=True).start()
    end = time.monotonic() + _ANSWER_S
    while time.monotonic() < end:
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=_PAUSE_S)
            if isinstance(answer, RuntimeError):
                raise answer
            return answer
        pause(0.0)
    raise TimeoutError


def _probe(settings: MeetingSettings) -> str | OSError:
    """This machine's address on a connection to the endpoint, or why there is none."""
    try:
        with socket.create_connection((settings.endpoint, settings.port), _PROBE_S) as probe:
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as e:
        return e if isinstance(e, OSError) else OSError(str(e))


def _told(reason: object) -> str:
    if isinstance(reason, OSError):
        return (reason.strerror or str(reason)).lower()
    return "the connection was closed"


def _first_line(e: BaseException) -> str:
    return str(e).partition("\n")[0]

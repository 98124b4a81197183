"""What the waits ask of Linux: to sleep until a word in shared memory changes, and whether a process is alive."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Callable

__all__ = ["futex_wait", "futex_wake", "is_alive", "missing", "start_time"]

# The architectures for which counters.py argues the order of memory accesses.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def missing() -> str:
    """Return what this system lacks for shared memory between ranks, or nothing."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if platform.machine() not in _FUTEX:
        return f"it knows the processors {' and '.join(_FUTEX)}, this is {platform.machine()}"
    return ""


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep until somebody wakes those who wait at `address`, or the time is up; not at all if `value` isn't there.

    It may return for no reason. Signal handlers run.
    """
    whole = int(timeout_s)
    timeout = _Timespec(whole, int((timeout_s - whole) * 1e9))
    _syscall()(_number(), address, _WAIT, value, ctypes.addressof(timeout), None, 0)


def futex_wake(address: int) -> None:
    """Wake all processes that sleep at `address`."""
    _syscall()(_number(), address, _WAKE, _EVERYONE, None, None, 0)


def start_time(pid: int) -> int | None:
    """Return when process `pid` was started, in ticks since the boot; None if it has ended (or is only not reaped)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Tell whether the process that had the number `pid` and was started at `started` still runs.

    If that cannot be found out, for lack of descriptors for example, it is taken to.
    """
    with contextlib.suppress(OSError):
        return start_time(pid) == started
    return True


def _syscall() -> Callable[..., int]:
    global _loaded
    if _loaded is None:
        _loaded = ctypes.CDLL(None)["syscall"]
        # Declared, so that ctypes passes addresses and the 64-bit number as they are.
        _loaded.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint32,
        )
        _loaded.restype = ctypes.c_long
    return _loaded


def _number() -> int:
    return _FUTEX[platform.machine()]


_loaded: ctypes._NamedFuncPointer | None = None

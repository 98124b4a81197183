"""What Linux is asked for: memory without a name, sleep until a word in it changes, and whether a process is alive."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable

__all__ = ["free_bytes", "futex_wait", "futex_wake", "is_alive", "memfd_create", "missing", "start_time"]

# The architectures for which board.py argues the order of memory accesses.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_CLOSE_ON_EXEC = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def missing() -> str:
    """Return what this system lacks for shared memory between ranks, or nothing."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if platform.machine() not in _FUTEX:
        return f"it knows the processors {' and '.join(_FUTEX)}, this is {platform.machine()}"
    return ""


def free_bytes() -> int:
    """Return how much memory this host could still give out. Raises OSError."""
    with open("/proc/meminfo", "rb") as info:
        known = (1024 * int(line.split()[1]) for line in info if line.startswith(b"MemAvailable:"))
        return next(known, sys.maxsize)


def memfd_create(name: str) -> int:
    """Return a descriptor of new memory, closed on exec. Raises OSError.

    Python has such a function only where it was built for a C library that has it, which conda's is not.
    """
    make = ctypes.CDLL(None, use_errno=True)["syscall"]
    make.restype = ctypes.c_long
    number = _MEMFD_CREATE[platform.machine()]
    fd: int = make(ctypes.c_long(number), ctypes.c_char_p(name.encode()), ctypes.c_uint(_CLOSE_ON_EXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


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
    """Return when process `pid` was started, in ticks since the boot; None if it has ended (or is only not reaped).

    Raises OSError if that cannot be found out.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Tell whether the process that had the number `pid` and was started at `started` still runs.

    If that cannot be found out, it is taken to.
    """
    try:
        return start_time(pid) == started
    except OSError:
        return _has_program(pid)


def _has_program(pid: int) -> bool:
    """Tell, without a descriptor, whether process `pid` has a program: who has ended has none, reaped or not."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
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

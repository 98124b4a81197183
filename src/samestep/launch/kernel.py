"""What Linux is asked for about processes: to die with a parent, to adopt orphans, to have a name; and descriptors."""

import contextlib
import ctypes
import os
import sys

__all__ = ["adopt_orphans", "die_with_parent", "name_process", "pidfd", "stop_adopting"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGKILL = 9
# Loaded here, as little as possible is to happen after fork.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that is its parent ends, where it is Linux's."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def adopt_orphans() -> bool:
    """Makes this process the parent of descendants whose own parent has ended; tells whether the system can do that."""
    return _prctl is not None and _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def stop_adopting() -> None:
    """Undoes `adopt_orphans`; who was adopted already stays so."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def name_process(name: str) -> None:
    """Lets people who look at `ps` know what this process is; Linux keeps the first 15 bytes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(name)


def pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, or None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None

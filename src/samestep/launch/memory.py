"""Finds evidence that a process which died by SIGKILL was ended by the kernel because memory had run out.

There are two witnesses. The kernel's log names the process; not everybody may read it, and in a container its
numbers are not ours. The counter of the control group says only that somebody in it was killed. Both are looked
at before and after, so what happened earlier doesn't count.
"""

import contextlib
import os
import re
from pathlib import Path
from types import TracebackType

__all__ = ["OomEvidence"]

_LOG = "probably out of memory: the kernel's log says that it was killed for that"
_COUNTER = "probably out of memory: the kernel killed for that in this control group"

# "Out of memory: Killed process 7 (python) ...", "Memory cgroup out of memory: Killed process 7 (python) ..."; before
# Linux 5.3 "Killed process 7 (python) ..." stood in a line of its own. The prefix of a record is its priority, and
# below 8 only for what the kernel itself has written.
_KILLED = re.compile(rb"^[0-7],[^;]*;(?:[^:]*[Oo]ut of memory[^:]*: )?Killed process (\d+) \(")
# A record is never longer, and a shorter buffer is refused. So many are read at most: a log that is written to all
# the time has no end.
_RECORD_BYTES = 8192
_MAX_RECORDS = 100_000
# Outside of containers, /proc/self/ns/pid leads here (PROC_PID_INIT_INO of the kernel).
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


class OomEvidence:
    """What is known before any worker starts, to be compared with later; make a new one for a new attempt.

    Never waits and never raises for what isn't there. `proc`, `cgroups` and `kernel_log` are where the system has
    these things. Holds a descriptor until `close`.
    """

    def __init__(self, *, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup", kernel_log: str = "/dev/kmsg") -> None:
        self._counters = {path: count for path in _counters(proc, cgroups) if (count := _kills(path)) is not None}
        self._log = _open_at_end(kernel_log) if _has_the_kernels_numbers(proc) else None
        self._killed: set[int] = set()

    def __enter__(self) -> "OomEvidence":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def was_killed(self, pid: int) -> str | None:
        """Says why a process of ours that died by SIGKILL was probably killed for want of memory, or None.

        The text is a remark to stand in brackets, such as "probably out of memory: the kernel's log ...".
        """
        self._read_log()
        if pid in self._killed:
            return _LOG
        counts = {path: _kills(path) for path in self._counters}
        return _COUNTER if any((counts[path] or 0) > before for path, before in self._counters.items()) else None

    def close(self) -> None:
        """Closes the kernel's log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _read_log(self) -> None:
        if self._log is None:
            return
        for _ in range(_MAX_RECORDS):
            try:
                records = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read; the next ones follow
                continue
            except OSError:  # BlockingIOError: that is all for now
                return
            if not records:
                return
            for record in records.splitlines():
                if found := _KILLED.match(record):
                    self._killed.add(int(found[1]))


def _counters(proc: str, cgroups: str) -> list[Path]:
    """The files that may count the kills in the control group of this process."""
    try:
        lines = Path(proc, "self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        group = group.lstrip("/")
        if number == "0" and not controllers:
            # Where both versions are in use, the second is mounted below.
            roots, name = [Path(cgroups), Path(cgroups, "unified")], "memory.events"
        elif "memory" in controllers.split(","):
            roots, name = [Path(cgroups, "memory")], "memory.oom_control"
        else:
            continue
        # In a container the group is often mounted as the root, while its name is still the one outside.
        found += [root / group / name if os.path.exists(root / group / name) else root / name for root in roots]
    return found


def _kills(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text("ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _open_at_end(kernel_log: str) -> int | None:
    try:
        fd = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:  # old records could name a process that had the same number
        os.close(fd)
        return None
    return fd


def _has_the_kernels_numbers(proc: str) -> bool:
    """Whether process numbers are here what they are in the kernel's log."""
    try:
        return os.readlink(os.path.join(proc, "self/ns/pid")) == _INITIAL_PID_NAMESPACE
    except OSError:
        return False

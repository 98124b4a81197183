"""What a test may not leave behind: processes, threads, open files, environment variables, a process group."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

__all__ = ["Snapshot", "end", "left_since", "take"]

_PROC = Path("/proc/self")
_PATIENCE_S = 2.0
# Variables that others set: pytest for every phase of a test, torch the first time that its compiler is looked at.
_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Snapshot:
    """What this process has at one time."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    files: Counter[str]
    environment: Mapping[str, str]
    process_group: bool

    def left_over(self, after: Snapshot) -> list[str]:
        """Say what `after` has beyond this."""
        left = [f"the process {pid} ({_command(pid)})" for pid in sorted(after.children - self.children)]
        left += [f"the thread {thread.name!r}" for thread in after.threads - self.threads]
        left += [f"an open {name}" for name in sorted((after.files - self.files).elements())]
        names = sorted(self.environment.keys() | after.environment.keys())
        left += [
            f"the environment variable {name}: {self.environment.get(name)!r} became {after.environment.get(name)!r}"
            for name in names
            if self.environment.get(name) != after.environment.get(name)
        ]
        if after.process_group and not self.process_group:
            left.append("torch.distributed's default process group")
        return left


def take() -> Snapshot:
    """Look at this process; what multiprocessing keeps for the whole session does not count."""
    environment = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    return Snapshot(_children(), frozenset(threading.enumerate()), _files(), environment, _has_process_group())


def left_since(before: Snapshot) -> list[str]:
    """Return what is there beyond `before`, after garbage is collected and threads had time to end."""
    if before.left_over(take()):
        gc.collect()
        for thread in frozenset(threading.enumerate()) - before.threads:
            thread.join(_PATIENCE_S)
    return before.left_over(take())


def end(before: Snapshot) -> None:
    """Put back what can be: end processes and the process group, restore the environment."""
    for pid in _children() - before.children:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for name in os.environ.keys() - before.environment.keys() - set(_OTHERS):
        del os.environ[name]
    os.environ.update(before.environment)
    if _has_process_group() and not before.process_group:
        sys.modules["torch.distributed"].destroy_process_group()


def _children() -> frozenset[int]:
    """Return all child processes, those that ended and were not waited for among them."""
    kept = {getattr(forkserver._forkserver, "_forkserver_pid", None)}
    kept.add(getattr(resource_tracker._resource_tracker, "_pid", None))
    pids: set[int] = set()
    for task in (_PROC / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            pids.update(map(int, (task / "children").read_text().split()))
    return frozenset(pids - kept)


def _files() -> Counter[str]:
    """Count open files by what they are."""
    kept = {getattr(forkserver._forkserver, "_forkserver_alive_fd", None)}
    kept.add(getattr(resource_tracker._resource_tracker, "_fd", None))
    files: Counter[str] = Counter()
    for fd in os.listdir(_PROC / "fd"):
        with suppress(FileNotFoundError):  # that of listdir itself
            if int(fd) not in kept:
                files[os.readlink(_PROC / "fd" / fd)] += 1
    return files


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200].strip() or "ended, not waited for"
    return "gone"

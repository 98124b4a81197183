"""Runs `samestep run` for the tests, and sees to it that nothing of it is left, whatever a test does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samestep.world import environment

__all__ = ["Run", "guard_of", "is_gone", "named_child_of", "python", "wait_until"]

_LIMIT_S = 60.0
_LOOK_S = 0.01

# What every script begins with. `note` leaves a file that the test waits for; a rank's own process is noted at once, as
# `rank-1`, in a later attempt as `rank-1-again-2`.
PREAMBLE = """
import os, select, signal, subprocess, sys
rank = int(os.environ["RANK"])
def note(name, text=""):
    with open(f"{name}.part", "w") as f:
        f.write(str(text))
    os.rename(f"{name}.part", name)
def child(*code):
    p = subprocess.Popen([sys.executable, "-S", "-c", ";".join(code)])
    note(f"child-{rank}", p.pid)
    return p
def wait_for(name):
    while not os.path.exists(name):
        select.select([], [], [], 0.01)
def forever():
    while True:
        signal.pause()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
note(f"rank-{rank}" if attempt == "0" else f"rank-{rank}-again-{attempt}", os.getpid())
"""


class Run:
    """One `samestep run` of a script given as text, in a folder of its own, where the script's notes appear."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *flags: str,
        stdout: int | None = None,
        stderr: int | None = None,
        **options: object,
    ) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(PREAMBLE + text)
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "samestep", "run", *flags, str(script)],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err if stderr is None else stderr,
                start_new_session=True,
                **options,  # type: ignore[call-overload]
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        """Kills by id what a failed test has left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(_LIMIT_S)
        for pid in self.noted_pids():
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> int:
        """The launcher's exit code."""
        return int(self.process.wait(_LIMIT_S))

    def wait_for(self, *names: str) -> None:
        """Waits until the ranks have left these notes; fails at once if the launcher ends before."""
        paths = [self.folder / name for name in names]

        def there() -> bool:
            return all(path.exists() for path in paths)

        wait_until(lambda: there() or self.process.poll() is not None)
        assert there(), self.err.read_text()

    def noted_pids(self) -> list[int]:
        """The processes of all ranks, and those children that they have noted."""
        return [
            int(p.read_text()) for p in self.folder.iterdir() if p.name[:5] in ("rank-", "child") and p.suffix == ""
        ]

    def lines(self, path: Path) -> Sequence[str]:
        """What the launcher wrote, without its note on threads."""
        return [line for line in path.read_text().splitlines() if "OMP_NUM_THREADS" not in line]

    def assert_nobody_is_left(self, num_pids: int) -> None:
        pids = self.noted_pids()
        assert len(pids) == num_pids
        wait_until(lambda: all(map(is_gone, pids)))


def wait_until(condition: Callable[[], bool]) -> None:
    """Looks at a condition again and again; fails if it does not come true."""
    deadline = time.monotonic() + _LIMIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        pause.wait(_LOOK_S)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped counts as ended."""
    try:
        return _stat(pid)[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def guard_of(pid: int) -> int:
    """The guard of a launcher; waits until it has taken its name."""
    return named_child_of(pid, "samestep-guard")


def named_child_of(pid: int, name: str) -> int:
    """A child of a process, by its name; waits until there is one."""
    wait_until(lambda: name in _processes_below(pid))
    return _processes_below(pid)[name]


def _processes_below(pid: int) -> dict[str, int]:
    """The children of a process, by their name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int(_stat(int(entry.name))[1]) == pid:
                    found[(entry / "comm").read_text().strip()] = int(entry.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _stat(pid: int) -> list[str]:
    """State, parent and so on of a process: what stands behind its name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def python(folder: Path, *command: str | Path) -> "subprocess.CompletedProcess[str]":
    """Runs this Python in a folder to its end."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )

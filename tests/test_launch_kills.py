"""A hundred runs whose launcher, helpers or ranks are hit by a signal at a random moment: nothing is left."""

import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import is_gone, wait_until

from samestep.world import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

BATCHES, RUNS, AT_ONCE = 10, 10, 4
LIMIT_S = 60.0
MARK = "SAMESTEP_TEST_MARK"
# Started by name where the launcher has them; workers have a name, or else are known by their rank.
AGENT, ZYGOTE, GUARD, WORKER = "agent", "samestep-zygote", "samestep-guard", "worker"

# Writes lines for ever, has a child and an open temporary file; a stubborn one ignores what it is told.
SCRIPT = """
import os, select, signal, subprocess, sys, tempfile
rank = int(os.environ["RANK"])
if "stubborn" in sys.argv and rank == 0:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
tempfile.tempdir = os.environ["TMPDIR"]  # else Python tries the folder with a file that a kill may leave behind
kept = tempfile.TemporaryFile()
child = subprocess.Popen(["sleep", "100000"])
number = 0
while True:
    number += 1
    os.write(1 + number % 2, b"line %d\\n" % number)
    select.select([], [], [], 0.002)
"""
# Never reached, but seen by who loads beforehand what a script will want; that takes seconds.
WANTS_TORCH = "import torch\n"


@dataclass(frozen=True)
class Blow:
    """Who is hit by which signals, one after the other; what must have happened before, and how long after that.

    `lines` of output have been read, and so many `processes` of the run are there.
    """

    target: str
    signals: tuple[signal.Signals, ...]
    lines: int
    processes: int
    then_s: float
    rank: int = 0
    stubborn: bool = False  # rank 0 ignores what it is told
    again: bool = False  # the launcher is killed while it ends
    loads: bool = False  # the script wants torch, and the blow may fall while it is loaded


def draw(chance: random.Random) -> Blow:
    target = chance.choices((AGENT, WORKER, GUARD, ZYGOTE), (45, 30, 10, 15))[0]
    ways = [(s,) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)]
    signals = chance.choice([*ways, (signal.SIGSTOP, signal.SIGKILL)])
    early, stubborn, loads = chance.random() < 0.4, chance.random() < 0.2, chance.random() < 0.08
    if loads:
        target, early = chance.choice((AGENT, ZYGOTE)), True
    return Blow(
        target,
        signals,
        lines=0 if early else chance.randrange(1, 200),
        processes=chance.randrange(1, 4 if loads else 7) if early else 1,
        then_s=chance.choice((0.0, chance.random() * 0.05)),
        rank=1 if stubborn else chance.randrange(2),
        stubborn=stubborn,
        again=target == AGENT and len(signals) == 1 and chance.random() < 0.3,
        loads=loads,
    )


def test_what_is_drawn_covers_everybody_and_every_signal() -> None:
    blows = [draw(random.Random(f"{batch}.{run}")) for batch in range(BATCHES) for run in range(RUNS)]
    hits = {(blow.target, blow.signals) for blow in blows}
    assert len(blows) == 100
    assert {target for target, _ in hits} == {AGENT, WORKER, GUARD, ZYGOTE}
    assert {blow.target for blow in blows if blow.loads} == {AGENT, ZYGOTE}
    for target in (AGENT, WORKER):
        assert len({signals for who, signals in hits if who == target}) == 6


# ---- one run


class Launch:
    """One `samestep run` whose processes all carry a mark in their environment, in a folder of its own."""

    def __init__(self, folder: Path, blow: Blow) -> None:
        self.mark = uuid.uuid4().hex
        self.work, self.temporary = folder / "work", folder / "temporary"
        self.work.mkdir(parents=True)
        self.temporary.mkdir()
        (self.work / "script.py").write_text(SCRIPT + WANTS_TORCH * blow.loads)
        arguments = ["stubborn"] if blow.stubborn else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "samestep", "run", "--nproc-per-node", "2", "--shutdown-timeout", "0.5",
             "script.py", *arguments],
            cwd=self.work,
            env={**environment(), MARK: self.mark, "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        os.set_blocking(self._fd, False)
        self.output = b""
        self.num_lines = 0
        self._is_open = True

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        """Kills by id what a failed test has left."""
        self.process.kill()
        for pid in self.pids():
            hit(pid, signal.SIGKILL, lambda pid: pid in self.pids())
        self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def read(self, timeout_s: float) -> None:
        """Takes output for that long, or until some came."""
        if not self._is_open:
            select.select([], [], [], timeout_s)
        elif select.select([self._fd], [], [], timeout_s)[0]:
            data = os.read(self._fd, 1 << 16)
            self._is_open = bool(data)
            self.num_lines += data.count(b"\n")
            self.output = (self.output + data)[-4000:]

    def read_until(self, condition: Callable[[], bool], what: str) -> None:
        """Takes output until a condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            self.read(0.02)

    def pids(self) -> list[int]:
        """All living processes that carry the mark."""
        wanted = f"{MARK}={self.mark}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if wanted in environ_of(pid)]

    def find(self, target: str, rank: int) -> int | None:
        """The process to hit, if it is there."""
        if target == AGENT:
            return self.process.pid
        for pid in self.pids():
            name = name_of(pid)
            is_rank = name == f"samestep-r{rank}" or (b"RANK=%d" % rank in environ_of(pid) and leads_session(pid))
            if is_rank if target == WORKER else name == target:
                return pid
        return None

    def has_ended(self) -> bool:
        return self.process.poll() is not None


def environ_of(pid: int) -> list[bytes]:
    """The variables that a process was started with; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def hit(pid: int, signum: int, is_still: Callable[[int], bool]) -> None:
    """Signals a process, and nobody who got its number meanwhile."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_still(pid):
            signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def is_stopped_or_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


def strike(launch: Launch, blow: Blow) -> str:
    """Waits for the moment and delivers the blow; returns who was hit."""
    launch.read_until(lambda: launch.num_lines >= blow.lines or launch.has_ended(), "lines")
    launch.read_until(lambda: len(launch.pids()) >= blow.processes or launch.has_ended(), "processes")
    target = blow.target
    if target == ZYGOTE:
        # It is there before any rank; where ranks are without one, the launcher itself takes the blow.
        launch.read_until(
            lambda: any(launch.find(who, 0) for who in (ZYGOTE, WORKER)) or launch.has_ended(), "a zygote or a rank"
        )
        target = ZYGOTE if launch.find(ZYGOTE, 0) else AGENT
    launch.read_until(lambda: launch.find(target, blow.rank) is not None or launch.has_ended(), target)
    assert not launch.has_ended(), "the launcher ended before it was hit"
    pid = launch.find(target, blow.rank)
    assert pid is not None
    end = time.monotonic() + blow.then_s
    while (rest := end - time.monotonic()) > 0:
        launch.read(rest)
    for signum in blow.signals:
        hit(pid, signum, lambda pid: pid in launch.pids())
        if signum == signal.SIGSTOP:
            launch.read_until(lambda: is_stopped_or_gone(pid), "the process to stop")
    if target in (GUARD, ZYGOTE):  # a run may go on without them
        if signal.SIGKILL in blow.signals:
            launch.read_until(lambda: is_gone(pid), "the killed process to end")
        launch.process.terminate()
    if blow.again:
        launch.read(blow.then_s)
        launch.process.kill()
    return target


def run_one(folder: Path, blow: Blow) -> str | None:
    """Returns what was wrong, or None."""
    with Launch(folder, blow) as launch:
        try:
            target = strike(launch, blow)
            launch.read_until(launch.has_ended, "the launcher to end")
            assert launch.process.returncode != 0, "the launcher ended well"
            launch.read_until(lambda: not launch.pids(), "the processes to end")
            if target == AGENT and blow.signals[-1] == signal.SIGKILL:
                assert launch.process.returncode == -signal.SIGKILL
            # With the launcher killed, the last one to end clears away.
            launch.read_until(lambda: not os.listdir(launch.temporary), "temporary files to vanish")
            assert os.listdir(launch.work) == ["script.py"]
        except AssertionError as e:
            left = f"{describe(launch.pids())}; {os.listdir(launch.temporary)}; {os.listdir(launch.work)}"
            return f"{blow}: {e}\nleft: {left}\n{launch.output.decode(errors='replace')[-1500:]}"
    return None


def describe(pids: list[int]) -> str:
    return ", ".join(f"{pid} ({name_of(pid)})" for pid in pids) or "nobody"


# ---- a hundred


@pytest.fixture
def no_core_files() -> Iterator[None]:
    """SIGQUIT would leave them."""
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)


@pytest.mark.usefixtures("no_core_files")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_nothing_is_left_after_any_blow(tmp_path: Path, batch: int) -> None:
    blows = [draw(random.Random(f"{batch}.{number}")) for number in range(RUNS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(pool.map(run_one, [tmp_path / str(number) for number in range(RUNS)], blows))
    if any(wrong):
        pytest.fail("\n\n".join(filter(None, wrong)), pytrace=False)


def test_the_mark_finds_processes_that_left_their_session(tmp_path: Path) -> None:
    blow = Blow(AGENT, (signal.SIGTERM,), 0, 1, 0.0)
    with Launch(tmp_path, blow) as launch:
        launch.read_until(lambda: launch.num_lines > 0, "a line")
        stray = subprocess.Popen(["sleep", "1000"], env={MARK: launch.mark}, start_new_session=True)
        wait_until(lambda: stray.pid in launch.pids())
        launch.process.terminate()
        launch.read_until(lambda: launch.pids() == [stray.pid], "the launcher's own to end")
        stray.kill()
        stray.wait(LIMIT_S)
        assert launch.pids() == []

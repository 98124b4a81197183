"""Evidence that the kernel killed a process because memory had run out: in files made up, and from a real kernel."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import wait_until

from samestep.launch.memory import OomEvidence

INITIAL = "pid:[4026531836]"
KILLED = "3,1205,90,-;Out of memory: Killed process {} (python) total-vm:1kB, anon-rss:1kB\n"
IN_GROUP = "3,1206,91,-;Memory cgroup out of memory: Killed process {} (python) total-vm:1kB\n SUBSYSTEM=x\n"
OLD = "3,1207,92,-;Killed process {} (python) total-vm:1kB\n"


class Machine:
    """A made-up /proc, cgroup tree and kernel log."""

    def __init__(self, folder: Path, groups: str, namespace: str = INITIAL) -> None:
        self.proc, self.cgroups, self.log = folder / "proc", folder / "cgroup", folder / "kmsg"
        (self.proc / "self" / "ns").mkdir(parents=True)
        (self.proc / "self" / "ns" / "pid").symlink_to(namespace)
        (self.proc / "self" / "cgroup").write_text(groups)
        self.log.write_text("")

    def count(self, path: str, kills: int) -> None:
        file = self.cgroups / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"low 0\noom {kills}\noom_kill {kills}\noom_group_kill 7\n")

    def say(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text)

    def evidence(self) -> OomEvidence:
        return OomEvidence(proc=str(self.proc), cgroups=str(self.cgroups), kernel_log=str(self.log))


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        ("0::/user/job\n", "user/job/memory.events"),
        ("0::/user/job\n", "memory.events"),  # in a container, where the group is the root
        ("4:memory:/\n0::/user\n", "unified/user/memory.events"),
        ("9:name=systemd:/\n4:cpu,memory:/a:b\n0::/\n", "memory/a:b/memory.oom_control"),
        ("4:memory:/docker/123\n", "memory/memory.oom_control"),
    ],
)
def test_the_counter_of_the_control_group(tmp_path: Path, groups: str, path: str) -> None:
    machine = Machine(tmp_path, groups)
    machine.count(path, 3)
    with machine.evidence() as evidence:
        assert evidence.was_killed(12) is None
        machine.count(path, 4)
        said = evidence.was_killed(12)
        assert said is not None
        assert said.startswith("probably out of memory: the kernel killed for that in this control group")


@pytest.mark.parametrize("line", [KILLED, IN_GROUP, OLD])
def test_the_kernels_log(tmp_path: Path, line: str) -> None:
    machine = Machine(tmp_path, "")
    machine.say(line.format(11))  # of earlier times
    with machine.evidence() as evidence:
        machine.say("6,1,2,-;eth0: link up\n")
        assert evidence.was_killed(12) is None
        machine.say(line.format(12))
        said = evidence.was_killed(12)
        assert said is not None
        assert said.startswith("probably out of memory: the kernel's log says")
        assert evidence.was_killed(12) == said
        assert evidence.was_killed(1) is None
        assert evidence.was_killed(11) is None


@pytest.mark.parametrize(
    "line",
    [
        "14,5,6,-;Out of memory: Killed process 12 (python)\n",  # by a program that writes to the log
        "6,5,6,-;python: nobody has Killed process 12 (python)\n",
        "3,5,6,-;Out of memory: Killed process 123 (python)\n",
    ],
)
def test_what_is_no_evidence(tmp_path: Path, line: str) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.count("memory.events", 0)
    with machine.evidence() as evidence:
        machine.say(line)
        assert evidence.was_killed(12) is None


def test_the_log_of_other_process_numbers_is_not_believed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "", namespace="pid:[4026532001]")
    with machine.evidence() as evidence:
        machine.say(KILLED.format(12))
        assert evidence.was_killed(12) is None


def test_nothing_there_means_no_evidence(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    with OomEvidence(proc=nowhere, cgroups=nowhere, kernel_log=nowhere) as evidence:
        assert evidence.was_killed(12) is None
    machine = Machine(
        tmp_path, "no colons\n0:\n\udcff\n0::/gone\n".encode("utf-8", "surrogateescape").decode("latin-1")
    )
    (machine.cgroups / "memory.events").mkdir(parents=True)
    with machine.evidence() as evidence:
        assert evidence.was_killed(12) is None


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "\xff"])
def test_counters_that_make_no_sense(tmp_path: Path, text: str) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.count("memory.events", 0)
    with machine.evidence() as evidence:
        (machine.cgroups / "memory.events").write_text(text, "latin-1")
        assert evidence.was_killed(12) is None


def test_a_log_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "")
    machine.log.unlink()
    os.mkfifo(machine.log)
    with machine.evidence() as evidence:
        assert evidence.was_killed(12) is None


def test_closed_twice_is_closed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "")
    with machine.evidence() as evidence:
        evidence.close()
        assert evidence.was_killed(12) is None


# ---- a real kernel


def test_this_machine_has_killed_nobody_for_this_test() -> None:
    with OomEvidence() as evidence:
        process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
        process.kill()
        process.wait(60)
        assert evidence.was_killed(process.pid) in (None, evidence.was_killed(os.getpid()))


LIMITED = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from samestep.launch.memory import OomEvidence

def end(hungry):
    pid = os.fork()
    if pid == 0:
        eaten = []
        while hungry:
            eaten.append(b"x" * (1 << 20))
        os.kill(os.getpid(), 9)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    return pid

for options in ({}, {"kernel_log": "/nowhere"}, {"cgroups": "/nowhere"}):
    with OomEvidence(**options) as evidence:
        print(evidence.was_killed(end(hungry=False)))
        print(evidence.was_killed(end(hungry=True)))
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group below this process's own with 64 MiB of memory, or the reason why there can't be one."""
    own = {rest.partition(":")[0]: rest.partition(":")[2] for rest in map(str.strip, _own_groups())}
    version_1 = "memory" in own
    root = Path("/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup")
    group = root / own.get("memory", own.get("", "/")).lstrip("/") / f"samestep-test-{os.getpid()}"
    limits = {"memory.limit_in_bytes": "64M"} if version_1 else {"memory.max": "64M", "memory.swap.max": "0"}
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made here: {e}")
    try:
        try:
            for name, value in limits.items():
                (group / name).write_text(value)
        except OSError as e:
            pytest.skip(f"a control group's memory can't be limited here: {e}")
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def _own_groups() -> list[str]:
    """Of each hierarchy "controllers:path"."""
    return [line.partition(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]


def test_a_real_kill(small_group: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(small_group)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    by_hand, hungry, by_hand_2, counted, by_hand_3, logged = ended.stdout.splitlines()
    assert (by_hand, by_hand_2, by_hand_3) == ("None",) * 3
    assert "probably out of memory: the kernel" in hungry
    assert "in this control group" in counted
    log_says = "the kernel's log says" in logged
    assert log_says or logged == "None"  # not everybody may read it
    assert ("log" in hungry) == log_says

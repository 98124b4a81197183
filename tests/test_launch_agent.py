"""`samestep run` with real processes: what ranks get, what comes out, how it ends, and that nobody is left."""

import json
import os
import re
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
from launching import Run, guard_of, is_gone, wait_until

from samestep.errors import LaunchError
from samestep.launch import agent
from samestep.launch.agent import watch
from samestep.launch.ending import exit_code
from samestep.launch.failures import report
from samestep.launch.guard import Guard
from samestep.launch.spec import LaunchSpec, worker_environment
from samestep.world import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

TWO = ("--nproc-per-node", "2")


# ---- what ranks get and give


def test_ranks_get_their_environment_and_nothing_else(tmp_path: Path) -> None:
    text = """
import json
note(f"seen-{rank}", json.dumps([dict(os.environ), sys.argv, sys.path[0], os.readlink("/proc/self/fd/0"),
    sorted(map(int, os.listdir("/proc/self/fd")))[:-1], os.getpid() == os.getsid(0) == os.getpgid(0)]))
"""
    with Run(tmp_path, text, *TWO) as run:
        assert run.wait() == 0
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2)]
    port = int(seen[0][0]["MASTER_PORT"])
    spec = LaunchSpec(("python",), 2, environment(), len(os.sched_getaffinity(0)), master_port=port)
    for rank in range(2):
        expected = {**worker_environment(spec, rank), "PWD": seen[rank][0].get("PWD")}
        assert {k: v for k, v in seen[rank][0].items() if k != "LC_CTYPE"} == {
            k: v for k, v in expected.items() if v is not None and k != "LC_CTYPE"
        }
        script = str(tmp_path / "script.py")
        assert seen[rank][1:4] == [[script], str(tmp_path), os.devnull]
        assert seen[rank][4][:3] == [0, 1, 2]
        assert len(seen[rank][4]) == 4, "the pipe for what it has to tell, and nothing else"
        assert seen[rank][5]


@pytest.mark.parametrize(
    ("text", "code", "last", "trace"),
    [
        ("if rank: sys.exit(7)", 7, "failed first: it exited with code 7", ""),
        ("if rank: os.kill(os.getpid(), signal.SIGKILL)", 137, "failed first: it was killed by SIGKILL", ""),
        (
            "if rank: os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            "failed first: it was killed by SIGSEGV:",
            "Segmentation",
        ),
        ("if rank: raise KeyError('lost')", 1, "failed first: it exited with code 1:", "KeyError: 'lost'"),
        ("if rank: os.abort()", 134, "failed first: it was killed by SIGABRT:", "script.py"),
    ],
)
def test_the_exit_code_is_the_failing_ranks(tmp_path: Path, text: str, code: int, last: str, trace: str) -> None:
    with Run(tmp_path, text, *TWO) as run:
        assert run.wait() == code
    lines = run.lines(run.err)
    (place,) = [n for n, line in enumerate(lines) if "failed first" in line]
    assert re.fullmatch(rf"samestep: rank \d \(pid \d+ on \S+\) {re.escape(last)}", lines[place])
    assert trace in "\n".join(lines[place + 1 :])
    assert bool(lines[place + 1 :]) == bool(trace)
    assert run.lines(run.out) == []


def test_a_failing_rank_ends_one_that_waits_for_ever(tmp_path: Path) -> None:
    text = """
if rank == 0:
    child("import signal", "signal.pause()")
    note("ready")
    forever()
wait_for("ready")
sys.exit("no more")
"""
    with Run(tmp_path, text, *TWO, "--shutdown-timeout", "1000") as run:
        assert run.wait() == 1
        run.assert_nobody_is_left(3)
    *_, before, last, told = run.lines(run.err)
    assert before == "samestep: rank 0 was ended by the launcher (SIGTERM)"
    assert "rank 1 (pid" in last
    assert told == "SystemExit: no more"
    assert "[1] no more" in run.lines(run.err)


def test_who_does_not_end_when_told_is_killed(tmp_path: Path) -> None:
    text = """
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: note("told"))
    note("ready")
    forever()
wait_for("ready")
os._exit(9)
"""
    with Run(tmp_path, text, *TWO, "--shutdown-timeout", "0.3") as run:
        assert run.wait() == 9
        run.assert_nobody_is_left(2)
    assert (tmp_path / "told").exists()
    assert run.lines(run.err)[-2] == "samestep: rank 0 was killed by the launcher (SIGKILL)"


def test_the_end_of_a_rank_is_the_end_of_its_children(tmp_path: Path) -> None:
    text = """
child("import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.pause()")
print("done")
"""
    with Run(tmp_path, text, *TWO) as run:
        assert run.wait() == 0
        run.assert_nobody_is_left(4)
    assert sorted(run.lines(run.out)) == ["[0] done", "[1] done"]


def test_a_process_that_left_its_group_does_not_hold_the_launcher_up(tmp_path: Path) -> None:
    with Run(tmp_path, 'child("import os, signal", "os.setsid()", "open(\'away\', \'w\')", "signal.pause()")\n'
             'wait_for("away")\nprint("done")') as run:  # fmt: skip
        assert run.wait() == 0
        assert run.lines(run.out) == ["[0] done"]
        assert not is_gone(int((tmp_path / "child-0").read_text()))  # not ours to kill


# ---- signals

WAITING = """
def told(signum, frame):
    note(f"told-{rank}", signum)
    if not os.path.exists("stay"):
        sys.exit(0)
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, told)
child("import signal, os", "f = lambda *_: open('child-was-told', 'w')", "signal.signal(signal.SIGINT, f)",
    "signal.signal(signal.SIGTERM, f)", "signal.signal(signal.SIGHUP, f)", f"open('up-{rank}', 'w')",
    "[signal.pause() for _ in iter(int, 1)]")
wait_for(f"up-{rank}")
note(f"ready-{rank}")
forever()
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_reach_the_ranks_only_and_nobody_is_left(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    with Run(tmp_path, WAITING, *TWO) as run:
        run.wait_for("ready-0", "ready-1")
        run.process.send_signal(signum)
        assert run.wait() == code
        run.assert_nobody_is_left(4)
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == [str(int(signum))] * 2
    assert not (tmp_path / "child-was-told").exists()
    assert run.lines(run.err) == [f"samestep: ended by {signum.name}"]


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    (tmp_path / "stay").touch()
    with Run(tmp_path, WAITING, *TWO, "--shutdown-timeout", "1000") as run:
        run.wait_for("ready-0", "ready-1")
        run.process.send_signal(signal.SIGINT)
        run.wait_for("told-0", "told-1")

        def gone_or_pressed_again() -> bool:
            if all(map(is_gone, run.noted_pids())):
                return True
            run.process.send_signal(signal.SIGINT)
            return False

        wait_until(gone_or_pressed_again)
        assert run.wait() == 130
        run.assert_nobody_is_left(4)
    assert run.lines(run.err)[-2] == "samestep: ranks 0, 1 were killed by the launcher (SIGKILL)"


@pytest.mark.parametrize("told_first", [False, True])
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path, told_first: bool) -> None:
    (tmp_path / "stay").touch()
    with Run(tmp_path, WAITING, *TWO) as run:
        run.wait_for("ready-0", "ready-1")
        guard = guard_of(run.process.pid)
        if told_first:
            run.process.send_signal(signal.SIGTERM)
            run.wait_for("told-0", "told-1")
        run.process.kill()
        assert run.wait() == -signal.SIGKILL
        run.assert_nobody_is_left(4)
        wait_until(lambda: is_gone(guard))


def test_ranks_die_with_the_launcher_even_if_its_guard_died_before(tmp_path: Path) -> None:
    with Run(tmp_path, WAITING, *TWO) as run:
        run.wait_for("ready-0", "ready-1")
        guard = guard_of(run.process.pid)
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: is_gone(guard))
        run.process.kill()
        wait_until(lambda: all(is_gone(int((tmp_path / f"rank-{rank}").read_text())) for rank in range(2)))


def test_a_run_does_without_a_guard_that_was_killed(tmp_path: Path) -> None:
    with Run(tmp_path, WAITING, *TWO) as run:
        run.wait_for("ready-0", "ready-1")
        guard = guard_of(run.process.pid)
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: is_gone(guard))
        run.process.terminate()
        assert run.wait() == 143
        run.assert_nobody_is_left(4)


def test_nohup_is_respected(tmp_path: Path) -> None:
    text = 'note("ready")\nwait_for("go")'
    with Run(tmp_path, text, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as run:
        run.wait_for("ready")
        run.process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert run.wait() == 0


def test_exit_codes_are_known_even_where_children_are_ignored(tmp_path: Path) -> None:
    with Run(tmp_path, "sys.exit(7)", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)) as run:
        assert run.wait() == 7


# ---- torch


def test_ranks_meet_at_the_reserved_port(tmp_path: Path) -> None:
    text = """
import errno, socket, torch
import torch.distributed as dist
port = int(os.environ["MASTER_PORT"])
with socket.socket() as stranger:
    try:
        stranger.bind(("127.0.0.1", port))
    except OSError as e:
        assert e.errno == errno.EADDRINUSE
    else:
        sys.exit("a stranger got the port")
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("sum", total.item())
dist.destroy_process_group()
"""
    with Run(tmp_path, text, *TWO) as run:
        assert run.wait() == 0, run.err.read_text()
    assert sorted(run.lines(run.out)) == ["[0] sum 3.0", "[1] sum 3.0"]


# ---- inside this process


def spec_of(code: str, nproc: int = 2, **changes: object) -> LaunchSpec:
    command = (sys.executable, "-S", "-c", code)
    return LaunchSpec(command, nproc, {**environment(), "OMP_NUM_THREADS": "1"}, 2, **changes)  # type: ignore[arg-type]


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


# Python 3.12 and newer warn of any fork while another thread runs, such as pytest's own for time limits.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
class TestInProcess:
    @pytest.fixture(autouse=True)
    def _nothing_is_left(self) -> object:
        before = open_descriptors()
        handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
        yield
        assert open_descriptors() == before
        assert signal.set_wakeup_fd(-1) == -1
        after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
        assert after == handlers  # that no process is left is looked at after every test, see conftest.py

    @pytest.fixture
    def fd(self, tmp_path: Path) -> object:
        with (tmp_path / "both").open("wb") as both:
            yield both.fileno()

    @pytest.mark.parametrize("has_pidfd", [True, False])
    def test_a_run(self, tmp_path: Path, fd: int, has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not has_pidfd:
            monkeypatch.delattr(os, "pidfd_open")
        assert watch(spec_of("import os; print(os.environ['RANK'])"), stdout=fd, stderr=fd).cause is None
        assert sorted((tmp_path / "both").read_text().splitlines()) == ["[0] 0", "[1] 1"]

    def test_workers_start_without_a_guard(self, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def killed_guard() -> Guard:
            guard = Guard()
            pid = guard_of(os.getpid())
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_gone(pid))
            return guard

        monkeypatch.setattr(agent, "Guard", killed_guard)
        assert watch(spec_of("pass"), stdout=fd, stderr=fd).cause is None

    def test_a_signal_to_this_process(self, fd: int) -> None:
        code = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
        state = watch(spec_of(code, nproc=1), stdout=fd, stderr=fd)
        assert exit_code(state) == 143
        assert report(state).lines == ("ended by SIGTERM",)

    def test_what_can_not_be_started(self, tmp_path: Path, fd: int) -> None:
        spec = LaunchSpec((str(tmp_path / "nothere"),), 2, {}, 2)
        with pytest.raises(LaunchError, match=r"rank 0 of 2 could not be started: .*nothere"):
            watch(spec, stdout=fd, stderr=fd)

    def test_started_workers_are_cleared_away_when_one_can_not_start(self, tmp_path: Path, fd: int) -> None:
        spec = spec_of(f"import os, signal; open({str(tmp_path)!r} + '/up', 'w'); signal.pause()", nproc=40)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_descriptors()) + 30, hard))
        try:
            with pytest.raises(LaunchError, match=r"rank \d of 40 could not be started: .*Too many open files"):
                watch(spec, stdout=fd, stderr=fd)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_closed_output(self) -> None:
        with pytest.raises(LaunchError, match=r"stdout .*is not open"):
            watch(spec_of("pass"), stdout=9999, stderr=2)

    def test_another_thread_is_refused(self, fd: int) -> None:
        errors: list[BaseException] = []

        def try_it() -> None:
            try:
                watch(spec_of("pass"), stdout=fd, stderr=fd)
            except LaunchError as e:
                errors.append(e)

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join(60)
        assert len(errors) == 1
        assert "main thread" in str(errors[0])

"""The launcher's pure decisions: what each worker gets, how a run ends, and what is told about it."""

import errno
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.launch.ending import (
    Exit,
    Interrupt,
    OutputLost,
    State,
    exit_code,
    exited,
    interrupted,
    output_lost,
    timed,
)
from samestep.launch.failures import Report, report, signal_name
from samestep.launch.logs import Terminal
from samestep.launch.program import module_command, script_command
from samestep.launch.spec import LaunchSpec, thread_note, worker_environment

SPEC = LaunchSpec(("python", "train.py"), 2, {"HOME": "/home/me"}, cores=8, master_port=12345)
TERM, KILL, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGINT


# ---- environment


def test_a_worker_gets_every_variable_of_torchrun() -> None:
    assert worker_environment(SPEC, 1) == {
        "HOME": "/home/me",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "12345",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "4",
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }


def test_the_users_settings_stay_and_stale_ranks_go() -> None:
    theirs = {
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    stale = {"RANK": "7", "WORLD_SIZE": "9", "GROUP_RANK": "4", "TORCHELASTIC_ERROR_FILE": "/tmp/e.json"}
    spec = replace(SPEC, environment={**theirs, **stale})
    environment = worker_environment(spec, 0)
    assert {name: environment[name] for name in theirs} == theirs
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["GROUP_RANK"]) == ("0", "2", "0")
    assert "TORCHELASTIC_ERROR_FILE" not in environment
    assert spec.environment["RANK"] == "7"  # the launcher's own is not touched
    assert thread_note(spec) is None


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_cores_are_divided_by_workers(cores: int, workers: int, threads: int) -> None:
    spec = replace(SPEC, cores=cores, nproc_per_node=workers)
    assert worker_environment(spec, 0)["OMP_NUM_THREADS"] == str(threads)
    note = f"OMP_NUM_THREADS={threads} per worker (workers: {workers}, usable cores: {cores})"
    assert thread_note(spec) == note


@pytest.mark.parametrize(("prefix", "columns"), [(True, "76"), (False, "80")])
def test_rank_0_may_draw_on_a_terminal(prefix: bool, columns: str) -> None:
    spec = replace(SPEC, terminal=Terminal(80, 24), prefix=prefix)
    added = set(worker_environment(spec, 0).items()) - set(worker_environment(SPEC, 0).items())
    assert added == {("TTY_COMPATIBLE", "1"), ("TTY_INTERACTIVE", "1"), ("COLUMNS", columns), ("LINES", "24")}
    assert worker_environment(spec, 1) == worker_environment(SPEC, 1)
    unwanted = replace(spec, environment={"TTY_COMPATIBLE": "0"})
    assert worker_environment(unwanted, 0)["TTY_COMPATIBLE"] == "0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": ()}, "command is empty"),
        ({"nproc_per_node": 0}, "nproc_per_node is 0; expected at least 1"),
        ({"cores": 0}, "cores is 0"),
        ({"master_addr": ""}, "master_addr is empty"),
        ({"master_port": -1}, "master_port is -1"),
        ({"master_port": 65536}, "master_port is 65536"),
        ({"shutdown_timeout_s": -0.1}, "shutdown_timeout_s is -0.1"),
        ({"shutdown_timeout_s": float("inf")}, "shutdown_timeout_s is inf"),
        ({"shutdown_timeout_s": float("nan")}, "shutdown_timeout_s is nan"),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)  # type: ignore[arg-type]


# ---- what to run


def test_what_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "-odd.py", "folder/__main__.py", "package/__init__.py", "package/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('found, so this must not run')")
    assert script_command("train.py", ["--a", "1"]) == (sys.executable, "train.py", "--a", "1")
    assert script_command("-odd.py") == (sys.executable, "./-odd.py")
    assert script_command("folder") == (sys.executable, "folder")
    assert module_command("train", ["-x"]) == (sys.executable, "-m", "train", "-x")
    assert module_command("package.inner") == (sys.executable, "-m", "package.inner")
    assert module_command("timeit") == (sys.executable, "-m", "timeit")


@pytest.mark.parametrize("module", ["nothere", "package.nothere", "train.deeper", "package", "a..b", ".a", ""])
def test_modules_that_can_not_be_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/__init__.py"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"module '{module}' (can't be found|is a package without)"):
        module_command(module)


def test_scripts_that_can_not_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"'no.py' does not exist in {tmp_path}"):
        script_command("no.py")
    with pytest.raises(ValueError, match=r"is a directory without a __main__\.py"):
        script_command(str(tmp_path))
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(ValueError, match=r"'mine.py' can't be read"):
        script_command("mine.py")


# ---- how a run ends

THREE = State(frozenset({0, 1, 2}), patience_s=30.0)


def ended(rank: int, returncode: int, told: int | None = None) -> Exit:
    return Exit(rank, 100 + rank, returncode, told)


def test_a_good_end() -> None:
    state, signum = exited(THREE, [ended(1, 0)], now=5)
    assert (state.living, state.cause, signum) == (frozenset({0, 2}), None, None)
    state, signum = exited(state, [ended(0, 0), ended(2, 0)], now=6)
    assert (state.living, signum, exit_code(state), report(state)) == (frozenset(), None, 0, Report())
    assert timed(state, now=1e9) == (state, None)


def test_the_first_failure_ends_the_others_and_is_told_last() -> None:
    state, signum = exited(THREE, [ended(1, 3)], now=5)
    assert (signum, state.deadline, state.living) == (TERM, 35, frozenset({0, 2}))
    assert timed(state, now=34.9) == (state, None)
    state, signum = exited(state, [ended(0, 1, told=TERM)], now=6)
    assert signum is None
    state, signum = timed(state, now=35)
    assert signum == KILL
    assert timed(state, now=36) == (state, None)
    state, _ = exited(state, [ended(2, -KILL, told=KILL)], now=36)
    assert exit_code(state) == 3
    assert list(report(state).lines) == [
        "rank 2 was killed by the launcher (SIGKILL)",
        "rank 0 (pid 100) exited with code 1, after rank 1 had failed",
        "rank 1 (pid 101) failed first: it exited with code 3",
    ]


def test_a_death_by_signal_is_the_cause_of_failures_seen_together() -> None:
    state, signum = exited(THREE, [ended(0, 1), ended(2, -KILL), ended(1, 0)], now=5)
    assert (signum, exit_code(state)) == (None, 137)
    assert list(report(state).lines) == [
        "rank 0 (pid 100) exited with code 1, after rank 2 had failed",
        "rank 2 (pid 102) failed first: it was killed by SIGKILL",
    ]


def test_ranks_that_obeyed_share_a_line() -> None:
    state, _ = exited(THREE, [ended(1, -signal.SIGSEGV)], now=5)
    state, _ = exited(state, [ended(2, -TERM, told=TERM), ended(0, 143, told=TERM)], now=6)
    assert list(report(state).lines) == [
        "ranks 0, 2 were ended by the launcher (SIGTERM)",
        "rank 1 (pid 101) failed first: it was killed by SIGSEGV",
    ]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_passed_on(signum: signal.Signals, code: int) -> None:
    state, sent = interrupted(THREE, signum, now=5)
    assert (sent, state.deadline, state.cause) == (signum, 35, Interrupt(signum))
    state, sent = exited(state, [ended(0, -signum, told=signum), ended(1, 0, told=signum)], now=6)
    assert sent is None
    state, _ = exited(state, [ended(2, 7, told=signum)], now=7)
    assert exit_code(state) == code
    assert list(report(state).lines) == [
        f"rank 2 (pid 102) exited with code 7, after {signum.name}",
        f"ended by {signum.name}",
    ]


def test_a_second_ctrl_c_kills_at_once_but_one_press_seen_twice_does_not() -> None:
    state, _ = interrupted(THREE, INT, now=5.0)
    for now in (5.01, 5.06, 5.09):
        state, signum = interrupted(state, INT, now)
        assert signum is None
    state, signum = interrupted(state, INT, now=5.11)  # a key that is held down counts too
    assert signum == KILL
    assert interrupted(state, INT, now=6.0)[1] is None  # all that can be done has been done
    state, _ = exited(state, [ended(rank, -KILL, told=KILL) for rank in range(3)], now=6.1)
    assert list(report(state).lines) == ["ranks 0, 1, 2 were killed by the launcher (SIGKILL)", "ended by SIGINT"]


@pytest.mark.parametrize("first", [TERM, "failure"])
def test_ctrl_c_ends_the_patience(first: object) -> None:
    state, _ = interrupted(THREE, TERM, now=5) if first == TERM else exited(THREE, [ended(0, 1)], now=5)
    assert interrupted(state, INT, now=6)[1] == KILL


def test_another_sigterm_is_passed_on_without_more_patience() -> None:
    state, _ = interrupted(THREE, TERM, now=5)
    state, signum = interrupted(state, TERM, now=20)
    assert (signum, state.deadline) == (TERM, 35)


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 141), (errno.ENOSPC, 1)])
def test_output_that_nobody_takes_ends_the_run(number: int, code: int) -> None:
    lost = OutputLost("stdout", number)
    state, signum = output_lost(THREE, lost, now=5)
    assert (signum, state.deadline) == (TERM, 35)
    assert output_lost(state, lost, now=6) == (state, None)
    assert exit_code(state) == code
    assert list(report(state).lines) == [f"stdout can't be written to ({os.strerror(number)}), so the run was ended"]


def test_a_failure_before_the_signal_stays_the_cause() -> None:
    state, _ = exited(THREE, [ended(0, 4)], now=5)
    state, _ = interrupted(state, TERM, now=6)
    assert exit_code(state) == 4


@pytest.mark.parametrize(("signum", "name"), [(9, "SIGKILL"), (signal.SIGRTMIN + 3, "signal 37")])
def test_signal_names(signum: int, name: str) -> None:
    assert signal_name(signum) == name

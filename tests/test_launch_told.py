"""What ranks tell of their failures, and what becomes of it: which failure was the first, and what stands last."""

import signal
from dataclasses import replace

import pytest

from samestep.launch.ending import Elsewhere, Exit, Interrupt, State, ended_elsewhere, exit_code, exited, interrupted
from samestep.launch.failures import Report, report
from samestep.launch.spec import LaunchSpec, Place, shared_environment, worker_command, worker_environment
from samestep.launch.told import NOTHING_TOLD, Told, from_bytes, record

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nKeyError: 3\n'
CRASH = 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 1\n'
THREE = State(frozenset({0, 1, 2}), patience_s=30.0)


# ---- the pipe


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", NOTHING_TOLD),
        (record(TRACE, 12.5), Told(TRACE, 12.5)),
        (CRASH.encode(), Told(CRASH)),
        (record(TRACE, 12.5) + CRASH.encode(), Told(TRACE + CRASH, 12.5)),
        (CRASH.encode() + record(TRACE, 12.5), Told(TRACE + CRASH, 12.5)),
        (b"\x1e12", Told("")),
        (record("a\x1eb", 1.0), Told("a?b", 1.0)),
        (b"\xff", Told("\ufffd")),
    ],
)
def test_what_was_told_is_understood(data: bytes, told: Told) -> None:
    found = from_bytes(data)
    assert (found.text, found.when) == (told.text, told.when if told.text else found.when)


def test_a_record_never_fills_the_pipe() -> None:
    told = from_bytes(record("x" * 10**6 + "\nend", 1.0))
    assert len(told.text) < 1 << 16
    assert told.text.startswith("xxx")
    assert told.text.endswith("xxx\nend")


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (NOTHING_TOLD, ""),
        (Told(TRACE, 1.0), "KeyError: 3"),
        (Told(TRACE.replace("3\n", "several\nlines\n"), 1.0), "KeyError: several"),
        (Told(TRACE + "\nDuring handling of this, another occurred:\n\n" + TRACE.replace("Key", "Value"), 1.0),
         "ValueError: 3"),
        (Told("SystemExit: no data\n", 1.0), "SystemExit: no data"),
        (Told(CRASH), "Fatal Python error: Aborted"),
    ],
)  # fmt: skip
def test_one_line_says_what_it_was(told: Told, line: str) -> None:
    assert told.summary == line


# ---- who was first


def failed(rank: int, when: float | None = None, returncode: int = 1, **changes: object) -> Exit:
    told = NOTHING_TOLD if when is None else Told(TRACE.replace("3", str(rank)), when)
    return replace(Exit(rank, 100 + rank, returncode, report=told), **changes)  # type: ignore[arg-type]


def first_of(*turns: list[Exit]) -> int:
    state = THREE
    for now, exits in enumerate(turns):
        state, _ = exited(state, exits, now)
    assert isinstance(state.cause, Exit)
    return state.cause.rank


def test_the_first_exception_counts_though_its_rank_ended_later() -> None:
    assert first_of([failed(2, 5.0), failed(0, 5.5)]) == 2
    assert first_of([failed(0, 5.5)], [failed(2, 5.0)]) == 2
    assert first_of([failed(0, 5.0)], [failed(2, 5.5)], [failed(1, 5.1)]) == 0


def test_where_a_time_is_unknown_the_first_to_end_counts() -> None:
    assert first_of([failed(1)], [failed(0)]) == 1
    assert first_of([failed(1)], [failed(0, 3.0)]) == 1
    assert first_of([failed(1, returncode=-9)], [failed(0, 3.0)]) == 1
    assert first_of([failed(1, returncode=-9), failed(0, 3.0)]) == 1, "a death by signal is nobody's consequence"


def test_who_tells_of_a_lost_peer_was_not_the_first() -> None:
    lost = Told("Traceback ...\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1\n", 4.0)
    assert first_of([failed(1, report=lost), failed(0, 5.0)]) == 0
    assert first_of([failed(1, report=lost)], [failed(0, 5.0)]) == 0
    assert first_of([failed(1, report=lost)], [failed(0)]) == 1


def test_who_was_ended_while_an_exception_ended_it_failed_by_the_exception() -> None:
    state, _ = exited(THREE, [failed(1, 5.5)], 0)
    state, _ = exited(state, [failed(0, 5.0, -signal.SIGTERM, told=signal.SIGTERM)], 1)
    assert exit_code(state) == 1
    assert report(state).lines == (
        "rank 1 (pid 101) exited with code 1, after rank 0 had failed: KeyError: 1",
        "rank 0 (pid 100) failed first: it raised an exception:",
    )


def test_consequences_have_a_line_and_the_first_failure_its_traceback() -> None:
    state, _ = exited(THREE, [failed(1, 5.0)], 0)
    state, _ = exited(state, [failed(0, 6.0), failed(2, None, -signal.SIGTERM, told=signal.SIGTERM)], 1)
    assert report(state, "here") == Report(
        (
            "rank 2 was ended by the launcher (SIGTERM)",
            "rank 0 (pid 100) exited with code 1, after rank 1 had failed: KeyError: 0",
            "rank 1 (pid 101 on here) failed first: it exited with code 1:",
        ),
        tuple(TRACE.replace("KeyError: 3", "KeyError: 1").replace("line 3", "line 1").splitlines()),
    )


def test_a_remark_stands_beside_the_signal() -> None:
    state, _ = exited(THREE, [failed(1, None, -signal.SIGKILL, remark="probably out of memory")], 0)
    assert report(state).lines == (
        "rank 1 (pid 101) failed first: it was killed by SIGKILL (probably out of memory)",
    )  # fmt: skip


# ---- other machines


def test_what_happens_elsewhere_ends_the_ranks_here() -> None:
    news = Elsewhere(("node 1 is gone",), 7, ("quoted",))
    state, signum = ended_elsewhere(THREE, news, 5.0)
    assert (signum, state.deadline, exit_code(state)) == (signal.SIGTERM, 35.0, 7)
    exits = [replace(failed(rank, None, -signal.SIGTERM), told=signal.SIGTERM) for rank in range(3)]
    state, _ = exited(state, exits, 6.0)
    assert report(state) == Report(
        ("ranks 0, 1, 2 were ended by the launcher (SIGTERM)", "node 1 is gone"), ("quoted",)
    )
    assert ended_elsewhere(state, Elsewhere(("late",)), 7.0) == (state, None)
    state, _ = interrupted(THREE, signal.SIGINT, 1.0)
    assert ended_elsewhere(state, news, 2.0) == (state, None)
    assert isinstance(state.cause, Interrupt)


def test_ranks_on_the_second_machine() -> None:
    place = Place(node_rank=1, num_nodes=2, first_rank=3, world_size=5, interface="eth7", agent_store=True)
    spec = LaunchSpec(
        ("python", "a.py", "-x"), 2, {}, 4, place=place, attempt=1, max_restarts=2, run_id="run", role="trainer",
        num_script_args=1, local_rank_flag="--local-rank",
    )  # fmt: skip
    found = worker_environment(spec, 1)
    expected = {
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "4",
        "ROLE_WORLD_SIZE": "5",
        "ROLE_NAME": "trainer",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "eth7",
    }
    assert {name: found[name] for name in expected} == expected
    assert worker_command(spec, 1) == ("python", "a.py", "--local-rank=1", "-x")
    shared = shared_environment(spec)
    assert not {"RANK", "LOCAL_RANK", "ROLE_RANK"} & shared.keys()
    assert shared["WORLD_SIZE"] == "5"

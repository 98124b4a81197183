"""What nodes decide from the log that all of them read: pure, no process and no store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from samestep.launch.events import (
    AllDone,
    Event,
    Failed,
    Failure,
    Joining,
    Lost,
    Met,
    Node,
    Refused,
    from_line,
    to_line,
)
from samestep.launch.nodes import MeetingSettings, Member, State, Watch, applied, missing, next_roster, start_due

_FAILURE = Failure(3, "beta", 4711, 1e9, "exited with code 7", 7, "Traceback\nValueError: \u00fc")
_SETTINGS = MeetingSettings("alpha", 29400, "run", 2, 2, 1)


def _member(uid: str, n: int = 2, m: int | None = None, **other: Any) -> Member:
    member = Member(uid, Node(f"host-{uid}", f"10.0.0.{ord(uid) - 96}", "eth0", 2), "run", n, m or n)
    return replace(member, **other)


class _Log:
    """The log, and what each of some nodes makes of it."""

    def __init__(self, *uids: str) -> None:
        self.states = {uid: State(uid) for uid in uids}
        self.told: dict[str, list[Event]] = {uid: [] for uid in uids}

    def add(self, entry: Mapping[str, Any]) -> None:
        for uid, state in self.states.items():
            self.states[uid], events = applied(state, entry)
            self.told[uid] += events
        seen = [replace(state, me="") for state in self.states.values()]
        assert all(state == seen[0] for state in seen), "nodes disagree"

    def join(self, *members: Member) -> None:
        for member in members:
            self.add({"kind": "join", "member": asdict(member)})

    def start(self) -> None:
        (starter,) = [uid for uid, state in self.states.items() if start_due(state, True)]
        self.add({"kind": "start", "round": self.states[starter].round, "store": ["", 29400]})

    def say(self, kind: str, uid: str, after: int = 0, **fields: Any) -> None:
        self.add({"kind": kind, "round": after, "uid": uid, **fields})

    def gone(self, uid: str, reason: str = "no life") -> None:
        self.add({"kind": "gone", "uid": uid, "reason": reason})

    def take(self, uid: str) -> list[Event]:
        told, self.told[uid] = self.told[uid], []
        return told


def _two() -> _Log:
    log = _Log("a", "b")
    log.join(_member("a"), _member("b"))
    log.start()
    for uid in "ab":
        assert [type(event) for event in log.take(uid)] == [Met]
    return log


def _hosts(state: State) -> list[str]:
    return [m.uid for m in next_roster(state)]


def test_all_meet_in_the_same_order_with_the_host_of_the_store_first() -> None:
    log = _Log("a", "b", "c")
    log.join(_member("a", 3), _member("b", 3, holds_store=True))
    assert not any(start_due(state, True) for state in log.states.values())
    log.join(_member("c", 3))
    assert [uid for uid, state in log.states.items() if start_due(state, False)] == ["b"]
    log.start()
    mets = [log.take(uid) for uid in "bac"]
    nodes = tuple(_member(uid).node for uid in "bac")
    assert mets == [[Met(0, rank, nodes, "", 29400)] for rank in range(3)]
    met = mets[1][0]
    assert isinstance(met, Met)
    assert (met.first_rank, met.world_size) == (2, 6)


def test_given_node_ranks_are_honoured() -> None:
    log = _Log("a", "b")
    log.join(_member("a", node_rank=1, holds_store=True), _member("b", node_rank=0))
    assert _hosts(log.states["a"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"node_rank": 1}, {"node_rank": 1}, "--node-rank is 1 on both host-a (10.0.0.1) and host-b (10.0.0.2)"),
        ({"node_rank": 1}, {}, "--node-rank is 1 on host-a (10.0.0.1), but not given on host-b (10.0.0.2)"),
        ({}, {"node_rank": 0}, "--node-rank is 0 on host-b (10.0.0.2), but not given on host-a (10.0.0.1)"),
        ({}, {"run_id": "else"}, "--rdzv-id is 'run' on host-a (10.0.0.1), but 'else' on host-b (10.0.0.2)"),
        ({}, {"max_nodes": 3}, "--nnodes is 2 on host-a (10.0.0.1), but 2:3 on host-b (10.0.0.2)"),
    ],
)
def test_contradicting_flags_are_told_to_all(first: dict[str, Any], second: dict[str, Any], said: str) -> None:
    log = _Log("a", "b")
    log.join(_member("a", **first), _member("b", **second))
    for uid in "ab":
        (event,) = log.take(uid)
        assert isinstance(event, Refused)
        assert said in event.message


def test_a_newcomer_with_other_flags_does_not_stop_a_run() -> None:
    log = _Log("a", "c")
    log.join(_member("a", 1, 3))
    log.start()
    log.take("a")
    log.join(_member("c", 2, 3))
    assert log.take("a") == []
    (event,) = log.take("c")
    assert isinstance(event, Refused)
    assert "--nnodes is 1:3 on host-a (10.0.0.1), but 2:3 on host-c (10.0.0.3)" in event.message


def test_a_node_too_many_is_refused_and_the_others_go_on() -> None:
    log = _Log("a", "c")
    log.join(_member("a"), _member("b"), _member("c"))
    (event,) = log.take("c")
    assert isinstance(event, Refused)
    assert "there are 2 nodes already" in event.message
    assert "host-a (10.0.0.1), host-b (10.0.0.2)" in event.message
    log.start()
    assert [type(event) for event in log.take("a")] == [Met]
    assert log.take("c") == []


def test_a_failure_is_told_to_the_others_and_the_first_is_marked() -> None:
    log = _two()
    log.say("failed", "b", failure=asdict(_FAILURE))
    log.say("failed", "a", failure=asdict(_FAILURE))
    log.say("failed", "a", failure=asdict(_FAILURE))
    assert log.take("a") == [Failed(_FAILURE, 1, "host-b", first=True)]
    assert log.take("b") == [Failed(_FAILURE, 0, "host-a", first=False)]


def test_the_next_round_keeps_the_order_and_starts_when_all_are_ready() -> None:
    log = _two()
    log.say("failed", "b", failure=asdict(_FAILURE))
    log.say("again", "b")
    assert not any(start_due(state, True) for state in log.states.values())
    log.say("again", "a")
    assert _hosts(log.states["b"]) == ["a", "b"]
    log.take("b")
    log.start()
    (met,) = log.take("b")
    assert isinstance(met, Met)
    assert (met.round, met.node_rank) == (1, 1)
    log.take("a")
    log.say("failed", "b", after=0, failure=asdict(_FAILURE))  # it came too late
    log.say("done", "b", after=0, exit_code=0)
    assert log.take("a") == []


def test_a_lost_node_is_told_unless_it_was_done() -> None:
    log = _two()
    log.gone("b", "no life")
    assert log.take("a") == [Lost(1, "host-b", "no life")]
    (event,) = log.take("b")
    assert isinstance(event, Refused)
    log = _two()
    log.say("done", "b", exit_code=0)
    log.gone("b")
    log.say("done", "a", exit_code=0)
    assert log.take("a") == [AllDone(0)]


def test_a_lost_node_can_be_replaced() -> None:
    log = _two()
    log.states["c"], log.told["c"] = replace(log.states["a"], me="c"), []
    log.gone("b")
    log.join(_member("c"))
    log.say("again", "a")
    log.start()
    assert [type(event) for event in log.take("a")] == [Lost, Joining, Met]
    assert [type(event) for event in log.take("c")] == [Met]


def test_a_late_node_waits_for_the_next_round_of_an_elastic_run() -> None:
    log = _Log("a", "b", "c")
    log.join(_member("a", 1, 3), _member("b", 1, 3))
    assert not start_due(log.states["a"], False), "the last call is not over"
    log.start()
    log.join(_member("c", 1, 3))
    assert [type(event) for event in log.take("a")] == [Met, Joining]
    assert log.take("c") == []
    log.say("again", "b")
    assert not start_due(log.states["b"], False), "a still has workers to end"
    log.say("again", "a")
    assert start_due(log.states["a"], False), "there is nobody to wait for"
    log.start()
    assert [node.host for node in log.take("c")[0].nodes] == ["host-a", "host-b", "host-c"]  # type: ignore[union-attr]


def test_who_waits_is_not_left_alone_when_all_others_have_gone() -> None:
    log = _Log("a", "c")
    log.join(_member("a", 1, 2))
    log.start()
    log.join(_member("c", 1, 2))
    log.gone("a")
    assert start_due(log.states["c"], False)


def test_the_exit_code_is_the_first_that_is_not_0() -> None:
    log = _two()
    log.states["c"], log.told["c"] = replace(log.states["a"], me="c"), []
    log.say("done", "b", exit_code=3)
    assert log.take("a") == []
    log.say("done", "a", exit_code=0)
    assert log.take("a") == log.take("b") == [AllDone(3)]
    assert log.take("c") == [], "it is not there, but reads what was"
    assert not start_due(log.states["a"], True)


def test_giving_up_is_told_to_all_and_to_those_who_come_after() -> None:
    log = _Log("a", "b")
    log.join(_member("a"))
    message = missing(log.states["a"], _SETTINGS, 60.0)
    assert message.startswith("1 of 2 nodes met at alpha:29400 within 60 s: host-a (10.0.0.1); 1 is missing")
    log.add({"kind": "give up", "round": 0, "message": message})
    log.join(_member("b"))
    assert log.take("a") == [Refused(message)]
    assert log.take("b") == [Refused(f"the run has ended: {message}")]


def test_silence_is_counted_in_looks() -> None:
    watch = Watch(2)
    assert watch.look({"a": "1", "b": "1"}) == []
    assert watch.look({"a": "2", "b": "1"}) == []
    assert watch.look({"a": "2", "b": "1"}) == ["b"]
    assert watch.look({"a": "3", "b": "2"}) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"endpoint": ""}, "no host"),
        ({"port": 0}, "port 0"),
        ({"min_nodes": 3}, "--nnodes is 3:2"),
        ({"node_rank": 2}, "--node-rank is 2; expected 0 to 1"),
        ({"min_nodes": 1, "node_rank": 0}, "node ranks need a fixed number"),
        ({"nproc_per_node": 0}, "--nproc-per-node is 0"),
        ({"join_timeout_s": 0.0}, "join_timeout is 0"),
        ({"keep_alive_interval_s": float("inf")}, "keep_alive_interval is inf"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt is 0"),
        ({"last_call_s": -1.0}, "last_call_timeout is -1"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(_SETTINGS, **wrong)


def test_the_endpoint_is_written_as_it_was_given() -> None:
    assert replace(_SETTINGS, endpoint="fd00::1").place == "[fd00::1]:29400"


@pytest.mark.parametrize(
    "event",
    [
        Met(1, 0, (Node("a", "10.0.0.1", None, 2),), "a", 1),
        Failed(_FAILURE, 1, "b", first=False),
        Lost(1, "b", "no life"),
        Joining(("a", "b")),
        AllDone(3),
        Refused("two\nlines"),
    ],
)
def test_events_travel_as_lines(event: Event) -> None:
    assert "\n" not in to_line(event)
    assert from_line(to_line(event)) == event


def test_a_long_traceback_keeps_its_ends() -> None:
    long = replace(_FAILURE, traceback="begin" + "x" * (1 << 20) + "end").shortened()
    assert long.traceback.startswith("begin")
    assert long.traceback.endswith("end")
    assert len(long.traceback) < 1 << 16
    assert _FAILURE.shortened() is _FAILURE

"""Decides how the nodes of a run meet, part and meet again. Pure.

All nodes write to one log, kept in a store: entry after entry, each at the first free place. Each node reads it
from its beginning and applies every entry to its own `State`. As all read the same entries in the same order, all
come to the same decisions, and nobody has to ask anybody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samestep.launch.events import AllDone, Event, Failed, Failure, Joining, Lost, Met, Node, Refused

__all__ = ["ALL_DONE", "MeetingSettings", "Member", "State", "Watch", "applied", "missing", "next_roster", "start_due"]

# Why a meeting is over that went well.
ALL_DONE = "all its workers are done"

Step = tuple["State", tuple[Event, ...]]


@dataclass(frozen=True)
class MeetingSettings:
    """How one node comes to the meeting; the names are those of the flags. Raises ValueError for what can't be.

    `is_host` says whether this node holds the store; None lets the endpoint decide. `join_timeout_s` is how long all
    have time to come, `last_call_s` how long more than `min_nodes` are waited for. A node that has not shown life
    `keep_alive_max_attempt` times, `keep_alive_interval_s` apart, counts as lost.
    """

    endpoint: str
    port: int
    run_id: str
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    node_rank: int | None = None
    is_host: bool | None = None
    local_addr: str | None = None
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    keep_alive_interval_s: float = 5.0
    keep_alive_max_attempt: int = 3

    def __post_init__(self) -> None:
        if not self.endpoint:
            raise ValueError("--rdzv-endpoint has no host; expected HOST:PORT, the same on every node")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--rdzv-endpoint has port {self.port}; expected 1 to 65535, the same on every node")
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"--nnodes is {self.nnodes}; expected N or MIN:MAX with 1 <= MIN <= MAX")
        if self.node_rank is not None and self.min_nodes != self.max_nodes:
            raise ValueError(f"--node-rank is given, but --nnodes is {self.nnodes}; node ranks need a fixed number")
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise ValueError(f"--node-rank is {self.node_rank}; expected 0 to {self.max_nodes - 1} (--nnodes - 1)")
        if self.nproc_per_node < 1:
            raise ValueError(f"--nproc-per-node is {self.nproc_per_node}; expected at least 1")
        if self.keep_alive_max_attempt < 1:
            raise ValueError(f"--rdzv-conf keep_alive_max_attempt is {self.keep_alive_max_attempt}; expected >= 1")
        for name in ("join_timeout", "keep_alive_interval"):
            if not 0 < getattr(self, f"{name}_s") < float("inf"):
                raise ValueError(f"--rdzv-conf {name} is {getattr(self, f'{name}_s')}; expected seconds, more than 0")
        if not 0 <= self.last_call_s < float("inf"):
            raise ValueError(f"--rdzv-conf last_call_timeout is {self.last_call_s}; expected seconds, at least 0")

    @property
    def nnodes(self) -> str:
        """--nnodes as it is written."""
        return f"{self.min_nodes}" if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    @property
    def place(self) -> str:
        """The endpoint as it is written."""
        return f"[{self.endpoint}]:{self.port}" if ":" in self.endpoint else f"{self.endpoint}:{self.port}"


@dataclass(frozen=True)
class Member:
    """A node that has come, with the flags that all must have alike and those that are its own."""

    uid: str
    node: Node
    run_id: str
    min_nodes: int
    max_nodes: int
    node_rank: int | None = None
    holds_store: bool = False


@dataclass(frozen=True)
class State:
    """What the log has said so far, as `me` sees it.

    `members` are the living, in order of arrival; `ready` are those of them that wait for the next round. `roster` is
    in rank order, and stays when its round has ended. `over` is why the meeting has ended for all, once it has.
    """

    me: str
    members: tuple[Member, ...] = ()
    ready: frozenset[str] = frozenset()
    round: int = 0
    running: bool = False
    roster: tuple[Member, ...] = ()
    failed: frozenset[str] = frozenset()
    done: Mapping[str, int] | None = None
    over: str | None = None

    @property
    def others(self) -> tuple[Member, ...]:
        """The living without me."""
        return tuple(m for m in self.members if m.uid != self.me)

    @property
    def waiting(self) -> tuple[Member, ...]:
        """Those who wait for the next round, in order of arrival."""
        return tuple(m for m in self.members if m.uid in self.ready)


def applied(state: State, entry: Mapping[str, Any]) -> Step:
    """Applies one entry of the log; returns the next state, and what I have to be told."""
    match entry["kind"]:
        case "join":
            node = Node(**entry["member"]["node"])
            return _joined(state, Member(**{**entry["member"], "node": node}))
        case "gone":
            return _gone(state, entry["uid"], entry["reason"])
        case "start" if _in_turn(state, entry, running=False):
            return _started(state, tuple(entry["store"]))
        case "give up" if _in_turn(state, entry, running=False):
            return _ended(state, entry["message"])
        case "done" if _in_turn(state, entry, running=True) and _place(state, entry["uid"]) is not None:
            return _all_done(replace(state, done={**(state.done or {}), entry["uid"]: entry["exit_code"]}))
        case "failed" if _in_turn(state, entry, running=True):
            return _failed(state, entry["uid"], Failure(**entry["failure"]))
        case "again" if entry["uid"] in {m.uid for m in state.members} and state.over is None:
            return _again(state, entry["uid"], entry["round"])
        case _:  # it came too late: the round that it speaks of is over
            return state, ()


def next_roster(state: State) -> tuple[Member, ...]:
    """Who would be in the next round, in rank order: by node rank where given; else those who were there keep their
    order, and newcomers follow as they came, at first the one that holds the store."""
    before = {m.uid: rank for rank, m in enumerate(state.roster)}
    if all(m.node_rank is not None for m in state.waiting):
        return tuple(sorted(state.waiting, key=lambda m: m.node_rank or 0))
    return tuple(sorted(state.waiting, key=lambda m: (before.get(m.uid, len(before)), not (m.holds_store or before))))


def start_due(state: State, last_call_is_over: bool) -> bool:
    """Whether it is on me to start the next round now: the first of its nodes does it."""
    roster = next_roster(state)
    if state.running or state.over is not None or not roster or roster[0].uid != state.me:
        return False
    if len(roster) >= roster[0].max_nodes:
        return True
    everybody = state.round > 0 and len(roster) == len(state.members)
    return len(roster) >= roster[0].min_nodes and (everybody or last_call_is_over)


def missing(state: State, settings: MeetingSettings, waited_s: float) -> str:
    """What all read when the nodes that have come by the deadline are too few."""
    here = state.waiting
    others = [m for m in state.members if m.uid not in state.ready]
    held_up = f"; not ready: {_names(others)}" if others else ""
    lack = settings.min_nodes - len(here)
    return (
        f"{len(here)} of {settings.min_nodes} nodes met at {settings.place} within {waited_s:.0f} s: {_names(here)}"
        f"{held_up}; {max(lack, 0)} {'is' if lack == 1 else 'are'} missing (--nnodes {settings.nnodes}). Start samestep"
        f" run on every node with the same --rdzv-endpoint and --rdzv-id ({settings.run_id}), and see that each can"
        f" reach {settings.place}; --rdzv-conf join_timeout=SECONDS waits longer"
    )


class Watch:
    """Notices who shows no life: whose number stays the same for `patience` looks in a row.

    Looks are counted, not seconds, so a node that was itself asleep takes nobody for dead.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._seen: dict[str, tuple[str, int]] = {}

    def look(self, numbers: Mapping[str, str]) -> list[str]:
        """Takes the number that each node shows now; returns who has been silent for too long."""
        old = self._seen
        self._seen = {
            uid: (number, old[uid][1] + 1 if uid in old and old[uid][0] == number else 0)
            for uid, number in numbers.items()
        }
        return [uid for uid, (_, looks) in self._seen.items() if looks >= self._patience]


def _joined(state: State, new: Member) -> Step:
    if state.over is not None:
        return state, _for_me(state, new, f"the run has ended: {state.over}")
    first = state.members[0] if state.members else new
    fault = _contradiction(first, new)
    if fault is None and len(state.members) >= first.max_nodes:
        fault = f"there are {len(state.members)} nodes already, as many as --nnodes allows: {_names(state.members)}"
        return state, _for_me(state, new, f"{_name(new)} is one node too many: {fault}")
    fault = fault or _rank_conflict(state.members, new)
    if fault is not None:
        # Before anything runs, nothing can come of it; a run that goes on is not stopped by a newcomer.
        if state.round == 0 and not state.running:
            return _ended(replace(state, members=(*state.members, new)), fault)
        return state, _for_me(state, new, fault)
    state = replace(state, members=(*state.members, new), ready=state.ready | {new.uid})
    return state, _joining(state, new.uid)


def _contradiction(first: Member, new: Member) -> str | None:
    if new.run_id != first.run_id:
        return (
            f"--rdzv-id is {first.run_id!r} on {_name(first)}, but {new.run_id!r} on {_name(new)}:"
            " give all nodes of a run the same, and another run another --rdzv-endpoint"
        )
    ours, theirs = (
        f"{m.min_nodes}" if m.min_nodes == m.max_nodes else f"{m.min_nodes}:{m.max_nodes}" for m in (first, new)
    )
    if ours != theirs:
        return f"--nnodes is {ours} on {_name(first)}, but {theirs} on {_name(new)}: give all nodes the same"
    return None


def _rank_conflict(members: Sequence[Member], new: Member) -> str | None:
    for old in members:
        if (old.node_rank is None) != (new.node_rank is None):
            having, lacking = (old, new) if new.node_rank is None else (new, old)
            return (
                f"--node-rank is {having.node_rank} on {_name(having)}, but not given on {_name(lacking)}:"
                " give it on all nodes or on none"
            )
        if old.node_rank is not None and old.node_rank == new.node_rank:
            return f"--node-rank is {new.node_rank} on both {_name(old)} and {_name(new)}: give each node its own"
    return None


def _gone(state: State, uid: str, reason: str) -> Step:
    member = next((m for m in state.members if m.uid == uid), None)
    if member is None:
        return state, ()
    rank = _place(state, uid)
    known = uid in state.failed or uid in (state.done or {})
    state = replace(state, members=tuple(m for m in state.members if m.uid != uid), ready=state.ready - {uid})
    if state.running and not {m.uid for m in state.roster} & {m.uid for m in state.members}:
        state = replace(state, running=False, round=state.round + 1)  # for those who wait
    if uid == state.me:
        return state, (Refused(f"{_name(member)} was given up by the other nodes: {reason}"),)
    if not state.running or rank is None or known or _place(state, state.me) is None:
        return state, ()
    return state, (Lost(rank, member.node.host, reason),)


def _started(state: State, store: tuple[str, int]) -> Step:
    roster = next_roster(state)
    state = replace(
        state, running=True, roster=roster, ready=state.ready - {m.uid for m in roster}, failed=frozenset(), done=None
    )
    rank = _place(state, state.me)
    if rank is None:
        return state, ()
    return state, (Met(state.round, rank, tuple(m.node for m in roster), *store),)


def _failed(state: State, uid: str, failure: Failure) -> Step:
    rank = _place(state, uid)
    if rank is None or uid in state.failed:
        return state, ()
    event = Failed(failure, rank, state.roster[rank].node.host, first=not state.failed)
    told = uid != state.me and _place(state, state.me) is not None
    return replace(state, failed=state.failed | {uid}), (event,) if told else ()


def _all_done(state: State) -> Step:
    done = state.done or {}
    if {m.uid for m in state.roster} != done.keys():
        return state, ()
    code = next((done[m.uid] for m in state.roster if done[m.uid]), 0)
    return replace(state, running=False, over=ALL_DONE), (AllDone(code),) if _is_here(state) else ()


def _again(state: State, uid: str, after_round: int) -> Step:
    if state.running and after_round == state.round:
        state = replace(state, running=False, round=state.round + 1)
    state = replace(state, ready=state.ready | {uid})
    return state, _joining(state, uid)


def _ended(state: State, message: str) -> Step:
    return replace(state, over=message), (Refused(message),) if _is_here(state) else ()


def _is_here(state: State) -> bool:
    return any(m.uid == state.me for m in state.members)


def _in_turn(state: State, entry: Mapping[str, Any], *, running: bool) -> bool:
    return state.over is None and state.running is running and bool(entry["round"] == state.round)


def _joining(state: State, uid: str) -> tuple[Event, ...]:
    """Somebody waits: told to those in a round."""
    told = state.running and uid != state.me and _place(state, state.me) is not None
    return (Joining(tuple(m.node.host for m in state.waiting)),) if told else ()


def _place(state: State, uid: str) -> int | None:
    return next((rank for rank, m in enumerate(state.roster) if m.uid == uid), None)


def _for_me(state: State, new: Member, message: str) -> tuple[Event, ...]:
    return (Refused(message),) if new.uid == state.me else ()


def _name(m: Member) -> str:
    return m.node.host if m.node.host == m.node.addr else f"{m.node.host} ({m.node.addr})"


def _names(members: Sequence[Member]) -> str:
    return ", ".join(map(_name, members)) if members else "none"

"""What the nodes of a run tell each other, and how it is written down between processes. Pure."""

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "AllDone",
    "Event",
    "Failed",
    "Failure",
    "Joining",
    "Lost",
    "Met",
    "Node",
    "Refused",
    "from_line",
    "to_line",
]

# A longer traceback is shortened in its middle, so that no exception floods the store.
_MAX_TRACEBACK = 1 << 15


@dataclass(frozen=True)
class Node:
    """One machine of a round: its name, its address among the nodes, the network interface with it, its workers."""

    host: str
    addr: str
    interface: str | None
    nproc: int


@dataclass(frozen=True)
class Failure:
    """The first failure on a node: which rank, when (seconds since the epoch), how it ended, and its traceback."""

    rank: int
    host: str
    pid: int
    when: float
    how: str
    exit_code: int
    traceback: str = ""

    def shortened(self) -> "Failure":
        """The same with a traceback of bounded length."""
        if len(self.traceback) <= _MAX_TRACEBACK:
            return self
        half = _MAX_TRACEBACK // 2
        text = f"{self.traceback[:half]}\n...\n{self.traceback[-half:]}"
        return Failure(**{**asdict(self), "traceback": text})


@dataclass(frozen=True)
class Met:
    """A round begins. `nodes` are in rank order; workers meet at the store, which is for them alone."""

    round: int
    node_rank: int
    nodes: tuple[Node, ...]
    store_addr: str
    store_port: int

    @property
    def first_rank(self) -> int:
        """The global rank of this node's first worker."""
        return sum(node.nproc for node in self.nodes[: self.node_rank])

    @property
    def world_size(self) -> int:
        """The workers of all nodes."""
        return sum(node.nproc for node in self.nodes)


@dataclass(frozen=True)
class Failed:
    """A worker of another node failed in this round; `first` says that no node, mine included, told of one before."""

    failure: Failure
    node_rank: int
    host: str
    first: bool


@dataclass(frozen=True)
class Lost:
    """Another node of this round has gone before its workers were done."""

    node_rank: int
    host: str
    reason: str


@dataclass(frozen=True)
class Joining:
    """These nodes have come while a round is running and wait for the next."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class AllDone:
    """All workers of all nodes are done."""

    exit_code: int


@dataclass(frozen=True)
class Refused:
    """The meeting can't come about or can't go on; `message` is for the user."""

    message: str


Event = Met | Failed | Lost | Joining | AllDone | Refused
_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in (Met, Failed, Lost, Joining, AllDone, Refused)}


def to_line(event: Event) -> str:
    """One line of JSON."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def from_line(line: str) -> Event:
    """What `to_line` has written."""
    fields = json.loads(line)
    kind = _EVENTS[fields.pop("event")]
    if "nodes" in fields:
        fields["nodes"] = tuple(Node(**node) for node in fields["nodes"])
    if "failure" in fields:
        fields["failure"] = Failure(**fields["failure"])
    if "hosts" in fields:
        fields["hosts"] = tuple(fields["hosts"])
    event: Event = kind(**fields)
    return event

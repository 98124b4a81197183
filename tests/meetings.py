"""Nodes that meet, for the tests: each has a real process, and this process is the launcher of all of them."""

import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from samestep.launch.events import Event, Failure, Met
from samestep.launch.meet import Meeting, start_meeting
from samestep.launch.nodes import MeetingSettings
from samestep.world import environment

__all__ = ["Crowd", "failure", "free_port", "listening", "sums"]

_LIMIT_S = 60.0
# What a worker of torchrun's kind does to find the others.
_WORKER = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(int(x), flush=True)
os._exit(0)
"""

E = TypeVar("E", bound=Event)


class Crowd:
    """Nodes with the same endpoint; ends them all, whatever a test does."""

    def __init__(self, endpoint: str = "127.0.0.1", port: int = 0, **settings: Any) -> None:
        self.port = port or free_port()
        self._settings = {
            "endpoint": endpoint,
            "port": self.port,
            "run_id": "run",
            "min_nodes": 2,
            "max_nodes": 2,
            "nproc_per_node": 1,
            "keep_alive_interval_s": 1.0,
            "keep_alive_max_attempt": 3,
            **settings,
        }
        self.nodes: list[Meeting] = []
        self.heard: dict[Meeting, list[Event]] = {}

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        """All at once, as the one that holds the store waits for the others."""
        self.leave(*self.nodes)

    def comes(self, enter: Callable[[], None] | None = None, **settings: Any) -> Meeting:
        """Another node; `enter` is called in its process before anything else."""
        chosen = MeetingSettings(**{**self._settings, **settings})
        node = Meeting(chosen, partial(start_meeting, enter))
        self.nodes.append(node)
        self.heard[node] = []
        return node

    def hears(self, node: Meeting, kind: type[E]) -> E:
        """Waits for the node's next event, which has to be of this kind."""
        with selectors.DefaultSelector() as selector:
            selector.register(node.fd, selectors.EVENT_READ)
            end = time.monotonic() + _LIMIT_S
            while not self.heard[node]:
                assert node.deadline is not None, "nothing will come"
                now = time.monotonic()
                assert now < end, f"no {kind.__name__} came"
                selector.select(max(0.0, min(end, node.deadline) - now))
                self.heard[node] += node.take()
        event = self.heard[node].pop(0)
        assert isinstance(event, kind), event
        return event

    def meet(self, nodes: Sequence[Meeting]) -> list[Met]:
        """All of these meet, in one round."""
        return [self.hears(node, Met) for node in nodes]

    def speaks(self, node: Meeting) -> None:
        """Waits for a node's first word: it looks for the store, or holds it and is at the meeting."""
        assert select.select([node.fd], [], [], _LIMIT_S)[0]

    def leave(self, *nodes: Meeting) -> None:
        """These say goodbye."""
        self.nodes = [node for node in self.nodes if node not in nodes]
        closing = [threading.Thread(target=node.close) for node in nodes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def failure(rank: int = 1) -> Failure:
    """A worker that raised."""
    return Failure(rank, "alpha", 4711, 1e9, "exited with code 1", 1, "Traceback\nValueError: \u00fc\n")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def sums(mets: Sequence[Met], enters: Sequence[Callable[[], None] | None]) -> list[bytes]:
    """What one worker on each node says: how many have found each other."""
    with ExitStack() as stack:
        workers = []
        for met, enter in zip(mets, enters, strict=True):
            worker = subprocess.Popen(
                [sys.executable, "-c", _WORKER],
                env={**environment(), **_variables(met)},
                preexec_fn=enter,
                stdout=subprocess.PIPE,
            )
            stack.callback(worker.communicate)
            stack.callback(worker.kill)
            workers.append(worker)
        return [worker.communicate(timeout=_LIMIT_S)[0] for worker in workers]


def _variables(met: Met) -> dict[str, str]:
    """What the one worker of a node gets."""
    return {
        "MASTER_ADDR": met.store_addr,
        "MASTER_PORT": str(met.store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(met.first_rank),
        "WORLD_SIZE": str(met.world_size),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": met.nodes[met.node_rank].interface or "",
    }


@contextmanager
def listening() -> Iterator[int]:
    """Somebody who says nothing listens at the port that this gives."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])

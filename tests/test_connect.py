"""How ranks come together, and which communicator serves a group."""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comm_ranks
import pytest
import torch
import torch.distributed as dist

from samestep.comm import select
from samestep.comm.select import communicator_for, connect
from samestep.comm.threads import thread_communicators
from samestep.errors import BackendError, CommunicatorError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes
from samestep.world import World


@contextmanager
def _port(*, listening: bool = False) -> Iterator[int]:
    """Hold a free port of this host: as an address only, or with a listener that never answers."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        if listening:
            holder.listen()
        yield holder.getsockname()[1]


def test_a_program_that_nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    with connect() as comm:
        assert (comm.rank, comm.size, dist.get_world_size()) == (0, 1, 1)
        assert torch.equal(comm.all_reduce(torch.arange(3)), torch.arange(3))
        assert torch.equal(select.all_reduce(torch.arange(3)), torch.arange(3))
        assert communicator_for() is communicator_for(dist.group.WORLD)
    assert not dist.is_initialized()


def test_ranks_meet_where_the_world_says() -> None:
    with _port() as port:
        assert run_processes(comm_ranks.meet, 2, port) == [[0, 1], [0, 1]]


def test_nobody_else_comes() -> None:
    """In turn: rank 1 is missing, rank 0 is missing, something mute listens in its place, its port is taken."""
    with _port() as free, _port() as empty, _port(listening=True) as mute, _port(listening=True) as taken:
        places = [(0, free), (1, empty), (1, mute), (0, taken)]
        said = run_processes(comm_ranks.meet_nobody, 4, places, timeout_s=60.0)
    for (rank, port), text in zip(places[:3], said, strict=False):
        missed = (
            f"DeadlineError: rank {rank} of 2 did not meet the others at 127.0.0.1:{port} within 1 s; see that all "
        )
        assert text.startswith(missed), text
    assert "something else listens there, which does not answer" in said[2]
    assert re.match(
        rf"CommunicatorError: rank 0 of 2 cannot listen at 127.0.0.1:{taken}, .* \(MASTER_PORT\)", said[3]
    ), said[3]


@pytest.mark.parametrize(("host", "url"), [("::1", "tcp://[::1]:29400"), ("node1", "tcp://node1:29400")])
def test_the_address_is_spelled_for_torch(monkeypatch: pytest.MonkeyPatch, host: str, url: str) -> None:
    asked: list[Any] = []

    def rendezvous(*args: Any, **settings: Any) -> Iterator[Any]:
        asked.extend(args)
        raise RuntimeError("the library is out of order\nand more")

    monkeypatch.setattr(select, "rendezvous", rendezvous)
    with pytest.raises(CommunicatorError, match=r"rank 1 of 2 .* backend failed \(the library is out of order\)$"):
        connect(comm_ranks.local_world(1, 2, 29400, host))
    assert asked == [url, 1, 2]
    assert not dist.is_initialized()


def test_a_backend_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: False)
    with pytest.raises(BackendError, match="the backend 'gloo' for device cpu is needed"):
        connect(World.single("cpu"))
    assert not dist.is_initialized()


def test_what_is_no_group() -> None:
    with pytest.raises(RuntimeError, match=r"call samestep.connect\(\) or"):
        communicator_for()
    with pytest.raises(TypeError, match=r"expected a torch.distributed process group or a Communicator, got int"):
        communicator_for(3)
    with pytest.raises(ValueError, match="not in the process group"):
        communicator_for(dist.GroupMember.NON_GROUP_MEMBER)
    (comm,) = thread_communicators(1)
    assert communicator_for(comm) is comm


def test_what_is_no_world_and_no_timeout() -> None:
    with pytest.raises(TypeError, match="expected a World, or None for that of the environment, got int"):
        connect(3)  # type: ignore[arg-type]
    for timeout_s in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"rank 0: expected a timeout of more than 0 seconds, got {timeout_s}"):
            connect(World.single("cpu"), timeout_s=timeout_s)


def test_closing_ends_the_group_although_wrappers_still_know_it() -> None:
    with connect(World.single("cpu")) as comm:
        group = weakref.ref(dist.group.WORLD)
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
    assert group() is None, "its threads are joined while the interpreter is whole"
    for use in (comm.barrier, model(torch.ones(1, 2)).sum().backward):
        with pytest.raises(CommunicatorError, match="rank 0 of 1: the process group has been destroyed"):
            use()
    with connect(World.single("cpu")) as again:
        again.barrier()

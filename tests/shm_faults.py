"""Ranks that are killed or stopped at chosen moments of every exchange; light to import, as every rank imports it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shm_ranks import gathered
from torch import Tensor

from samestep.comm.base import Communicator
from samestep.comm.c10d import C10dCommunicator
from samestep.comm.ops import AllReduce
from samestep.comm.shm import exchanges, gather, kernels, waiting
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.errors import CommunicatorError, DeadlineError, PeerLostError
from samestep.testing.samples import refused

SLOT_BYTES = 4096
_MANY = 3000  # more than two slots of float32
_LARGE = 20_000  # more than 64 KiB: range by range, or in place, or in compiled loops

Exchange = Callable[[ShmCommunicator, Tensor], object]


def _flat(comm: Communicator, count: int) -> Tensor:
    return torch.ones(comm.size * count)


EXCHANGES: dict[str, tuple[Exchange, str]] = {  # and what it is called in errors
    "all_reduce": (lambda comm, _: comm.all_reduce(torch.ones(7)), "all_reduce(sum) of float32[7]"),
    "in pieces": (lambda comm, _: comm.all_reduce(torch.ones(_MANY)), "all_reduce(sum) of float32[3000]"),
    "by range": (lambda comm, _: comm.all_reduce(torch.ones(_LARGE)), "all_reduce(sum) of float32[20000]"),
    "in place": (lambda comm, arena: comm.all_reduce(arena), "all_reduce(sum) of float32[20001]"),
    "compiled": (lambda comm, _: comm.all_reduce(torch.ones(_LARGE)), "all_reduce(sum) of float32[20000]"),
    "compiled, in place": (lambda comm, arena: comm.all_reduce(arena), "all_reduce(sum) of float32[20001]"),
    "several": (lambda comm, arena: _several(comm, arena), "all_reduce(sum) of float32[2"),
    "broadcast": (lambda comm, _: comm.broadcast(torch.ones(_MANY), 1), "broadcast(source=1) of float32[3000]"),
    "all_gather": (lambda comm, _: comm.all_gather(torch.ones(_MANY)), "all_gather of float32[3000]"),
    "reduce_scatter": (lambda comm, _: comm.reduce_scatter(_flat(comm, _MANY)), "reduce_scatter(sum) of float32["),
    "all_to_all": (lambda comm, _: comm.all_to_all(_flat(comm, _MANY).split(_MANY)), "all_to_all(sends="),
    "barrier": (lambda comm, _: comm.barrier(), "barrier"),
    "empty": (lambda comm, _: comm.empty((_MANY,)), "all_gather of "),
    "split": (lambda comm, _: _split(comm), "all_gather of"),
}


def _group(control: Communicator, name: str) -> ShmCommunicator:
    return gathered(control, slot_bytes=SLOT_BYTES, kernels=name.startswith("compiled"))


def _several(comm: ShmCommunicator, arena: Tensor) -> None:
    works = [comm.start(AllReduce(t)) for t in (arena, torch.ones(2), arena[1:], torch.ones(_LARGE))]
    for work in works:
        work.wait()


def _split(comm: ShmCommunicator) -> None:
    part = comm.split(range(comm.size))
    assert part is not None
    part.close()


class _Fault:
    """Does something when its rank comes to its `turn`-th meeting from now on: before the others can see it, or after.

    Or, if `moment` is "midway", in the midst of the `turn`-th reduction, with a part of the result written. Where loops
    are compiled it is one of their calls, before, after, or amid which it does it.
    """

    def __init__(self, comm: ShmCommunicator, moment: str, turn: int, act: Callable[[], None]) -> None:
        self._moment, self._left, self._act = moment, turn, act
        self._come, self._reduce = comm._room.come, exchanges.reduce_into
        if comm._room.kernels:
            kernels.stream, kernels.reduce_all = self._around(kernels.stream), self._around(kernels.reduce_all)
        elif moment == "midway":
            exchanges.reduce_into = self._reduce_and_act
        else:
            comm._room.come = self._come_and_act  # type: ignore[method-assign]

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: object) -> object:
            self._left -= 1
            if self._left == 0 and self._moment == "before":
                self._act()
            if self._left == 0 and self._moment == "midway":
                threading.Thread(target=self._act).start()
            result = call(*args)
            if self._left == 0 and self._moment == "after":
                self._act()
            return result

        return around

    def _come_and_act(self) -> int:
        self._left -= 1
        if self._left == 0 and self._moment == "before":
            self._act()
        met = self._come()
        if self._left == 0 and self._moment == "after":
            self._act()
        return met

    def _reduce_and_act(self, *args: object) -> None:
        self._reduce(*args)  # type: ignore[arg-type]
        self._left -= 1
        if self._left == 0:
            self._act()


# The turns by which a world of four ranks shrinks to one, a rank at each.
VICTIMS = {4: 2, 3: 0, 2: 1}


def lose_one_after_another(control: Communicator, name: str, moments: list[tuple[str, int]], path: str) -> float:
    """In the midst of one kind of exchange a rank is killed, then one of those who are left, and so on.

    Returns the longest time, in seconds, until a survivor knew.
    """
    exchange, called = EXCHANGES[name]
    longest = 0.0
    store = dist.FileStore(path, control.size)  # type: ignore[attr-defined]
    for moment, turn in moments:
        victim = VICTIMS[control.size]
        comm = _group(control, name)
        pids = comm.all_gather_object(os.getpid())
        arena = comm.empty((_LARGE + 1,))
        if comm.rank == victim:
            _Fault(comm, moment, turn, lambda: os.kill(os.getpid(), signal.SIGKILL))
        said, took = _repeat(comm, exchange, arena)
        longest = max(longest, took)
        _check_lost(comm, _first_error(comm, said, PeerLostError), victim, pids[victim], called)
        stage = dist.PrefixStore(f"{control.size}", store)
        _wait_for_the_others(comm, stage, victim)
        comm.close()
        del comm, arena
        assert held() == 0, "memory of a group that is closed"
        control = _survivors(control, stage, victim)
    return longest


def _repeat(comm: ShmCommunicator, exchange: Exchange, arena: Tensor) -> tuple[str, float]:
    """Make an exchange again and again until a peer is lost; return the error and how long the last one took."""
    for _ in range(1000):
        began = time.monotonic()
        try:
            exchange(comm, arena)
        except PeerLostError as error:
            return str(error), time.monotonic() - began
    raise AssertionError("nobody was lost")


def _first_error(comm: ShmCommunicator, said: str, kind: type[CommunicatorError]) -> str:
    """Return what broke the group, which it says again and again; `said` is that, or says it of an exchange behind."""
    again = f"rank {comm.rank}: the group is broken since: "
    first = said.removeprefix(again)
    for _ in range(2):
        assert refused(comm, "a barrier afterwards", comm.barrier, kind) == again + first, said
    return first


def _check_lost(comm: ShmCommunicator, said: str, victim: int, pid: int, called: str) -> None:
    """The error names the exchange, and the rank, if it did not die while Gloo made the new group of a split."""
    assert said.startswith(f"rank {comm.rank} of {comm.size}, {called}"), said
    died = f": rank {victim} (process {pid}) died; look for what ended it"
    assert died in said or (called == EXCHANGES["split"][1] and ": a peer died or closed its connection" in said), said


def _wait_for_the_others(comm: Communicator, stage: dist.Store, victim: int) -> None:
    stage.set(f"knows {comm.rank}", "yes")
    stage.wait([f"knows {rank}" for rank in range(comm.size) if rank != victim])


def _survivors(control: Communicator, stage: dist.Store, victim: int) -> Communicator:
    """Make a group of all but one rank."""
    rank, size = control.rank - (control.rank > victim), control.size - 1
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=stage, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    made = C10dCommunicator()
    made.barrier()
    return made


def held() -> int:
    """Return how many pieces of shared memory this process has mapped, or has a descriptor of."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = sum("memfd:samestep" in os.readlink(link) for link in links if os.path.lexists(link))
    return files + Path("/proc/self/maps").read_text().count("memfd:samestep")


def lose_one_while_gathering(control: Communicator, moment: str, path: str) -> str:
    """The last rank is killed while it offers memory, or maps that of others, who learn of it."""
    store = dist.FileStore(path, control.size)  # type: ignore[attr-defined]
    victim = control.size - 1
    if control.rank == victim:
        setattr(gather, moment, _die)
    said = refused(control, "gather", lambda: ShmCommunicator.gather(control), PeerLostError)
    again = refused(control, "a barrier afterwards", control.barrier, PeerLostError)
    assert again == f"rank {control.rank}: the group is broken since: {said}", again
    assert held() == 0, "memory that nobody shares"
    _wait_for_the_others(control, store, victim)
    return said


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Ranks that stop


class _Clock:
    """Runs ahead, an hour at each look, while all wait for a process that is stopped: then only do deadlines pass."""

    def __init__(self) -> None:
        self._stopped: Callable[[], bool] = lambda: False
        self._ahead = 0.0

    def monotonic(self) -> float:
        if self._stopped():
            self._ahead += 3600.0
        return time.monotonic() + self._ahead

    @contextmanager
    def hurrying(self, comm: ShmCommunicator, victim: int, pid: int) -> Iterator[None]:
        def stopped() -> bool:
            missing = [rank for rank, _ in comm._waiter._missing(comm._waiter._awaited)]
            return missing == [victim] and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

        self._stopped = stopped
        try:
            yield
        finally:
            self._stopped = lambda: False


STOPS = (("before", 1), ("after", 1), ("before", 2), ("after", 4))


def stop_in_every_exchange(control: Communicator, path: str) -> int:
    """The last rank stops at chosen moments of every exchange, in a new group each time; returns how many times."""
    clock = waiting.time = _Clock()  # type: ignore[assignment]
    store = dist.FileStore(path, control.size)  # type: ignore[attr-defined]
    number = 0
    for name in EXCHANGES:
        for moment, turn in STOPS:
            if name == "split" and turn > 2:  # Gloo makes the new group, and has its own deadline
                continue
            number += 1
            stage = dist.PrefixStore(str(number), store)
            try:
                _stop_once(control, name, (moment, turn), clock, stage)
            except AssertionError as error:
                raise AssertionError(f"{name}, {moment} meeting {turn}: {error}") from error
    assert held() == 0, "memory of groups that are closed"
    return number


def _stop_once(control: Communicator, name: str, moment: tuple[str, int], clock: _Clock, stage: dist.Store) -> None:
    exchange, called = EXCHANGES[name]
    victim = control.size - 1
    with _group(control, name) as comm:
        pids = comm.all_gather_object(os.getpid())
        arena = comm.empty((_LARGE + 1,))
        if comm.rank == victim:
            _Fault(comm, *moment, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        try:
            with nullcontext() if comm.rank == victim else clock.hurrying(comm, victim, pids[victim]):
                said = refused(comm, name, lambda: [exchange(comm, arena) for _ in range(100)], DeadlineError)
            if comm.rank != victim:
                _wait_for_the_others(comm, stage, victim)
        finally:
            if comm.rank == 0:
                os.kill(pids[victim], signal.SIGCONT)
        _check_late(comm, _first_error(comm, said, DeadlineError), victim, called)
        control.barrier()


def _check_late(comm: ShmCommunicator, said: str, victim: int, called: str) -> None:
    """The error names the exchange and the rank that did not come, and says of each rank what it is in."""
    assert said.startswith(f"rank {comm.rank} of {comm.size}, {called}"), said
    first, *doing = said.split("\n  rank ")
    assert f"rank(s) [{victim}] did not come within 30 s; look for a rank that stopped" in first, said
    assert [line.partition(":")[0] for line in doing] == [str(rank) for rank in range(comm.size)], said
    assert doing[victim].startswith(f"{victim}: has not come; its last exchange is "), said
    kind = called.partition("(")[0]
    assert any(f": is in {kind}" in line for line in doing), said


def ask_whether_it_is_done(control: Communicator, path: str) -> str:
    """The last rank dies; the others never wait, they only ask."""
    comm = gathered(control)
    victim = comm.size - 1
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == victim:
        _die()
    work = comm.start(AllReduce(torch.ones(3)))
    while not work.done():
        pass
    said = refused(comm, "a lost exchange", work.wait, PeerLostError)
    _check_lost(comm, said, victim, pids[victim], "all_reduce")
    _wait_for_the_others(comm, dist.FileStore(path, control.size), victim)  # type: ignore[attr-defined]
    comm.close()
    return said


def lose_one_while_splitting(control: Communicator, moment: str, path: str) -> str:
    """The last rank dies when all but the first have agreed to split; this breaks the group that is split, too."""
    comm = gathered(control)
    victim = comm.size - 1
    if comm.rank == victim:
        owner = comm._control if moment == "split" else gather
        setattr(owner, moment, _die)
    ranks = range(1, comm.size)
    said = refused(comm, "split", lambda: comm.split(ranks) or comm.barrier(), PeerLostError)
    again = refused(comm, "a barrier afterwards", comm.barrier, PeerLostError)
    assert again == f"rank {comm.rank}: the group is broken since: {said}", again
    _wait_for_the_others(comm, dist.FileStore(path, control.size), victim)  # type: ignore[attr-defined]
    comm.close()
    assert held() == 0, "memory of groups that are closed"
    return said

"""What the ranks of the tests of groups do; light to import, as every process of a test imports it."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from samestep.comm import group as groups
from samestep.comm.base import Communicator
from samestep.comm.c10d import C10dCommunicator
from samestep.comm.group import GroupCommunicator
from samestep.comm.ops import AllReduce
from samestep.comm.select import communicator_for
from samestep.comm.shm import communicator
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.gather import Unshared
from samestep.errors import CommunicatorError, DeadlineError
from samestep.parallel.bucket import DenseBucket
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.conformance import check_communicator, check_mismatch


def shared(comm: Communicator) -> ShmCommunicator:
    """The shared memory that serves a communicator's group; it has been decided."""
    assert isinstance(comm, GroupCommunicator), comm
    found = groups._shared[comm._c10d.group]
    assert isinstance(found, ShmCommunicator), found
    return found


def conform(_: Communicator) -> None:
    comm = communicator_for()
    assert communicator_for(dist.group.WORLD) is comm
    check_communicator(comm)
    check_mismatch(comm)
    assert shared(comm)
    group = dist.new_group([0, comm.size - 1], timeout=timedelta(seconds=7))
    if comm.rank in (0, comm.size - 1):
        half = communicator_for(group)
        check_communicator(half)
        assert shared(half) is not shared(comm)
        assert shared(half)._timeout_s == 7.0
    comm.barrier()


def conform_without_memory(plain: Communicator) -> list[str]:
    """Go through the group where rank 1 can offer no memory; return the warnings."""
    communicator.share = _refusing("rank 1: this is a test" if plain.rank == 1 else "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for checked in (False, True):
            comm = GroupCommunicator(checked=checked)
            check_communicator(comm)
            if checked:
                check_mismatch(comm)
            assert groups._shared[comm._c10d.group] is None
    return [str(w.message) for w in caught]


def _refusing(reason: str) -> Callable[..., Unshared]:
    def share(control: Communicator, *_: int) -> Unshared:
        return Unshared(next(filter(None, control.all_gather_object(reason))))

    return share


def end_and_begin_again(_: Communicator, store: str) -> list[str]:
    """Destroy the group under its communicators, and make another one of the same ranks."""
    first = communicator_for()
    rank, size = first.rank, first.size
    first.barrier()
    model = DistributedDataParallel(nn.Linear(3, 2))
    said = []
    for turn in range(2):
        dist.destroy_process_group()
        for use in (communicator_for, first.barrier, model.communicator.barrier):
            try:
                use()
            except (RuntimeError, CommunicatorError) as error:
                said.append(str(error))
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{store}-{turn}", size),
            rank=rank,
            world_size=size,  # type: ignore[attr-defined]
        )
        again = communicator_for()
        assert again is not first
        assert torch.equal(again.all_reduce(torch.ones(2)), torch.full((2,), float(size)))
        first, model = again, DistributedDataParallel(nn.Linear(3, 2))
    return said


def fork_in_the_middle(_: Communicator) -> str:
    """A child of rank 0 that ends like a program, with an exchange of rank 0's under way, disturbs nobody."""
    comm = communicator_for()
    tensor = comm.empty((70_000,)).fill_(comm.rank + 1)
    comm.barrier()
    said = ""
    if comm.rank == 0:
        work = comm.start(AllReduce(tensor))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                comm.barrier()
            except CommunicatorError as error:
                os.write(write, str(error).encode())
            gc.collect()
            shared(comm).close()
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        said = os.read(read, 1000).decode()
        os.close(read)
        work.wait()
    else:
        comm.all_reduce(tensor)
    assert bool((tensor == 3).all())
    comm.barrier()
    return said


def buckets_come_and_go(_: Communicator, times: int) -> list[int]:
    """Wrap and train again and again; return how many tensors the arena has while and after."""
    comm = communicator_for()
    counts = []
    for turn in range(times):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 2)), bucket_cap_mb=0.001)
        for _ in range(3):
            model(torch.ones(4, 100) * (comm.rank + turn)).sum().backward()
        assert all(isinstance(b, DenseBucket) for b in model._reducer._buckets)
        counts.append(shared(comm)._room.num_arena_tensors)
        del model
        gc.collect()
    counts.append(shared(comm)._room.num_arena_tensors)
    return counts


def miss_the_deadline(_: Communicator) -> str:
    """The deadline is the group's."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    comm = communicator_for(group)
    comm.barrier()
    if comm.rank == 0:
        try:
            comm.all_reduce(torch.ones(3))
        except DeadlineError as error:
            said = str(error)
    else:
        said = ""
    dist.barrier()
    return said


def evaluate_and_train(_: Communicator) -> None:
    """What is made in inference mode serves outside of it, and the other way round."""
    comm = communicator_for()
    model = DistributedDataParallel(nn.Linear(300, 300))
    sizes = (7, 70_000, 90_300 + 302 + 2)
    for turn in range(3):
        with torch.inference_mode(turn != 1):
            arena = [comm.empty((size,)) for size in sizes]
            for tensor in (*arena, *map(torch.ones, sizes), torch.ones(7, dtype=torch.bfloat16)):
                assert bool((comm.all_reduce(tensor.fill_(comm.rank)) == 1).all())
            assert comm.all_gather_object(turn) == [turn, turn]
        for tensor in arena:
            assert bool((comm.all_reduce(tensor) == 2).all())
        model(torch.ones(2, 300)).sum().backward()


def maps_of_shared_memory() -> int:
    return sum("memfd:samestep" in line for line in Path("/proc/self/maps").read_text().splitlines())


def destroy_often(plain: Communicator, times: int) -> tuple[int, int]:
    """Groups that are made, used and destroyed leave no memory; return what is mapped before and after."""
    before = maps_of_shared_memory()
    for _ in range(times):
        group = dist.new_group()
        communicator_for(group).all_reduce(torch.ones(5))
        dist.destroy_process_group(group)
        del group
    gc.collect()
    plain.barrier()
    assert isinstance(plain, C10dCommunicator)
    return before, maps_of_shared_memory()

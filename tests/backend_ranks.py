"""What the ranks of the tests of the backend "samestep" do; light to import, as every process of a test imports it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import samestep.comm.shm.gather
from samestep.comm.backend.group import SharedMemoryGroup
from samestep.comm.base import Communicator
from samestep.errors import PeerLostError

VICTIM = 1

# torch 2.13 gave these new names.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Call = Callable[[dist.ProcessGroup, bool], tuple[Any, list[Tensor]]]


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Small whole numbers, so that sums are the same in whatever order they are added."""
    generator = torch.Generator().manual_seed(100 * rank + salt)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def _calls(rank: int, size: int) -> Iterator[tuple[str, Call]]:
    """Yield every collective, as a function of a group that starts it, and returns the tensors that it fills."""
    yield from _reductions(rank)
    for call in (*_to_all(rank, size), *_in_parts(rank, size)):
        yield call.__name__, call


def _reductions(rank: int) -> Iterator[tuple[str, Call]]:
    ops = dist.ReduceOp

    def reducing(op: Any, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> Call:
        def call(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
            tensor = _values(rank, shape, dtype)
            return dist.all_reduce(tensor, op, group, async_op), [tensor]

        return call

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for op in (ops.SUM, ops.MIN, ops.MAX, ops.PRODUCT):
            yield f"all_reduce {op} {dtype}", reducing(op, dtype)
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        yield f"all_reduce {op}", reducing(op, torch.int32)
    yield "all_reduce of complex numbers", reducing(ops.SUM, torch.complex64)
    yield "all_reduce of nothing", reducing(ops.SUM, torch.float32, (0,))
    yield "all_reduce of one", reducing(ops.SUM, torch.float32, ())
    yield "all_reduce of much", reducing(ops.SUM, torch.float32, (1_000_003,))


def _to_all(rank: int, size: int) -> list[Any]:
    def strided(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        whole = _values(rank, (6, 4), torch.float32)
        return dist.all_reduce(whole.t() if group is dist.group.WORLD else whole, group=group, async_op=async_op), [
            whole
        ]

    def broadcast(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        tensor = _values(rank, (7,), torch.float32)
        return dist.broadcast(tensor, size - 1, group, async_op), [tensor]

    def reduce(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        tensor = _values(rank, (7,), torch.float32)
        work = dist.reduce(tensor, size - 1, group=group, async_op=async_op)
        return work, [tensor] if rank == size - 1 else []

    def all_gather(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        tensor = _values(rank, (2, 3), torch.int64)
        outputs = [torch.zeros(3, 2, dtype=torch.int64).t() for _ in range(size)]
        return dist.all_gather(outputs, tensor, group, async_op), outputs

    def all_gather_single(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(size * 2, 3)
        return _gather_single(output, _values(rank, (2, 3), torch.float32), group, async_op), [output]

    def all_gather_coalesced(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        tensors = [_values(rank, (2, 3), torch.float32), _values(rank, (4,), torch.float32, 1)]
        outputs = [[torch.zeros(2, 3), torch.zeros(4)] for _ in range(size)]
        return group.allgather_coalesced(outputs, tensors), [t for row in outputs for t in row]

    def all_reduce_coalesced(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        tensors = [_values(rank, (2, 3), torch.float32), _values(rank, (4,), torch.float32, 1)]
        return group.allreduce_coalesced(tensors), tensors

    def all_reduce_sparse(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        tensor = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), torch.tensor([1.0, 2.0]), (size + 2,))
        return dist.all_reduce(tensor, group=group, async_op=async_op), [tensor]

    def barrier(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        return dist.barrier(group, async_op), []

    calls = [strided, broadcast, reduce, all_gather, all_gather_single, all_gather_coalesced, all_reduce_coalesced]
    return [*calls, all_reduce_sparse, barrier]


def _in_parts(rank: int, size: int) -> list[Any]:
    uneven = [3 + (r * 7) % 5 for r in range(size)]

    def gather(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        outputs = [torch.zeros(2, 3) for _ in range(size)] if rank == 0 else None
        return dist.gather(_values(rank, (2, 3), torch.float32), outputs, 0, group, async_op), outputs or []

    def scatter(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        inputs = [_values(rank, (2, 3), torch.float32, r) for r in range(size)] if rank == 0 else None
        output = torch.zeros(2, 3)
        return dist.scatter(output, inputs, 0, group, async_op), [output]

    def reduce_scatter(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        output = torch.zeros(2, 3)
        inputs = [_values(rank, (2, 3), torch.float32, r) for r in range(size)]
        return dist.reduce_scatter(output, inputs, group=group, async_op=async_op), [output]

    def reduce_scatter_single(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        output, tensor = torch.zeros(2, 3), _values(rank, (2 * size, 3), torch.float32)
        return _scatter_single(output, tensor, dist.ReduceOp.SUM, group, async_op), [output]

    def all_to_all(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        inputs = [_values(rank, (5, 2), torch.float32, r) for r in range(size)]
        outputs = [torch.zeros(5, 2) for _ in range(size)]
        return dist.all_to_all(outputs, inputs, group, async_op), outputs

    def all_to_all_single(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        tensor, output = _values(rank, (2 * size, 3), torch.float32), torch.zeros(2 * size, 3)
        return dist.all_to_all_single(output, tensor, group=group, async_op=async_op), [output]

    def all_to_all_splits(group: dist.ProcessGroup, async_op: bool) -> tuple[Any, list[Tensor]]:
        sends, receives = [uneven[r] + rank for r in range(size)], [uneven[rank] + r for r in range(size)]
        tensor, output = _values(rank, (sum(sends), 3), torch.float32), torch.zeros(sum(receives), 3)
        return dist.all_to_all_single(output, tensor, receives, sends, group, async_op), [output]

    return [gather, scatter, reduce_scatter, reduce_scatter_single, all_to_all, all_to_all_single, all_to_all_splits]


def agree_with_gloo(control: Communicator) -> list[str]:
    """Make every collective over this backend and over Gloo: waited for at once, later, and by a future."""
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(ours, SharedMemoryGroup)
    names = []
    for name, call in _calls(control.rank, control.size):
        names.append(name)
        work, expected = call(gloo, False)
        if work is not None:
            work.wait()
        work, got = call(ours, False)
        if work is not None:
            work.wait()
        _expect(name, got, expected)
        work, got = call(ours, True)
        if work is not None:
            assert work.wait() is True or work.wait() is None
            assert work.is_completed(), name
        _expect(f"{name}, later", got, expected)
        work, got = call(ours, True)
        if work is not None:
            value = work.get_future().wait()
            assert name == "all_reduce_sparse" or len(value) == len(got) or control.size - 1 != control.rank, (
                name,
                value,
            )
        _expect(f"{name}, by a future", got, expected)
    return names


def _expect(name: str, got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        mine, theirs = (t.to_dense() if t.is_sparse else t for t in (mine, theirs))
        assert torch.equal(mine, theirs), f"{name}: {mine} instead of {theirs}"


def many_at_once(control: Communicator) -> None:
    """Works of several groups, waited for in another order than they were started in, some of them not at all."""
    groups = [dist.group.WORLD, dist.new_group(backend="samestep"), dist.new_group([0, 1], backend="samestep")]
    mine = groups if control.rank < 2 else groups[:2]
    works, sums = [], []
    for turn in range(60):
        tensor = torch.full((50 * turn,), float(control.rank + turn))
        group = mine[turn % 3] if turn % 3 < len(mine) else None
        if group is None:
            continue
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
        sums.append((tensor, sum(r + turn for r in range(group.size()))))
    for work in works[::-2]:
        work.wait()
    for group in mine:
        dist.barrier(group)
    for tensor, expected in sums:
        assert bool(tensor.eq(expected).all()), (tensor, expected)
    assert all(work.is_completed() for work in works)


def waited_for_by_others(control: Communicator) -> None:
    """Rank 0 starts an exchange and then waits for something else, in C++; the others need it to go on by itself."""
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(300_000)
    if control.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        called: list[Tensor] = []
        future = work.get_future().then(lambda f: called.extend(f.value()))
        assert any(t.name == "samestep progress" for t in threading.enumerate())
        store.set("started", "")
        store.wait([f"done {r}" for r in range(1, control.size)], timedelta(seconds=30))
        future.wait()
        assert called[0] is tensor
    else:
        store.wait(["started"], timedelta(seconds=30))
        dist.all_reduce(tensor)
        store.set(f"done {control.rank}", "")
    assert bool(tensor.eq(control.size).all())


def wait_within_callbacks(control: Communicator) -> None:
    """A callback of a future starts an exchange, and waits for its future, and so does a callback of that one."""
    last = torch.full((3,), float(control.rank))

    def after(depth: int) -> torch.futures.Future[Any]:
        future = dist.all_reduce(torch.ones(70_000), async_op=True).get_future()
        return future.then(lambda _: after(depth - 1).wait() if depth else dist.all_reduce(last))

    for _ in range(10):
        last.fill_(float(control.rank))
        after(3).wait()
        assert bool(last.eq(sum(range(control.size))).all())


def end_and_begin_again(control: Communicator, path: str) -> list[int]:
    """Return how many descriptors there were after each life of the default group.

    Gloo closes some a little later: a life is over when there are no more than after the second, or in five seconds.
    """
    counts: list[int] = []
    for life in range(4):
        if life:
            store = dist.FileStore(f"{path}{life}", control.size)  # type: ignore[attr-defined]
            dist.init_process_group("cpu:samestep", store=store, rank=control.rank, world_size=control.size)
        dist.new_group(backend="samestep")
        works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(20)]
        works[-1].get_future().wait()
        dist.barrier()
        dist.destroy_process_group()
        assert not [t for t in threading.enumerate() if t.name == "samestep progress"]
        deadline = time.monotonic() + 5
        while len(counts) > 1 and len(os.listdir("/proc/self/fd")) > counts[1] and time.monotonic() < deadline:
            os.sched_yield()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def lose_a_rank(control: Communicator) -> None:
    """One rank dies while others have works under way: their waits and futures end, with its name."""
    group = dist.new_group(backend="samestep")
    dist.barrier(group)
    if control.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for _ in range(2)]
    futures = [work.get_future() for work in works]
    for wait in (futures[0].wait, works[0].wait, works[1].wait, futures[1].wait, lambda: dist.barrier(group)):
        _expect_death(wait)
    assert works[0].is_completed()
    assert not works[0].is_success()
    assert isinstance(works[0].exception(), PeerLostError)


def lose_a_rank_in_backward(control: Communicator) -> None:
    """One rank dies before its backward: torch's own class, which waits in C++, raises on the others."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    model(torch.ones(2, 300)).sum().backward()
    if control.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    _expect_death(lambda: model(torch.ones(2, 300)).sum().backward())


def _expect_death(call: Callable[[], object]) -> None:
    said = ""
    try:
        call()
    except RuntimeError as error:
        said = str(error)
    assert re.search(r"rank 1 \(process \d+\) died", said), said


def ask_for_different_things(control: Communicator) -> str:
    try:
        dist.all_reduce(torch.ones(2 + control.rank))
    except ValueError as error:
        dist.barrier()
        return str(error)
    return ""


def wait_with_a_timeout(control: Communicator) -> str:
    """Rank 0 waits for a while for what the others do later; the exchange is not lost."""
    store, tensor, said = dist.distributed_c10d._get_default_store(), torch.ones(5), ""
    if control.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        try:
            work.wait(timedelta(milliseconds=20))
        except TimeoutError as error:
            said = str(error)
        store.set("waited", "")
        work.wait(timedelta(seconds=30))
    else:
        store.wait(["waited"], timedelta(seconds=30))
        dist.all_reduce(tensor)
    assert bool(tensor.eq(control.size).all())
    return said


def without_shared_memory(control: Communicator) -> tuple[list[str], float]:
    """Return the warnings of two groups whose ranks cannot share memory, and a sum over Gloo in their place."""
    samestep.comm.shm.gather.missing = lambda: "no memory to share in this test" if control.rank == 1 else ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = [dist.new_group(backend="samestep") for _ in range(2)]
    tensor = torch.ones(3)
    for group in groups:
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
        dist.barrier(group)
    return [str(w.message) for w in caught], tensor[0].item()


def fork_in_between(control: Communicator) -> None:
    """A forked process ends its copy of the group; this one's goes on."""
    work = dist.all_reduce(torch.ones(10), async_op=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            dist.group.WORLD.shutdown()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    work.wait()
    dist.barrier()


def messages(control: Communicator) -> None:
    """Messages of all kinds, beside a collective under way."""
    rank, size = control.rank, control.size
    work = dist.all_reduce(torch.ones(10), async_op=True)
    mine, theirs = torch.full((4,), float(rank)), torch.zeros(4)
    right, left = (rank + 1) % size, (rank - 1) % size
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]):
        request.wait()
    assert bool(theirs.eq(left).all())
    if rank == 0:
        sources = {dist.recv(theirs) for _ in range(size - 1)}
        assert sources == set(range(1, size))
    else:
        dist.send(mine, 0)
    work.wait()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))


def under_inference_mode(control: Communicator) -> None:
    """Tensors that only code under inference_mode may change take results, whichever thread puts them there."""
    with torch.inference_mode():
        tensors = [torch.ones(100) for _ in range(20)]
        futures = [dist.all_reduce(t, async_op=True).get_future() for t in tensors]
        dist.all_reduce(first := torch.ones(3))
    for future in futures:
        future.wait()
    assert all(bool(t.eq(control.size).all()) for t in (*tensors, first))
    after = torch.ones(3)
    dist.all_reduce(after)
    assert torch.equal(after, first.clone())


def train(control: Communicator, path: str) -> dict[str, int]:
    """See `backend_training`, whose imports take seconds, and warn."""
    warnings.simplefilter("ignore", DeprecationWarning)
    compared: dict[str, int] = importlib.import_module("backend_training").train(path)
    return compared

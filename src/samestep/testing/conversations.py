"""What a right communicator does with messages, objects, works and groups: one function for each promise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Op,
    Recv,
    ReduceScatter,
    Reduction,
    Send,
)
from samestep.errors import MismatchError
from samestep.testing.samples import DTYPES, expect, name, refused, sample, samples, total

__all__ = ["PROMISES"]


def messages_go_around_the_ring(comm: Communicator) -> None:
    """Every rank sends to the next and receives from the one before, then the other way round."""
    for step in (1, -1) if comm.size > 1 else ():
        target, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        for dtype in DTYPES:
            for shape in ((3, 5), (), (0,)):
                mine, got = sample(comm, shape, dtype), sample(comm, shape, dtype)
                works = [comm.start(Recv(got, source, 3)), comm.start(Send(mine, target, 3))]
                _wait(works)
                expect(comm, f"recv(peer={source}) of {name(got)}", got, sample(comm, shape, dtype, source))
                expect(comm, f"send(peer={target}) of {name(mine)}", mine, sample(comm, shape, dtype))


def messages_are_told_apart_by_tag(comm: Communicator) -> None:
    """Each pair exchanges messages of three tags, which are asked for in another order than they were sent in."""
    tags = (7, 0, 2**30 - 1)
    for a, b in _pairs(comm.size):
        if comm.rank in (a, b):
            peer = a + b - comm.rank
            got = {tag: sample(comm, (4,), torch.float32) for tag in tags}
            works = [comm.start(Recv(got[tag], peer, tag)) for tag in sorted(tags)]
            works += [comm.start(Send(sample(comm, (4,), torch.float32) + i, peer, tag)) for i, tag in enumerate(tags)]
            _wait(works)
            for i, tag in enumerate(tags):
                theirs = sample(comm, (4,), torch.float32, peer) + i
                expect(comm, f"recv(peer={peer}, tag={tag}) of {name(theirs)}", got[tag], theirs)


def messages_of_one_tag_keep_their_order(comm: Communicator) -> None:
    """The lower rank of each pair says three things and hears them back; tensors may have any strides."""
    for a, b in _pairs(comm.size):
        said = [sample(comm, (2, 3), torch.int64, rank=a + i) for i in range(3)]
        if comm.rank == a:
            for tensor in said:
                comm.send(tensor.t(), b)
        if comm.rank == b:
            for i, tensor in enumerate(said):
                heard = torch.empty(2, 3, dtype=torch.int64, device=comm.device).t()
                if comm.recv(heard, a) is not heard:
                    raise AssertionError(f"rank {comm.rank}: recv returned another tensor than it was given")
                expect(comm, f"message {i} of recv(peer={a}) of {name(heard)}", heard, tensor.t())


def objects_of_any_kind_arrive(comm: Communicator) -> None:
    items = [None, (), "x" * 100_000, {"rank": 3, "list": [1.5, b"\0"]}, *range(comm.size)]
    mine = items[-1 - comm.rank :]
    gathered = comm.all_gather_object(mine)
    if gathered != [items[-1 - rank :] for rank in range(comm.size)]:
        raise AssertionError(f"rank {comm.rank}, all_gather_object: got {str(gathered)[:300]}")
    for source in range(comm.size):
        for item in items:
            got = comm.broadcast_object(item if comm.rank == source else object, source)
            if got != item:
                raise AssertionError(f"rank {comm.rank}, broadcast_object(source={source}): got {str(got)[:300]}")


def barriers_hold_everyone(comm: Communicator) -> None:
    """One rank after the other leaves a mark and enters; none of the others may come out without finding it.

    Where that fails, other ranks may still leave marks while the folder is removed.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-", ignore_cleanup_errors=True) as own:
        folder = Path(comm.broadcast_object(own))
        for turn in range(5 * comm.size):
            mark = folder / str(turn)
            if comm.rank == turn % comm.size:
                mark.touch()
            comm.barrier()
            if not mark.exists():
                raise AssertionError(f"rank {comm.rank}, barrier: left before rank {turn % comm.size} had entered")
        comm.barrier()


def works_may_be_waited_for_in_any_order(comm: Communicator) -> None:
    """Six exchanges are under way at once; the last is waited for first, and each twice."""
    size, kind = comm.size, torch.float32
    for order in (slice(None, None, -1), slice(None), slice(None, None, 2)):
        asked = _requests(comm)
        works = [comm.start(op) for op, _, _ in asked]
        for work in works[order] + works:
            _wait([work])
        for op, result, expected in asked:
            expect(
                comm, f"one of several exchanges under way ({type(op).__name__} of {name(result)})", result, expected
            )
    tensor = sample(comm, (3,), kind)
    work = comm.start(AllReduce(tensor, Reduction.MEAN))
    work.wait()
    tensor.fill_(size)
    work.wait()
    expect(comm, "a second wait, which must leave the result alone", tensor, torch.full_like(tensor, size))


def groups_are_worlds_of_their_own(comm: Communicator) -> None:
    """Groups that cover all ranks, one, some, and each other's; used in turn and under way at once."""
    size = comm.size
    half = size // 2
    covers = (range(size), [size - 1], range(0, size, 2), range(1, size, 2), range(half + 1), range(half, size))
    wanted = [list(ranks) for ranks in covers if len(ranks)]
    groups = [comm.split(reversed(ranks)) for ranks in wanted]
    for ranks, group in zip(wanted, groups, strict=True):
        _membership(comm, ranks, group)
    under_way: list[tuple[Communicator, Tensor, Work]] = []
    for group in groups:
        if group is not None:
            tensor = sample(group, (5,), torch.float32)
            under_way.append((group, tensor, group.start(AllReduce(tensor))))
    for group, tensor, work in reversed(under_way):
        work.wait()
        everyone = samples(group, (5,), torch.float32)
        expect(comm, f"all_reduce in a group of {group.size}", tensor, total(everyone, Reduction.SUM))
    for ranks, group in zip(wanted, groups, strict=True):
        if group is not None:
            _talk(comm, ranks, group)
            group.close()
    comm.barrier()


def groups_can_be_split_and_made_again(comm: Communicator) -> None:
    """Groups of groups, where ranks are in different numbers of them; the same ranks again, with and without close."""
    inner = comm.split(range(max(1, comm.size - 1)))
    if inner is not None:
        pairs = [[rank, rank + 1] for rank in range(inner.size - 1)] + [[0]]
        for ranks in [*pairs, *pairs]:
            group = inner.split(ranks)
            _membership(inner, ranks, group)
            if group is not None:
                _talk(inner, ranks, group)
        for _ in range(2):
            again = inner.split([inner.size - 1, 0] if inner.size > 1 else [0])
            if again is not None:
                _talk(inner, sorted({0, inner.size - 1}), again)
                again.close()
    comm.barrier()


def groups_of_nobody_are_refused(comm: Communicator) -> None:
    wrong: tuple[tuple[list[Any], type[Exception]], ...] = (
        ([], ValueError),
        ([comm.size], ValueError),
        ([-1], ValueError),
        ([0, 0], ValueError),
        ([0.0], TypeError),
    )
    for ranks, kind in wrong:
        refused(comm, f"split({ranks})", partial(comm.split, ranks), kind)
    if comm.size > 1:
        said = refused(comm, "split with different ranks", partial(comm.split, [comm.rank]), MismatchError)
        for rank in range(comm.size):
            if f"rank {rank} named [{rank}]" not in said:
                raise AssertionError(f"rank {comm.rank}, split with different ranks: rank {rank} is not in {said!r}")
    comm.barrier()


def wrong_requests_are_refused(comm: Communicator) -> None:
    """What no transport can serve is refused on the spot, and has no effect on the exchanges after it."""
    size = comm.size
    good = sample(comm, (size, 2), torch.float32)
    flat, splits = good.view(-1), (2,) * size
    wrong: tuple[tuple[Any, type[Exception]], ...] = (
        (AllReduce(good.to_sparse()), ValueError),
        (AllReduce(torch.ones(3, 2, device=comm.device).t()), ValueError),
        (Broadcast(good, size), ValueError),
        (Broadcast(good, -1), ValueError),
        (AllGather(good, good.new_empty(3)), ValueError),
        (ReduceScatter(good.new_empty(3), good), ValueError),
        (AllToAll(flat, flat, splits, splits[1:]), ValueError),
        (AllToAll(good, good, splits, splits), ValueError),
        (Send(good, comm.rank), ValueError),
        (Recv(good, comm.rank), ValueError),
        (Send(good, size), ValueError),
        (Recv(good, (comm.rank + 1) % size, -1), ValueError),
        (AllReduce([1.0]), TypeError),  # type: ignore[arg-type]
        (good, TypeError),
    )
    for number, (op, kind) in enumerate(wrong):
        refused(comm, f"wrong request {number}", partial(comm.start, op), kind)
    expect(comm, "all_gather after wrong requests", comm.all_gather(good), samples(comm, (size, 2), good.dtype))


PROMISES: tuple[Callable[[Communicator], None], ...] = (
    messages_go_around_the_ring,
    messages_are_told_apart_by_tag,
    messages_of_one_tag_keep_their_order,
    objects_of_any_kind_arrive,
    barriers_hold_everyone,
    works_may_be_waited_for_in_any_order,
    groups_are_worlds_of_their_own,
    groups_can_be_split_and_made_again,
    groups_of_nobody_are_refused,
    wrong_requests_are_refused,
)


def _pairs(size: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(size) for b in range(a + 1, size)]


def _wait(works: list[Work]) -> None:
    for work in works:
        if work.done() not in (True, False):
            raise AssertionError(f"{type(work).__name__}.done(): expected a bool, got {work.done()!r}")
        work.wait()
        if not work.done():
            raise AssertionError(f"{type(work).__name__}.done() is false after wait()")


def _requests(comm: Communicator) -> list[tuple[Op, Tensor, Tensor]]:
    """Return requests of several kinds and dtypes, each with the tensor that its result goes to and what it must be."""
    size, shape = comm.size, (comm.size, 3)
    parts = {dtype: samples(comm, shape, dtype) for dtype in (torch.float32, torch.int16, torch.bool)}
    mine = {dtype: parts[dtype][comm.rank].clone() for dtype in parts}
    whole, rows = parts[torch.float32].new_empty(size, *shape), mine[torch.float32].new_empty(3)
    flat, splits = torch.empty_like(mine[torch.bool]).view(-1), (3,) * size
    floats = mine[torch.float32].clone(), mine[torch.float32].clone()
    sums = total(parts[torch.float32], Reduction.SUM)
    asked: list[tuple[Op, Tensor, Tensor]] = [
        (AllReduce(floats[0]), floats[0], sums),
        (AllGather(whole, mine[torch.float32]), whole, parts[torch.float32]),
        (Broadcast(floats[1], size - 1), floats[1], parts[torch.float32][-1]),
        (AllReduce(mine[torch.int16]), mine[torch.int16], total(parts[torch.int16], Reduction.SUM)),
        (ReduceScatter(rows, mine[torch.float32]), rows, sums[comm.rank]),
        (AllToAll(flat, mine[torch.bool].view(-1), splits, splits), flat, parts[torch.bool][:, comm.rank].reshape(-1)),
    ]
    return [*asked, (Barrier(), rows, sums[comm.rank])]


def _membership(parent: Communicator, ranks: list[int], group: Communicator | None) -> None:
    expected = (ranks.index(parent.rank), len(ranks)) if parent.rank in ranks else None
    got = None if group is None else (group.rank, group.size)
    if got != expected:
        raise AssertionError(
            f"rank {parent.rank} of {parent.size}, split({ranks}): expected (rank, size) {expected}, got {got}"
        )


def _talk(parent: Communicator, ranks: list[int], group: Communicator) -> None:
    """Use `group`, of `parent`'s `ranks`, for some of everything."""
    heard = group.all_gather_object(parent.rank)
    if heard != ranks:
        raise AssertionError(f"rank {parent.rank}, all_gather_object in the group {ranks}: got {heard}")
    spoken = group.broadcast(torch.tensor(parent.rank, device=group.device), group.size - 1)
    expect(parent, f"broadcast in the group {ranks}", spoken, torch.tensor(ranks[-1], device=group.device))
    if group.size > 1 and group.rank in (0, group.size - 1):
        last = group.size - 1
        tensor = sample(group, (3,), torch.float32)
        if group.rank == 0:
            group.send(tensor, last)
        else:
            group.recv(tensor, 0)
        expect(parent, f"a message in the group {ranks}", tensor, sample(group, (3,), torch.float32, 0))
    group.barrier()

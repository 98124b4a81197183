"""How each exchange is made of meetings, as generators, each of which yields the meeting that it waits for next.

What was written before `room.come()` is shown at that meeting; when the generator goes on, all have come to the
meeting that it yielded, and what they have shown there may be read. Tensors go through the slots in pieces, so memory
is bounded. All ranks make the same meetings, as they ask for the same exchange, which they find out at the first one:
so a generator yields the first, and comes to the second when it goes on. Later ones it need not yield if all have come
already.

All-reduce has three ways. Which is taken depends on sizes, and on whether all ranks have the loops of `_kernels.c`; the
bits of the result depend on neither:

*all for themselves*  each rank shows a piece and adds what all have shown: one meeting a piece, and reads of `size`
                      pieces
*range by range*      each rank owns a range of every piece, adds it, and shows the result at a later meeting, with
                      another piece: it reads less if there are many ranks (where loops are compiled, the first way
                      is faster all the same: 46 ms against 62 for 64 MiB on 4 ranks of 2 cores)
*in place*            the tensors lie in the arena: the owner of a range adds it from where it is, to where it belongs,
                      in pieces that stay in the cache between being read and being written: two meetings, no copy
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from samestep.comm.ops import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Op, ReduceScatter, Reduction
from samestep.comm.ordered import element_range
from samestep.comm.shm import kernels
from samestep.comm.shm.board import MASK
from samestep.comm.shm.header import Place
from samestep.comm.shm.reduce import reduce_into
from samestep.comm.shm.room import LAG, Room

__all__ = ["Disagreement", "Meetings", "exchange", "is_worth_a_place", "reduce_in_place", "scaled"]

Meetings = Generator[int, None, None]

# Up to here a tensor goes through the slots even if it lies in the arena: one meeting instead of two.
_SMALL_BYTES = 64 * 1024
# The most that a piece of the first way has: larger ones leave the second-level cache, smaller ones cost more in Python
# (64 MiB on 2 ranks took 22.7 ms of CPU time with 256 KiB, 19.8 with 512 KiB, 19.0 with 1 MiB; 256 KiB 143, 92, 96 us).
_PIECE_BYTES = 512 * 1024
# The same where the loop over pieces is compiled.
_COMPILED_PIECE_BYTES = 128 * 1024
# The same for one rank's part of a piece in the way that needs no copy.
_IN_PLACE_BYTES = 128 * 1024
# From this number of ranks on, larger tensors are added range by range.
_MANY_RANKS = 3


class Disagreement(Exception):  # noqa: N818 - never seen by users
    """Ranks ask for different things, and all of them have found out."""


def exchange(room: Room, op: Op) -> Meetings:
    """Return the meetings that `op` takes."""
    match op:
        case AllReduce():
            return _all_reduce(room, op)
        case Broadcast(tensor=tensor, source=source):
            return _broadcast(room, tensor.view(-1), source)
        case AllGather(output=output, tensor=tensor):
            return _all_gather(room, output.view(room.size, tensor.numel()), tensor.view(-1))
        case ReduceScatter(output=output, tensor=tensor, reduction=reduction):
            return _reduce_scatter(room, output.view(-1), tensor.view(room.size, output.numel()), reduction)
        case AllToAll():
            return _all_to_all(room, op)
        case Barrier():
            return _meet(room)
        case _:
            raise AssertionError(f"{type(op).__name__} is no exchange of all ranks")


def is_worth_a_place(op: Op) -> TypeGuard[AllReduce]:
    """Tell whether `op` could be done where its tensor lies, if that is in the arena."""
    return isinstance(op, AllReduce) and op.tensor.nbytes > _SMALL_BYTES


def scaled(room: Room, op: Op, place: Place | None) -> Op:
    """Multiply what `op` has by its scale, unless that is done on the way."""
    if not isinstance(op, AllReduce) or op.scale == 1.0 or (place is None and _is_compiled(room, op)):
        return op
    op.tensor.mul_(op.scale)
    return replace(op, scale=1.0)


def reduce_in_place(room: Room, op: AllReduce, places: Sequence[Place]) -> Meetings:
    """Reduce tensors that lie at `places` of the arena, one of each rank; all have met, so all are ready."""
    dtype = op.tensor.dtype
    own = element_range(op.tensor.numel(), room.size, room.rank)
    if room.kernels and kernels.serve(op):
        addresses = room.addresses(places, own.start * dtype.itemsize)
        kernels.reduce_all(addresses, len(own), dtype.itemsize, kernels.divisor_of(op, room.size))
        yield room.come()
        return
    for parts in room.pieces(places, dtype, own, max(1, _IN_PLACE_BYTES // dtype.itemsize)):
        first, *others = parts
        reduce_into(first, parts, op.reduction)
        for other in others:
            other.copy_(first)
    yield room.come()


def _meet(room: Room) -> Meetings:
    yield room.come()


def _all_reduce(room: Room, op: AllReduce) -> Meetings:
    tensor, reduction, num_bytes = op.tensor, op.reduction, op.tensor.nbytes
    if _is_compiled(room, op):
        return _reduce_compiled(room, op)
    if num_bytes > _SMALL_BYTES and room.size >= _MANY_RANKS:
        return _reduce_by_range(room, tensor.view(-1), reduction)
    if num_bytes > _PIECE_BYTES or num_bytes > room.slot_bytes:
        return _reduce_pieces(room, tensor.view(-1), reduction)
    return _reduce_one_piece(room, tensor, reduction)


def _reduce_one_piece(room: Room, tensor: Tensor, reduction: Reduction) -> Meetings:
    room.all_shown(room.meeting + 1, tensor)[room.rank].copy_(tensor)
    yield (met := room.come())
    _reduce_shown(room, met, tensor, reduction)


def _reduce_shown(room: Room, met: int, piece: Tensor, reduction: Reduction) -> None:
    parts = room.all_shown(met, piece)
    if room.rank < 2:  # its own part is nearer than what it has shown of it
        parts = [*parts[: room.rank], piece, *parts[room.rank + 1 :]]
    reduce_into(piece, parts, reduction)


def _reduce_pieces(room: Room, flat: Tensor, reduction: Reduction) -> Meetings:
    def show(_: int, piece: Tensor) -> None:
        room.all_shown(room.meeting + 1, piece)[room.rank].copy_(piece)

    def take(met: int, _: int, piece: Tensor) -> None:
        _reduce_shown(room, met, piece, reduction)

    return _stream(room, _pieces(flat, min(_PIECE_BYTES, room.slot_bytes) // flat.element_size()), show, take)


def _is_compiled(room: Room, op: AllReduce) -> bool:
    return room.kernels and op.tensor.nbytes > _SMALL_BYTES and kernels.serve(op)


def _reduce_compiled(room: Room, op: AllReduce) -> Meetings:
    """The first way, with the loop over the pieces compiled; it yields where a peer is not there at once."""
    tensor, item_bytes = op.tensor, op.tensor.element_size()
    piece = min(_COMPILED_PIECE_BYTES, room.slot_bytes) // item_bytes
    num_pieces, first = -(-tensor.numel() // piece), room.meeting + 1
    shown = taken = 0
    while True:
        shown, taken = kernels.stream(
            room.board_addresses,
            room.rank,
            room.slot_bytes,
            tensor.data_ptr(),
            tensor.numel(),
            item_bytes,
            op.scale,
            kernels.divisor_of(op, room.size),
            piece,
            first & MASK,
            shown,
            taken,
        )
        room.meeting = first + shown - 1
        if taken == num_pieces:
            return
        yield first + taken


def _reduce_by_range(room: Room, flat: Tensor, reduction: Reduction) -> Meetings:
    """A slot has a piece, and then the result of the range that its rank owns of a piece before."""
    dtype, size, rank = flat.dtype, room.size, room.rank
    most = (room.slot_bytes // flat.element_size() - size) * size // (size + 1)
    pieces = deque(flat.split(most))
    shown: deque[tuple[int, Tensor | None, Tensor | None]] = deque()  # meeting, piece, and of which piece the result
    reduced: Tensor | None = None
    lag = 0
    while pieces or shown or reduced is not None:
        if pieces or reduced is not None:
            piece = pieces.popleft() if pieces else None
            if piece is not None:
                room.next(dtype, piece.numel()).copy_(piece)
            shown.append((room.come(), piece, reduced))
            reduced = None
            if pieces and len(shown) <= lag:
                continue
        met, piece, result_of = shown.popleft()
        if not (lag and room.all_came(met)):
            yield met
        lag = LAG
        if result_of is not None:
            _take_results(room, met, result_of, most)
        if piece is not None:
            own = element_range(piece.numel(), size, rank)
            result = room.next(dtype, len(own), most)
            reduce_into(result, [room.shown(met, r, dtype, len(own), own.start) for r in range(size)], reduction)
            piece[own.start : own.stop].copy_(result)
            reduced = piece


def _take_results(room: Room, met: int, piece: Tensor, start: int) -> None:
    for rank in range(room.size):
        if rank != room.rank:
            own = element_range(piece.numel(), room.size, rank)
            piece[own.start : own.stop].copy_(room.shown(met, rank, piece.dtype, len(own), start))


def _broadcast(room: Room, flat: Tensor, source: int) -> Meetings:
    def show(_: int, piece: Tensor) -> None:
        if room.rank == source:
            room.next(flat.dtype, piece.numel()).copy_(piece)

    def take(met: int, _: int, piece: Tensor) -> None:
        if room.rank != source:
            piece.copy_(room.shown(met, source, flat.dtype, piece.numel()))

    return _stream(room, _pieces(flat, room.slot_bytes // flat.element_size()), show, take)


def _all_gather(room: Room, output: Tensor, flat: Tensor) -> Meetings:
    def show(_: int, piece: Tensor) -> None:
        room.next(flat.dtype, piece.numel()).copy_(piece)

    def take(met: int, start: int, piece: Tensor) -> None:
        for rank in range(room.size):
            output[rank, start : start + piece.numel()].copy_(room.shown(met, rank, flat.dtype, piece.numel()))

    return _stream(room, _pieces(flat, room.slot_bytes // flat.element_size()), show, take)


def _reduce_scatter(room: Room, output: Tensor, rows: Tensor, reduction: Reduction) -> Meetings:
    dtype, size = output.dtype, room.size

    def show(start: int, piece: Tensor) -> None:
        count = piece.numel()
        room.next(dtype, size * count).view(size, count).copy_(rows[:, start : start + count])

    def take(met: int, _: int, piece: Tensor) -> None:
        count = piece.numel()
        reduce_into(piece, [room.shown(met, rank, dtype, count, room.rank * count) for rank in range(size)], reduction)

    return _stream(room, _pieces(output, room.slot_bytes // (size * output.element_size())), show, take)


def _all_to_all(room: Room, op: AllToAll) -> Meetings:
    """The first meeting tells all ranks all lengths; then as many follow as the longest message has pieces."""
    size, dtype = room.size, op.tensor.dtype
    room.next(torch.int64, 2 * size).copy_(torch.tensor((*op.input_splits, *op.output_splits)))
    yield (met := room.come())
    lengths = torch.stack([room.shown(met, rank, torch.int64, 2 * size) for rank in range(size)])
    if not torch.equal(lengths[:, :size], lengths[:, size:].t()):
        raise Disagreement
    longest, most = int(lengths.max()), room.slot_bytes // (size * op.tensor.element_size())
    sends, receives = op.tensor.split(op.input_splits), op.output.split(op.output_splits)
    for start in range(0, longest, most):
        for target, message in enumerate(sends):
            piece = message[start : start + most]
            room.next(dtype, piece.numel(), target * most).copy_(piece)
        yield (met := room.come())
        for source, message in enumerate(receives):
            piece = message[start : start + most]
            piece.copy_(room.shown(met, source, dtype, piece.numel(), room.rank * most))


def _stream(
    room: Room,
    pieces: Iterator[tuple[int, Tensor]],
    show: Callable[[int, Tensor], None],
    take: Callable[[int, int, Tensor], None],
) -> Meetings:
    """Show each piece at a meeting of its own, and take from what was shown there up to `LAG` meetings later."""
    shown: deque[tuple[int, int, Tensor]] = deque()
    lag = 0
    for start, piece in pieces:
        show(start, piece)
        shown.append((room.come(), start, piece))
        if len(shown) > lag:
            if not (lag and room.all_came(shown[0][0])):
                yield shown[0][0]
            take(*shown.popleft())
            lag = LAG
    while shown:
        if not room.all_came(shown[0][0]):
            yield shown[0][0]
        take(*shown.popleft())


def _pieces(flat: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Return pieces of `most` elements with where they begin; one, empty, of a tensor without elements."""
    return zip(itertools.count(0, most), flat.split(most), strict=False)

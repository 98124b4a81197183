"""The room of a group: a few slots of each rank's memory, used in turn, and the tensors that lie in shared memory.

A rank writes into its slot for the next meeting, comes to the meeting, and reads what the others have shown once all
have come. It may come to `LAG` further meetings before it reads: so ranks need not wait for each other at each one.

The slots are enough: who comes to meeting n - 1 has read what was shown at n - 2 - LAG, so who has seen all come to
n - 1 - LAG knows that all have read n - 2 - 2 * LAG, and may write for n where that was.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.comm.shm.board import BOARD_BYTES, Board
from samestep.comm.shm.header import Place
from samestep.comm.shm.memory import Mapping

__all__ = ["Room", "in_dtype", "room_bytes"]

LAG = 1
NUM_SLOTS = 2 * LAG + 2

# Views that are kept, so that an exchange that comes again doesn't make them again (2 to 5 us each).
_MOST_VIEWS = 1024


class _ArenaTensor:
    """Memory of the same length on every rank: `bytes_of[r]` is rank r's.

    It does not keep this rank's alive, which belongs to whoever the tensor was made for.
    """

    def __init__(self, mappings: Sequence[Mapping], rank: int) -> None:
        self.addresses = tuple(m.address for m in mappings)
        self.bytes_of = [_bytes(m.buffer if r != rank else m.borrowed()) for r, m in enumerate(mappings)]
        self.address, self.num_bytes = mappings[rank].address, mappings[rank].num_bytes


def room_bytes(slot_bytes: int) -> int:
    """Return how much memory each rank needs: its board and its slots."""
    return BOARD_BYTES + NUM_SLOTS * slot_bytes


class Room:
    """What an exchange sees of the group."""

    def __init__(
        self, mappings: Sequence[Mapping], rank: int, slot_bytes: int, fence: Callable[[], None], kernels: bool
    ) -> None:
        self.rank, self.size, self.slot_bytes = rank, len(mappings), slot_bytes
        self.boards = [Board(m) for m in mappings]
        self.kernels = kernels  # whether compiled loops are used, on all ranks alike
        self.board_addresses = tuple(m.address for m in mappings)
        self.meeting = 0  # the number of the last one that this rank came to
        self._own, self._fence = self.boards[rank], fence
        self._peers = [board for r, board in enumerate(self.boards) if r != rank]
        self._arena: dict[int, _ArenaTensor] = {}
        self._num_made = 0
        self._dropped: deque[int] = deque()
        self._slots = [
            [_bytes(m.buffer)[BOARD_BYTES + turn * slot_bytes :][:slot_bytes] for turn in range(NUM_SLOTS)]
            for m in mappings
        ]
        self._views: dict[tuple[object, ...], Tensor] = {}
        self._whole: dict[tuple[object, ...], list[Tensor]] = {}
        self._pieces: dict[tuple[object, ...], list[list[Tensor]]] = {}

    def come(self) -> int:
        """Come to the next meeting: all that was written until now is shown. Return its number."""
        self.meeting = meeting = self.meeting + 1
        self._fence()
        self._own.come_to(meeting)
        self._fence()
        for peer in self._peers:
            if peer.sleeping:
                self._own.wake()
                break
        return meeting

    def all_came(self, meeting: int) -> bool:
        """Tell whether all have come to `meeting`; what they have shown there may be read then."""
        for peer in self._peers:
            if not peer.reached(meeting):
                return False
        self._fence()
        return True

    def next(self, dtype: torch.dtype, count: int, start: int = 0) -> Tensor:
        """Return `count` elements, from `start` on, of what this rank shows at the next meeting."""
        return self._view((self.meeting + 1) % NUM_SLOTS, self.rank, dtype, count, start)

    def shown(self, meeting: int, rank: int, dtype: torch.dtype, count: int, start: int = 0) -> Tensor:
        """Return `count` elements, from `start` on, of what `rank` showed at `meeting`, one of the last `LAG` + 1."""
        return self._view(meeting % NUM_SLOTS, rank, dtype, count, start)

    def all_shown(self, meeting: int, tensor: Tensor) -> list[Tensor]:
        """Return what all ranks showed at `meeting`, or are to show there, each like `tensor`; not to be changed."""
        key = (meeting % NUM_SLOTS, tensor.dtype, tensor.shape)
        found = self._whole.get(key)
        if found is None:
            count, slot = tensor.numel(), meeting % NUM_SLOTS
            found = [self._view(slot, r, tensor.dtype, count, 0).view(tensor.shape) for r in range(self.size)]
            if len(self._whole) >= _MOST_VIEWS:
                self._whole.clear()
            self._whole[key] = found
        return found

    def add(self, mappings: Sequence[Mapping]) -> Tensor:
        """Take memory of each rank into the arena; return this rank's, as bytes. With the last tensor that uses it, it
        leaves the arena again."""
        number, mine = self._num_made, mappings[self.rank]
        self._num_made += 1
        self._arena[number] = _ArenaTensor(mappings, self.rank)
        weakref.finalize(mine.buffer, self._dropped.append, number).atexit = False
        return _bytes(mine.buffer)

    @property
    def num_arena_tensors(self) -> int:
        """How many tensors the arena has."""
        self._forget_dropped()
        return len(self._arena)

    def place(self, tensor: Tensor) -> Place | None:
        """Return where in the arena `tensor`, which is contiguous, lies; None if elsewhere."""
        self._forget_dropped()
        if self._arena:
            address = tensor.data_ptr()
            for number, whole in self._arena.items():
                if 0 <= address - whole.address < whole.num_bytes:
                    return Place(number, address - whole.address)
        return None

    def addresses(self, places: Sequence[Place], start_bytes: int) -> tuple[int, ...]:
        """Return where in this process tensors in the arena, one of each rank, have the byte `start_bytes`."""
        return tuple(self._arena[p.number].addresses[r] + p.offset + start_bytes for r, p in enumerate(places))

    def pieces(self, places: Sequence[Place], dtype: torch.dtype, own: range, most: int) -> list[list[Tensor]]:
        """Return views of the elements `own` of tensors in the arena, one of each rank: a list for each piece.

        A piece has `most` elements or less.
        """
        key = (*places, dtype, own, most)
        found = self._pieces.get(key)
        if found is None:
            size = dtype.itemsize
            whole = [
                in_dtype(
                    self._arena[p.number].bytes_of[r][p.offset + own.start * size : p.offset + own.stop * size], dtype
                )
                for r, p in enumerate(places)
            ]
            found = [list(piece) for piece in zip(*(w.split(most) for w in whole), strict=True)] if len(own) else []
            if len(self._pieces) >= _MOST_VIEWS:
                self._pieces.clear()
            self._pieces[key] = found
        return found

    def close(self) -> None:
        """Let go of all memory; what others hold of the arena stays."""
        self.boards, self._peers, self._slots = [], [], []
        self._arena.clear()
        del self._own
        self._views.clear()
        self._whole.clear()
        self._pieces.clear()

    def _forget_dropped(self) -> None:
        while self._dropped:
            self._arena.pop(self._dropped.popleft(), None)  # closing has let go of all
            self._pieces.clear()

    def _view(self, turn: int, rank: int, dtype: torch.dtype, count: int, start: int) -> Tensor:
        key = (turn, rank, dtype, count, start)
        found = self._views.get(key)
        if found is None:
            size = dtype.itemsize
            found = in_dtype(self._slots[rank][turn][start * size : (start + count) * size], dtype)
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = found
        return found


def in_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as another dtype. Such a view made in inference mode could not be written to outside of it."""
    with torch.inference_mode(False):
        return flat.view(dtype)


def _bytes(buffer: Any) -> Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=torch.uint8)

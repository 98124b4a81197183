"""One slot's share of an order of which nobody knows the length before its end. Pure.

Ranks take turns along the order as in `sharding`, by the same rules at the end; what is dealt may be anything. A turn,
one item for each rank, belongs to one loading worker of every rank: to worker t % workers, where t counts turns. So
with "pad" and "drop" the same worker of every rank gets as many items as on the others, and makes as many batches.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from samestep.data.sharding import Remainder

__all__ = ["Slot"]

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """Who takes a share: one loading worker of one rank. Numbers out of range are the caller's to refuse."""

    ranks: int
    rank: int
    remainder: Remainder = "pad"
    workers: int = 1
    worker: int = 0

    def share(self, order: Iterable[T], start: int = 0) -> Iterator[T]:
        """Yield this slot's items of `order` from position `start` on; padding goes round to the order's beginning.

        Reads to the end of a turn before it yields from it, and never beyond. Keeps as many items as there are ranks.
        """
        first: list[T] = []
        turn: list[T] = []
        length = turns = 0
        for item in order:
            length += 1
            if len(first) < self.ranks:
                first.append(item)
            if length <= start:
                continue
            turn.append(item)
            if len(turn) == self.ranks:
                mine, turn = turn[self.rank], []
                turns += 1
                if self._is_mine(turns - 1):
                    yield mine
        if not turn or self.remainder == "drop" or not self._is_mine(turns):
            return
        if self.rank < len(turn):
            yield turn[self.rank]
        elif self.remainder == "pad":
            yield first[(start + turns * self.ranks + self.rank) % length]

    def count(self, length: int, start: int = 0) -> int:
        """Return how many items `share` yields of an order of this length, over all loading workers of the rank."""
        rest = max(length - start, 0)
        whole, left = divmod(rest, self.ranks)
        extra = {"pad": left > 0, "drop": False, "keep": self.rank < left}[self.remainder]
        return whole + extra

    def _is_mine(self, turn: int) -> bool:
        return turn % self.workers == self.worker

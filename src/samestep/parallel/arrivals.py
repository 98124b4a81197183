"""Counting gradients in during one backward. Pure: it says how many buckets may leave, and someone else sends them."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.parallel.plan import Plan

__all__ = ["Arrivals", "learned"]


class Arrivals:
    """The gradients that have arrived in one backward; `expected[i]` arrivals make parameter i's complete.

    With `expected` None nothing is known yet, and no bucket may leave before the end.
    """

    def __init__(self, plan: Plan, bucket_of: Sequence[int], expected: Sequence[int] | None) -> None:
        self.order: list[int] = []
        self.ready = 0
        self._bucket_of = bucket_of
        self._left = None if expected is None else list(expected)
        self._waiting = [len(bucket.indices) for bucket in plan.buckets]

    def add(self, index: int) -> bool:
        """Count parameter `index` in; False if its bucket could have left without this one.

        Afterwards the first `ready` buckets of the plan, and no others, are complete.
        """
        self.order.append(index)
        if self._left is None:
            return True
        self._left[index] -= 1
        bucket = self._bucket_of[index]
        if self._left[index] < 0:
            return bucket >= self.ready
        if self._left[index] == 0:
            self._waiting[bucket] -= 1
            while self.ready < len(self._waiting) and self._waiting[self.ready] == 0:
                self.ready += 1
        return True


def learned(order: Sequence[int], count: int) -> list[int]:
    """Return how often each of `count` parameters is to be expected, after a backward with arrivals in `order`."""
    times = [0] * count
    for index in order:
        times[index] += 1
    return [max(1, n) for n in times]

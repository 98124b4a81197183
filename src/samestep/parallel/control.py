"""What ranks tell one another along with their gradients: a few numbers that are summed with the last bucket.

used      one number a parameter     how many ranks have a gradient for it
weight    one number                 the total weight of the ranks' samples
weighted  one number                 how many ranks gave a weight
failed    one number a rank          1 where the rank left its backward with an exception
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.errors import ReplicaError

__all__ = ["Control"]


class Control:
    """The layout of those numbers, for `num_parameters` parameters and `size` ranks."""

    def __init__(self, num_parameters: int, rank: int, size: int) -> None:
        self._count, self._rank, self._size = num_parameters, rank, size
        self.length = num_parameters + 2 + size

    def write(self, tail: Tensor, used: bytearray, weight: float | None, *, failed: bool) -> None:
        """Fill `tail` (`length` elements, float32, float64 or complex) with this rank's part."""
        tail.zero_()
        if self._count:
            tail[: self._count].copy_(torch.frombuffer(used, dtype=torch.uint8))
        if weight is not None:
            tail[self._count] = weight
            tail[self._count + 1] = 1
        if failed:
            tail[self._count + 2 + self._rank] = 1

    def total_weight(self, tail: Tensor) -> Tensor:
        """Return the summed weight as a tensor of no dimensions on the tail's device, without waiting for it."""
        weight = tail[self._count]
        return weight.real if weight.is_complex() else weight

    def unused(self, tail: Tensor) -> set[int]:
        """Return the parameters that no rank has a gradient for."""
        return {i for i, ranks in enumerate(_numbers(tail[: self._count])) if ranks == 0}

    def used(self, tail: Tensor) -> Tensor:
        """Return the part that says how many ranks have a gradient: int32, [parameters]."""
        used = tail[: self._count]
        return (used.real if used.is_complex() else used).to(torch.int32)

    def check(self, tail: Tensor) -> None:
        """Raise ReplicaError, on every rank alike, if the step must not be taken."""
        weight, weighted, *failed = _numbers(tail[self._count :])
        if any(failed):
            ranks = [rank for rank, flag in enumerate(failed) if flag]
            raise ReplicaError(
                f"rank {self._rank}: rank(s) {ranks} left backward with an exception, so this step's gradients are of "
                "no use on any rank: zero them and go on with the next step on all ranks, or end the program"
            )
        if weighted not in (0, self._size):
            raise ReplicaError(
                f"rank {self._rank}: {weighted:g} of {self._size} ranks gave a weight to backward; give one on every "
                "rank or on none"
            )
        if weighted and not weight > 0:
            raise ReplicaError(f"rank {self._rank}: the ranks' weights add up to {weight:g}; one must be above 0")


def _numbers(tensor: Tensor) -> list[float]:
    numbers: list[float] = (tensor.real if tensor.is_complex() else tensor).tolist()
    return numbers

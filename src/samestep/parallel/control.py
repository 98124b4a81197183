"""What ranks tell one another along with their gradients: a few numbers that are summed with the last bucket.

used      one number a parameter     how many ranks have a gradient for it
weight    one number                 the total weight of the ranks' samples
weighted  one number                 how many ranks gave a weight
outcome   one number a rank          what became of the rank's backward: see `Outcome`
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.errors import ReplicaError

__all__ = ["Control", "Outcome", "Verdict"]


class Outcome(enum.IntEnum):
    """What became of a rank's backward."""

    DONE = 0
    FAILED = 1  # it left with an exception
    SKIPPED = 2  # it asks all ranks to skip the step
    JOINED = 3  # it had no batch left, and takes part as others have


@dataclass(frozen=True)
class Verdict:
    """What follows for all ranks alike: `error` is raised, or the step skipped if `skipping` names ranks."""

    skipping: tuple[int, ...] = ()
    source: int = 0  # the rank whose buffers the others take: the first whose backward is done
    weighted: bool = False
    error: ReplicaError | None = None


class Control:
    """The layout of those numbers, for `num_parameters` parameters and `size` ranks."""

    def __init__(self, num_parameters: int, rank: int, size: int) -> None:
        self._count, self._rank, self._size = num_parameters, rank, size
        self.length = num_parameters + 2 + size

    def write(
        self,
        tail: Tensor,
        used: bytearray,
        weight: float | None,
        *,
        failed: bool,
        outcome: Outcome = Outcome.DONE,
    ) -> None:
        """Fill `tail` (`length` elements, float32, float64 or complex) with this rank's part."""
        tail.zero_()
        if self._count:
            tail[: self._count].copy_(torch.frombuffer(used, dtype=torch.uint8))
        if weight is not None:
            tail[self._count] = weight
            tail[self._count + 1] = 1
        if failed and outcome is Outcome.DONE:
            outcome = Outcome.FAILED
        if outcome is not Outcome.DONE:
            tail[self._count + 2 + self._rank] = outcome

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

    def num_training(self, tail: Tensor) -> Tensor:
        """Return how many ranks have not joined, as `total_weight` does its number."""
        outcomes = tail[self._count + 2 :]
        return (outcomes != Outcome.JOINED).sum().double()

    def judge(self, tail: Tensor) -> Verdict:
        """Return what all ranks have to do, looking at the numbers: on a device the host waits for them."""
        weight, weighted, *outcomes = _numbers(tail[self._count :])
        done = [rank for rank, outcome in enumerate(outcomes) if outcome == Outcome.DONE]
        skipping = tuple(rank for rank, outcome in enumerate(outcomes) if outcome == Outcome.SKIPPED)
        error = self._error(weight, weighted, outcomes, skipping)
        return Verdict(skipping, done[0] if done else 0, weighted > 0, error)

    def _error(
        self, weight: float, weighted: float, outcomes: Sequence[float], skipping: Sequence[int]
    ) -> ReplicaError | None:
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome == Outcome.FAILED]
        if failed:
            return ReplicaError(
                f"rank {self._rank}: rank(s) {failed} left backward with an exception, so this step's gradients are of "
                "no use on any rank: zero them and go on with the next step on all ranks, or end the program"
            )
        training = sum(outcome != Outcome.JOINED for outcome in outcomes)
        if skipping:
            return None
        if weighted not in (0, training):
            return ReplicaError(
                f"rank {self._rank}: {weighted:g} of {training} ranks gave a weight to backward; give one on every "
                "rank or on none"
            )
        if weighted and not weight > 0:
            return ReplicaError(f"rank {self._rank}: the ranks' weights add up to {weight:g}; one must be above 0")
        return None


def _numbers(tensor: Tensor) -> list[float]:
    numbers: list[float] = (tensor.real if tensor.is_complex() else tensor).tolist()
    return numbers

"""Sums of shared memory under stress: data read before they are there, or slots used again too early, show."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.comm.base import Communicator
from samestep.comm.ops import AllReduce

__all__ = ["check_sums"]

# Elements of int64 and how often, in turns of a hundred: one meeting each; several pieces of a small slot; more than
# 64 KiB, which three ranks and more add range by range, and where it is if it lies in the arena. As many of float64,
# which compiled loops add if there are some.
_SMALL = (1, 3, 64, 257)
_PIECES, _LARGE = 3000, 9000
# Delays are loops of up to so many turns: shorter than a waiter looks before it sleeps, and longer.
_SHORT, _LONG = 1000, 30_000


def check_sums(comm: Communicator, sums: int, seed: int) -> None:
    """Add `sums` times, and raise AssertionError at the first result that is not right in every element.

    All ranks of `comm` call it. They are delayed at random moments, each at others. Every sum has terms that no sum
    before it had, so what is read too early or too late is wrong.
    """
    dice = random.Random(seed * comm.size + comm.rank)
    tensors = _Tensors.of(comm)
    for turn in range(sums):
        tensor = tensors.at(turn)
        term = turn * comm.size + comm.rank
        tensor.fill_(term)
        _dawdle(dice)
        work = comm.start(AllReduce(tensor))
        _dawdle(dice)
        work.wait()
        expected = turn * comm.size**2 + sum(range(comm.size))
        wrong = tensor != expected
        if bool(wrong.any()):
            raise AssertionError(_said(comm, turn, tensor, expected, wrong))
        tensor.fill_(-1)  # whoever reads it after its rank's wait is wrong


@dataclass(frozen=True)
class _Tensors:
    small: list[Tensor]
    pieces: Tensor
    large: Tensor
    arena: Tensor
    floats: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, comm: Communicator) -> _Tensors:
        small = [torch.empty(count, dtype=torch.int64) for count in _SMALL]
        pieces, large = (torch.empty(count, dtype=torch.int64) for count in (_PIECES, _LARGE))
        floats = torch.empty(_LARGE, dtype=torch.float64), comm.empty((_LARGE,), torch.float64)
        return cls(small, pieces, large, comm.empty((_LARGE,), torch.int64), floats)

    def at(self, turn: int) -> Tensor:
        match turn % 100:
            case 20 | 50 | 80:
                return self.pieces
            case 33:
                return self.large
            case 21 | 66 | 67:
                return self.arena
            case 34 | 51 | 52 | 81:
                return self.floats[turn % 2]
            case _:
                return self.small[turn % len(self.small)]


def _dawdle(dice: random.Random) -> None:
    """Lose some time, one time in fifty; a lot, one time in thousand."""
    luck = dice.random()
    if luck < 0.02:
        for _ in range(dice.randrange(_LONG if luck < 0.001 else _SHORT)):
            pass


def _said(comm: Communicator, turn: int, tensor: Tensor, expected: int, wrong: Tensor) -> str:
    first = int(wrong.nonzero()[0])
    return (
        f"rank {comm.rank} of {comm.size}, sum {turn} of {tensor.numel()} elements: expected {expected}, got "
        f"{int(tensor[first])} at element {first}, and {int(wrong.sum())} wrong elements in all"
    )

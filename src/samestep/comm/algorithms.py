"""Collective algorithms as schedules: who sends which chunk to whom in which round, and what becomes of what arrives.

A schedule is numbers only; `samestep.comm.interpreter.run_schedule` carries out any of them over any communicator.
The tensor is cut into one chunk for each rank, as even as possible (`chunk`); a chunk may be empty.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from samestep.comm.ordered import element_range

__all__ = ["Combine", "Schedule", "Step", "chunk", "ring", "volume"]


class Combine(enum.Enum):
    """What becomes of a chunk that arrives."""

    ADD = "add"
    COPY = "copy"


@dataclass(frozen=True)
class Step:
    """One round on one rank: send a chunk while another arrives, then add that to ours or put it in place of ours.

    The chunk that arrives is never the one that leaves. In the same round, `send_to` receives what is sent here and
    `receive_from` sends what is received here.
    """

    send_chunk: int
    send_to: int
    receive_chunk: int
    receive_from: int
    combine: Combine


@dataclass(frozen=True)
class Schedule:
    """What one rank does, round by round; all ranks have as many rounds."""

    ranks: int
    rank: int
    steps: tuple[Step, ...]


def ring(ranks: int, rank: int) -> Schedule:
    """Schedule an all-reduce in which each rank talks only to its two neighbours in a ring; one rank does nothing.

    First reduce-scatter: chunk c sets out from rank c + 1 and goes once around, and every rank adds its own numbers,
    so that it is complete on rank c after ranks - 1 rounds. Then all-gather: it goes around once more, copied. All
    ranks end with the same bits, as nobody else computes a chunk's sum; but the order of additions depends on the
    number of ranks.

    Raises ValueError for a rank that is not among `ranks` ranks.

    Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, Journal of
    Parallel and Distributed Computing 69(2), 2009, pages 117 to 124, doi:10.1016/j.jpdc.2008.09.002. They also show
    that 2 * (N - 1) / N of the tensor is the least that N ranks can do with.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not among {ranks} ranks, which count from 0")
    rounds = range(ranks - 1)
    reduce_scatter = (_pass_on(ranks, rank, rank - 1 - i, Combine.ADD) for i in rounds)
    all_gather = (_pass_on(ranks, rank, rank - i, Combine.COPY) for i in rounds)
    return Schedule(ranks, rank, (*reduce_scatter, *all_gather))


def chunk(numel: int, ranks: int, index: int) -> range:
    """Return the elements of chunk `index` of a flat tensor of `numel` elements."""
    return element_range(numel, ranks, index)


def volume(schedule: Schedule, numel: int) -> int:
    """Return how many elements the schedule's rank sends for a tensor of `numel` elements.

    A ring of N ranks sends 2 * (N - 1) / N of the tensor if it divides evenly, else less than two elements off that.
    """
    return sum(len(chunk(numel, schedule.ranks, step.send_chunk)) for step in schedule.steps)


def _pass_on(ranks: int, rank: int, outgoing: int, combine: Combine) -> Step:
    """Send a chunk to the right while the one before it comes from the left."""
    return Step(outgoing % ranks, (rank + 1) % ranks, (outgoing - 1) % ranks, (rank - 1) % ranks, combine)

"""Worlds for tests: the cause of a failure is what is raised, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import comm_ranks
import pytest
import torch

from samestep.comm.base import Communicator
from samestep.errors import DeadlineError, PeerLostError
from samestep.testing.ranks import RankError, run_processes, run_threads


def test_threads_return_in_rank_order() -> None:
    def main(comm: Communicator) -> int:
        return int(comm.all_reduce(torch.tensor(comm.rank))) * 10 + comm.rank

    assert run_threads(main, 4) == [60, 61, 62, 63]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_threads_raise_the_cause(rank: int) -> None:
    seen: dict[int, PeerLostError] = {}

    def main(comm: Communicator) -> None:
        if comm.rank == rank:
            raise KeyError("the cause")
        with pytest.raises(PeerLostError) as lost:
            comm.barrier()
        seen[comm.rank] = lost.value
        raise lost.value

    with pytest.raises(KeyError, match="the cause"):
        run_threads(main, 3)
    assert sorted(seen) == [r for r in range(3) if r != rank]


def test_threads_raise_a_deadline() -> None:
    with pytest.raises(DeadlineError, match=r"rank\(s\) \[1\] did not come within 0.05 s"):
        run_threads(lambda comm: comm.rank == 0 and comm.recv(torch.empty(1), 1), 1 + 1, timeout_s=0.05)

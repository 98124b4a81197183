"""Worlds for tests: the cause of a failure is what is raised, and nothing is left behind."""

from __future__ import annotations

import os
import threading
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
    ended = threading.Event()

    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            assert ended.wait(timeout=10.0)
            return
        try:
            comm.recv(torch.empty(1), 1)
        finally:
            ended.set()

    said = (
        r"\Arank 0, recv\(peer=1, tag=0\) of float32\[1\]: rank\(s\) \[1\] did not come within 0.05 s; here are \[0\]\Z"
    )
    with pytest.raises(DeadlineError, match=said):
        run_threads(main, 2, timeout_s=0.05)


def test_processes_return_in_rank_order() -> None:
    assert run_processes(comm_ranks.results, 3, 10, 7) == [7, 17, 27]


def test_processes_tell_the_cause() -> None:
    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*in fail\n(.|\n)*KeyError: 'the cause'"):
        run_processes(comm_ranks.fail, 3)


def test_processes_that_die() -> None:
    with pytest.raises(RankError, match=r"\Arank 1: died with exit code -6\Z"):
        run_processes(comm_ranks.die, 2)


def test_processes_that_hang_are_ended(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"\Arank 1: not done in time\Z"):
        run_processes(comm_ranks.hang, 2, str(tmp_path), timeout_s=3.0)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_what_processes_cannot_get() -> None:
    with pytest.raises(AttributeError, match=r"Can't (pickle|get) local object"):
        run_processes(lambda comm: None, 2)

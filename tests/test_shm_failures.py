"""What ranks that share memory do when one dies, stops, never comes, fails or closes."""

from __future__ import annotations

import re
from pathlib import Path

import comm_ranks
import pytest
import shm_ranks

from samestep.testing.ranks import RankError, run_processes


@pytest.mark.parametrize("case", comm_ranks.INTERRUPTED)
def test_all_survivors_of_a_death_learn_of_it_at_once(case: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"\Arank 2: died with exit code 7\Z"):
        run_processes(shm_ranks.survive, 4, case, str(tmp_path / "store"), timeout_s=60.0)


@pytest.mark.parametrize("kind", shm_ranks.KINDS)
def test_a_rank_killed_in_the_midst_of_an_exchange(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"\Arank 2: died with exit code -9\Z"):
        run_processes(shm_ranks.lose_a_rank_somewhere, 4, kind, str(tmp_path / "store"), timeout_s=60.0)


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    said = run_processes(shm_ranks.stop_a_rank, 3, str(tmp_path / "store"))
    late = r"rank 0 of 3, all_reduce\(sum\) of float32\[7\]: rank\(s\) \[(1, )?2\] did not come within 1 s; "
    assert re.match(late, said[0])
    assert "\n  rank 0: is in all_reduce(sum) of float32[7]" in said[0]
    for rank in (1, 2):
        prefix = f"rank {rank} of 3, all_reduce(sum) of float32[7]: the group is broken since: "
        assert said[rank] == prefix + said[0]


def test_a_rank_that_never_comes() -> None:
    first, second, third = run_processes(shm_ranks.never_come, 3)
    assert first == (
        "rank 0 of 3, all_reduce(sum) of float32[3]: rank(s) [2] did not come within 0.5 s; look for a rank that "
        "stopped or made fewer calls:\n"
        "  rank 0: is in all_reduce(sum) of float32[3]\n"
        "  rank 1: is in all_reduce(sum) of float32[3]\n"
        "  rank 2: has not come; its last exchange is broadcast(source=0) of float32[2, 3]"
    )
    for rank, said in ((1, second), (2, third)):
        assert said == f"rank {rank} of 3, all_reduce(sum) of float32[3]: the group is broken since: {first}"


def test_a_rank_that_cannot_do_its_part() -> None:
    first, second, third = run_processes(shm_ranks.fail_within, 3)
    assert second == "rank 1 of 3, all_reduce(sum) of float32[3]: RuntimeError: no memory left"
    for rank, said in ((0, first), (2, third)):
        assert said == f"rank {rank} of 3, all_reduce(sum) of float32[3]: the group is broken since: {second}"

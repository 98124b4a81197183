"""Which transport serves a group of torch.distributed's, and how long it lives."""

from __future__ import annotations

from pathlib import Path

import group_ranks
import pytest

from samestep.testing.ranks import run_processes


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_one_host_share_memory(size: int) -> None:
    run_processes(group_ranks.conform, size)


def test_ranks_that_cannot_share_memory_go_through_their_group_and_are_told_once() -> None:
    first, second = run_processes(group_ranks.conform_without_memory, 2)
    assert first == ["the ranks of this group do not share memory, which is slower: rank 1: this is a test"]
    assert second == []


def test_shared_memory_ends_with_its_group(tmp_path: Path) -> None:
    for said in run_processes(group_ranks.end_and_begin_again, 2, str(tmp_path / "store")):
        assert len(said) == 6
        assert all("init_process_group" in text for text in said[::3])
        assert all(text.endswith("the process group has been destroyed") for text in said[1::3] + said[2::3]), said


def test_a_forked_process_is_no_rank() -> None:
    said, _ = run_processes(group_ranks.fork_in_the_middle, 2)
    assert said.startswith("rank 0 of 2: process ")
    assert "was forked from this rank and is none itself" in said


def test_memory_of_buckets_is_given_back() -> None:
    assert run_processes(group_ranks.buckets_come_and_go, 2, 4) == [[3, 3, 3, 3, 0]] * 2


def test_inference_mode_leaves_no_trace() -> None:
    run_processes(group_ranks.evaluate_and_train, 2)


def test_the_deadline_is_the_groups() -> None:
    said, _ = run_processes(group_ranks.miss_the_deadline, 2)
    assert "did not come within 1 s" in said
    assert "rank 0: is in all_reduce(sum) of float32[3]" in said


def test_groups_come_and_go_without_growth() -> None:
    for before, after in run_processes(group_ranks.destroy_often, 2, 20):
        assert after == before

"""torch's own communication hooks and optimizers in backward: the same bits in our class as in torch's."""

from __future__ import annotations

import hook_ranks
import pytest

from samestep.testing.ranks import RankError, run_processes


def test_torchs_hooks_give_the_bits_that_they_give_in_torchs_class() -> None:
    assert run_processes(hook_ranks.compare_hooks, 2) == [{}, {}]


def test_weights_are_exact_with_torchs_hooks_that_average() -> None:
    for plain, *rounded in run_processes(hook_ranks.compare_weights, 2):
        assert plain < 1e-6
        assert all(gap < 0.02 for gap in rounded)


def test_optimizers_in_backward_step_as_after_it() -> None:
    for result in run_processes(hook_ranks.compare_fused, 2):
        assert all(result.values()), result


def test_zero_redundancy_optimizers_steps_overlap_in_both_classes_alike() -> None:
    for result in run_processes(hook_ranks.compare_zero, 2, backend="samestep"):
        assert result == {"hook_with_zero_step": True, "hook_with_zero_step_interleaved": True}


def test_where_a_rank_failed_no_optimizer_steps_in_backward() -> None:
    first, second = run_processes(hook_ranks.fail_before_stepping, 2)
    assert first == second


def test_a_rank_that_ends_in_a_hook_is_an_error_on_the_others() -> None:
    with pytest.raises(RankError, match=r"^rank 1: died with exit code 7$"):
        run_processes(hook_ranks.lose_a_rank_in_a_hook, 2)

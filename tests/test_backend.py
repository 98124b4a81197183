"""The torch.distributed backend "samestep": its operations are Gloo's, its failures are errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import backend_ranks
import pytest

from samestep.comm.base import Communicator
from samestep.testing.ranks import RankError, run_processes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_is_gloos(size: int) -> None:
    first, *others = run_processes(backend_ranks.agree_with_gloo, size, backend="samestep")
    assert len(first) > 40
    assert all(names == first for names in others)


def test_several_groups_at_once() -> None:
    run_processes(backend_ranks.many_at_once, 3, backend="samestep")


def test_works_go_on_by_themselves() -> None:
    run_processes(backend_ranks.waited_for_by_others, 3, backend="samestep")


def test_callbacks_may_wait_for_other_works() -> None:
    run_processes(backend_ranks.wait_within_callbacks, 3, backend="samestep", timeout_s=30.0)


def test_nothing_grows_from_one_default_group_to_the_next(tmp_path: Path) -> None:
    for counts in run_processes(backend_ranks.end_and_begin_again, 2, str(tmp_path / "store"), backend="samestep"):
        assert max(counts[2:]) <= counts[1], counts


def test_messages_and_objects() -> None:
    run_processes(backend_ranks.messages, 3, backend="samestep")


def test_inference_mode() -> None:
    run_processes(backend_ranks.under_inference_mode, 2, backend="samestep")


def test_a_forked_process_leaves_the_group_alone() -> None:
    run_processes(backend_ranks.fork_in_between, 2, backend="samestep")


def test_a_timeout_of_a_wait() -> None:
    said, *_ = run_processes(backend_ranks.wait_with_a_timeout, 2, backend="samestep")
    assert re.match(r"rank 0 of 2: wait\(\) timed out after 0.02 s; ", said)


def test_ranks_that_ask_for_different_things() -> None:
    first, second = run_processes(backend_ranks.ask_for_different_things, 2, backend="samestep")
    assert first == second
    assert "rank 1: all_reduce(sum) of float32[3]" in first


@pytest.mark.parametrize("lose", [backend_ranks.lose_a_rank, backend_ranks.lose_a_rank_in_backward])
def test_the_death_of_a_rank(lose: Callable[[Communicator], None]) -> None:
    with pytest.raises(RankError, match=r"\Arank 1: died with exit code -9\Z"):
        run_processes(lose, 3, backend="samestep")


def test_ranks_that_cannot_share_memory_are_told_once_why() -> None:
    for said, total in run_processes(backend_ranks.without_shared_memory, 2, backend="samestep"):
        assert len(said) == 1
        assert said[0].startswith('backend "samestep": rank 1: no memory to share in this test; ')
        assert total == 16.0


def test_training_with_torchs_own_classes_gives_the_bits_that_it_gives_over_gloo(tmp_path: Path) -> None:
    for compared in run_processes(backend_ranks.train, 2, str(tmp_path), backend="samestep", timeout_s=100.0):
        assert len(compared) == 6
        assert min(compared.values()) >= 5


_INIT = """
store = torch.distributed.HashStore()
torch.distributed.init_process_group("{backend}", store=store, rank=0, world_size=1)
assert torch.distributed.get_backend() == "{backend}"
torch.distributed.all_reduce(torch.ones(3))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["samestep", "cpu:samestep,cuda:nccl"])
@pytest.mark.parametrize(("first", "second"), [("samestep", "torch"), ("torch", "samestep")])
def test_either_may_be_imported_first(first: str, second: str, backend: str) -> None:
    program = f"import sys, {first}, {second}, torch.distributed\n" + _INIT.format(backend=backend)
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_the_launcher_does_not_wait_for_torch() -> None:
    program = "import sys, samestep.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

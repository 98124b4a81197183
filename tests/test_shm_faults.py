"""Ranks that are killed or stopped in every exchange, at chosen moments; and memory that can't be had or shared."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shm_faults
import shm_limits

from samestep.comm.base import Communicator
from samestep.comm.shm import memory
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.gather import Unshared
from samestep.testing.ranks import RankError, run_processes, run_threads

_root = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="other users need root")

# Of four ranks one is killed, then one of three, then one of two.
_MOMENTS = {
    "coming": [("before", 1), ("before", 2), ("before", 3)],
    "there": [("after", 2), ("after", 1), ("after", 4)],
}
_REDUCTIONS = ("all_reduce", "in pieces", "by range", "in place", "compiled", "compiled, in place", "reduce_scatter")


@pytest.mark.parametrize("when", _MOMENTS)
@pytest.mark.parametrize("name", shm_faults.EXCHANGES)
def test_ranks_killed_one_after_another(name: str, when: str, tmp_path: Path) -> None:
    _lose(name, _MOMENTS[when], tmp_path)


@pytest.mark.parametrize("name", _REDUCTIONS)
def test_ranks_killed_amid_a_reduction(name: str, tmp_path: Path) -> None:
    _lose(name, [("midway", 1), ("midway", 2), ("midway", 3)], tmp_path)


def _lose(name: str, moments: list[tuple[str, int]], tmp_path: Path) -> None:
    """The groups' deadline is as far off as that of the test."""
    with pytest.raises(RankError) as caught:
        run_processes(shm_faults.lose_one_after_another, 4, name, moments, str(tmp_path / "store"), timeout_s=30.0)
    assert str(caught.value).splitlines() == [f"rank {rank}: died with exit code -9" for rank in (0, 2, 3)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_stopped_in_every_exchange(size: int, tmp_path: Path) -> None:
    times = run_processes(shm_faults.stop_in_every_exchange, size, str(tmp_path / "store"), timeout_s=100.0)
    assert set(times) == {len(shm_faults.EXCHANGES) * len(shm_faults.STOPS) - 1}


@pytest.mark.parametrize("moment", ["offered", "map_peer"])
def test_a_rank_killed_while_memory_is_shared_out(moment: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_processes(shm_faults.lose_one_while_gathering, 3, moment, str(tmp_path / "store"), timeout_s=30.0)
    assert str(caught.value) == "rank 2: died with exit code -9"


def test_who_only_asks_learns_of_a_death(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"\Arank 2: died with exit code -9\Z"):
        run_processes(shm_faults.ask_whether_it_is_done, 3, str(tmp_path / "store"), timeout_s=30.0)


@pytest.mark.parametrize("moment", ["split", "offered", "map_peer"])
def test_a_rank_killed_while_a_group_is_split(moment: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"\Arank 3: died with exit code -9\Z"):
        run_processes(shm_faults.lose_one_while_splitting, 4, moment, str(tmp_path / "store"), timeout_s=30.0)


_ROOM = 4 * 2**20 + 4096


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (resource.RLIMIT_FSIZE, "{} bytes of memory to share could not be had (File too large)"),
        (resource.RLIMIT_NOFILE, "/proc/meminfo cannot be read (Too many open files)"),
    ],
)
def test_a_limit_that_one_rank_reaches(which: int, said: str) -> None:
    first, again = run_processes(shm_limits.reach_a_limit, 3, which)[0]
    assert first == again == "rank 1: " + said.format(_ROOM)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENOSYS, errno.EPERM])
def test_memory_that_linux_refuses(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(memory, "memfd_create", refuses)

    def main(control: Communicator) -> Unshared | ShmCommunicator:
        return ShmCommunicator.gather(control)

    said = f"rank 0: {_ROOM} bytes of memory to share could not be had ({os.strerror(number)})"
    assert run_threads(main, 2) == [Unshared(said)] * 2


def test_a_dead_peer_is_noticed_without_descriptors() -> None:
    with pytest.raises(RankError, match=r"\Arank 0: died with exit code -9\Z"):
        run_processes(shm_limits.lose_a_peer_without_descriptors, 3, timeout_s=30.0)


def test_more_memory_than_there_is() -> None:
    first, second = run_processes(shm_limits.ask_for_too_much, 2)
    assert first == second
    assert first.startswith(f"rank 0: {4 * 2**45 + 4096} bytes of memory to share could not be had (the host has ")


def test_memory_is_had_between_signals() -> None:
    run_processes(shm_limits.allocate_between_signals, 2, timeout_s=30.0)


@pytest.mark.parametrize(
    ("instead", "said"),
    [("", "No such file or directory"), ("/dev/null", "has something else under its descriptor"), ("file", "has some")],
)
def test_a_descriptor_that_somebody_else_closes(instead: str, said: str, tmp_path: Path) -> None:
    path = str(tmp_path / instead) if instead == "file" else instead
    first, *others = run_processes(shm_limits.close_behind_its_back, 3, path)
    assert others == [first, first]
    assert first.startswith("rank 0 cannot map the memory of rank 1 (")
    assert said in first


@_root
def test_ranks_of_different_users() -> None:
    said = run_processes(shm_limits.be_another_user, 3)
    assert said == ["ranks 0 and 1 run as different users (0 and 65534)"] * 3


@_root
def test_a_rank_that_becomes_another_user() -> None:
    run_processes(shm_limits.become_another_user, 3)


_DENIED, _HIDDEN = (f"rank 0 cannot map the memory of rank 1 ({why})" for why in ("Permission denied", "No such file"))


@_root
@pytest.mark.parametrize(("dumpable", "said"), [(True, "shared"), (False, _DENIED)])
def test_ranks_that_keep_their_descriptors_to_themselves(dumpable: bool, said: str) -> None:
    assert run_processes(shm_limits.be_nobody_together, 2, dumpable) == [said] * 2


@_root
def test_a_rank_without_proc() -> None:
    said = "rank 1: /proc/meminfo cannot be read (No such file or directory)"
    assert run_processes(shm_limits.lose_proc, 3) == [said] * 3


@_root
@pytest.mark.parametrize(("dumpable", "said"), [(True, "shared"), (False, _HIDDEN)])
def test_ranks_in_a_proc_that_hides_others(dumpable: bool, said: str) -> None:
    first, second = run_processes(shm_limits.hide_processes, 2, dumpable)
    assert first == second
    assert first.startswith(said.rstrip(")"))


@_root
@pytest.mark.parametrize(
    ("together", "own_proc", "said"),
    [
        (True, True, "shared"),
        (True, False, "rank 0 cannot map the memory of rank 1 ("),
        (False, True, "ranks 0 and 1 are on different hosts, or in different containers"),
        (False, False, "ranks 0 and 1 are on different hosts, or in different containers"),
    ],
)
def test_ranks_in_containers(together: bool, own_proc: bool, said: str) -> None:
    ((first, second),) = run_processes(shm_limits.be_in_other_containers, 1, together, own_proc)
    assert first == second
    assert first.startswith(said)


def test_a_memory_cgroup_that_is_full(tmp_path: Path) -> None:
    """Linux ends who goes beyond it, as with any other memory; nobody else is hurt, and nobody waits."""
    with _memory_cgroup(16 * 2**20) as folder, pytest.raises(RankError, match=r"\Arank 1: died with exit code -9\Z"):
        run_processes(shm_limits.fill_a_cgroup, 3, folder, str(tmp_path / "store"), timeout_s=30.0)


@contextmanager
def _memory_cgroup(limit: int) -> Iterator[str]:
    """Make a group of processes that may have `limit` bytes; skip the test where that is not allowed."""
    root = Path("/sys/fs/cgroup/memory")
    name = "memory.limit_in_bytes"
    if not (root / name).exists():
        root, name = Path("/sys/fs/cgroup"), "memory.max"
    folder = root / f"samestep-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        if not (folder / name).exists():
            pytest.skip(f"{root} controls no memory")
        (folder / name).write_text(str(limit))
        yield str(folder)
    finally:
        folder.rmdir()

"""What communicators do when a rank dies, never comes, leaves or closes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import comm_ranks
import pytest
import torch

from samestep.comm import c10d_gloo
from samestep.comm.base import Communicator
from samestep.comm.checked import CheckedCommunicator
from samestep.comm.ops import AllReduce, Barrier, Recv, Send
from samestep.comm.threads import thread_communicators
from samestep.errors import DeadlineError, MismatchError, PeerLostError
from samestep.testing.ranks import RankError, run_processes, run_threads


@pytest.mark.parametrize("case", comm_ranks.INTERRUPTED)
def test_all_survivors_of_a_death_learn_of_it_at_once(case: str, tmp_path: Path) -> None:
    """The group's timeout is far beyond the time that survivors wait for one another with their news."""
    with pytest.raises(RankError, match=r"\Arank 2: died with exit code 7\Z"):
        run_processes(comm_ranks.survive, 4, case, str(tmp_path / "store"), timeout_s=60.0)


def test_a_rank_that_never_comes_to_gloo() -> None:
    first, second, third = run_processes(comm_ranks.miss_the_deadline, 3)
    assert first == ""
    late = "a peer did not come in time; look for a rank that stopped or made fewer calls"
    assert second.startswith(f"rank 1 of 2, all_reduce(sum) of float32[3]: {late}")
    assert third.startswith(f"rank 2 of 3, recv(peer=0, tag=5) of float32[3]: {late}")


def test_closing_gloo_groups_leaves_the_others() -> None:
    assert run_processes(comm_ranks.close_and_go_on, 3) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (lambda: AllReduce(torch.ones(3)), r"all_reduce\(sum\) of float32\[3\]: rank\(s\) \[1, 2\] did not come"),
        (lambda: Barrier(), r"barrier: rank\(s\) \[1, 2\] did not come within 0.05 s; here are \[0\]"),
        (lambda: Recv(torch.ones(2), 1, 4), r"recv\(peer=1, tag=4\) of float32\[2\]: rank\(s\) \[1\] did not come"),
        (lambda: Send(torch.ones(2), 2), r"send\(peer=2, tag=0\) of float32\[2\]: rank\(s\) \[2\] did not come"),
    ],
)
def test_threads_that_never_come(op: Callable[[], AllReduce], said: str) -> None:
    comm, *_ = thread_communicators(3, timeout_s=0.05)
    work = comm.start(op())
    assert not work.done()
    with pytest.raises(DeadlineError, match="rank 0, " + said):
        work.wait()
    assert work.done()
    with pytest.raises(DeadlineError, match="rank 0: the group is broken since: rank 0, " + said):
        work.wait()
    with pytest.raises(DeadlineError, match="rank 0: the group is broken since: rank 0, " + said):
        comm.barrier()


def test_a_deadline_breaks_the_group_on_every_rank() -> None:
    first, second, third = thread_communicators(3, timeout_s=0.05)
    waiting = second.start(Barrier())
    with pytest.raises(DeadlineError, match=r"rank 0, barrier: rank\(s\) \[2\] did not come"):
        first.barrier()
    for call in (waiting.wait, third.barrier, lambda: second.send(torch.ones(1), 2)):
        with pytest.raises(
            DeadlineError, match=r"rank [12]: the group is broken since: rank 0, barrier: rank\(s\) \[2\]"
        ):
            call()


def test_threads_that_leave_are_missed_at_once() -> None:
    first, second, third = thread_communicators(3)
    second.close()
    with pytest.raises(PeerLostError, match=r"rank 0, barrier: rank\(s\) \[1\] ended without taking part"):
        first.barrier()
    with pytest.raises(PeerLostError, match=r"rank 2: the group is broken since: rank 0, barrier"):
        third.all_reduce(torch.ones(1))


def test_who_has_come_may_leave() -> None:
    first, second = thread_communicators(2)
    message = torch.arange(3.0)
    second.start(Send(message, 0))
    second.start(Barrier())
    second.close()
    assert torch.equal(first.recv(torch.empty(3), 1), message)
    first.barrier()
    with pytest.raises(PeerLostError, match=r"rank\(s\) \[1\] ended"):
        first.recv(torch.empty(3), 1)


def test_a_group_that_cannot_be_split() -> None:
    first, _ = run_processes(comm_ranks.fail_to_split, 2)
    assert first.startswith("rank 0 of 2, split: a peer died or closed its connection"), first


def test_who_leaves_leaves_its_groups() -> None:
    def main(comm: Communicator) -> None:
        part = comm.split([0, 1])
        if part is None:
            return
        inner = part.split([0, 1])
        assert inner is not None
        if comm.rank == 1:
            comm.close()
        else:
            with pytest.raises(PeerLostError, match=r"rank 0, all_reduce.*: rank\(s\) \[1\] ended"):
                inner.all_reduce(torch.ones(1))

    run_threads(main, 3)


def test_threads_with_messages_that_do_not_fit() -> None:
    def main(comm: Communicator) -> None:
        op = Send(torch.ones(3), 1) if comm.rank == 0 else Recv(torch.ones(4), 0)
        with pytest.raises(
            MismatchError, match=r"rank 0: send\(peer=1, tag=0\) of float32\[3\]\n  rank 1: recv.*\[4\]"
        ):
            comm.start(op).wait()
        comm.barrier()

    run_threads(main, 2)


@pytest.mark.parametrize("wrap", [lambda comm: comm, CheckedCommunicator])
def test_ranks_that_split_differently(wrap: Callable[[Communicator], Communicator]) -> None:
    def main(inner: Communicator) -> None:
        comm = wrap(inner)
        with pytest.raises(MismatchError, match=r"rank 0 named \[0, 1\], rank 1 named \[0, 1\], rank 2 named \[1, 2\]"):
            comm.split([1, 0] if comm.rank < 2 else [1, 2])
        for ranks, said in (
            ([3], r"from 0 to 2, got \[3\]"),
            ([1, 1], r"different ranks .* got \[1, 1\]"),
            ([], r"got \[\]"),
        ):
            with pytest.raises(ValueError, match=said):
                comm.split(ranks)
        comm.barrier()

    run_threads(main, 3)


def test_a_world_of_no_threads() -> None:
    with pytest.raises(ValueError, match="expected at least 1 rank, got 0"):
        thread_communicators(0)


class _Stuck:
    """A work whose end Gloo never tells, until the `looks`-th look at the connections."""

    def __init__(self, looks: int, error: RuntimeError | None = None) -> None:
        self.looks, self.error = looks, error

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.looks > 0:
            assert timeout is not None, "this would wait until the group's timeout"
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.looks <= 0


class _Group:
    """Two ranks whose connection breaks at the `breaks`-th look; each look brings `work` forward."""

    def __init__(self, work: _Stuck, breaks: int) -> None:
        self.work, self.breaks = work, breaks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert (peer, tag >= 2**30) == (1, True)
        self.work.looks -= 1
        self.breaks -= 1
        if self.breaks == 0:
            raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("work", "breaks", "said"),
    [
        (_Stuck(0), 9, None),
        (_Stuck(3), 9, None),
        (_Stuck(0, RuntimeError("Broken pipe")), 9, "Broken pipe"),
        (_Stuck(3, RuntimeError("Broken pipe")), 9, "Broken pipe"),
        (_Stuck(9), 1, "Connection closed"),
        (_Stuck(9), 3, "Connection closed"),
    ],
)
def test_gloo_is_not_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch, work: _Stuck, breaks: int, said: str | None
) -> None:
    kept: list[_Group] = []
    monkeypatch.setattr(c10d_gloo, "_FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(c10d_gloo, "_keep", kept.append)
    group: Any = _Group(work, breaks)
    if said is None:
        c10d_gloo.wait(group, work)
        assert work.looks == 0
    else:
        with pytest.raises(RuntimeError, match=said):
            c10d_gloo.wait(group, work)
    assert kept == ([] if work.is_completed() else [group]), "a group whose thread is stuck is never let go of"

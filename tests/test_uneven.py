"""Different numbers of batches without join(): an error that names ranks and counts, wherever the early rank went."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from models import linear, samples, wrap

from samestep.comm.base import Communicator
from samestep.comm.c10d import C10dCommunicator
from samestep.comm.select import communicator_for
from samestep.errors import CommunicatorError, DeadlineError, MismatchError, PeerLostError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes, run_threads

ADVICE = r"If a rank has fewer batches than others.*, give all as many, or train within `with model.join\(\):`"
THIRD = r"gradients of synchronised backward 3; a rank that is not in it has made 2"
IN_THIRD = r"\n  rank {} is in its synchronised backward 3, a rank that is not in it has 2 made\. " + ADVICE


def train(model: DistributedDataParallel, batches: int) -> None:
    for _ in range(batches):
        model.zero_grad()
        model(samples(2)).sum().backward()


def evaluate(model: DistributedDataParallel, comm: Communicator) -> None:
    model.eval()
    with torch.no_grad():
        hits = model(samples(7)).argmax(1).sum()
    comm.all_reduce(hits)


ELSEWHERE: dict[str, tuple[Callable[[DistributedDataParallel, Communicator], object], str]] = {
    "metrics": (lambda model, comm: comm.all_reduce(torch.ones(())), r"all_reduce\(sum\) of float32\[\]"),
    "barrier": (lambda model, comm: comm.barrier(), "barrier"),
    "evaluation": (evaluate, r"all_reduce\(sum\) of int64\[\]"),
    "objects": (lambda model, comm: comm.all_gather_object("done"), r"all_gather of int64\[\]"),
    "another model": (lambda model, comm: wrap(linear(), comm), r"all_gather of int64\[\]"),
}


@pytest.mark.parametrize(("go", "asked"), ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.parametrize("cap", [None, 0.0])
def test_ranks_that_went_on_to_another_exchange(
    go: Callable[[DistributedDataParallel, Communicator], object], asked: str, cap: float | None
) -> None:
    """Every rank reads what all are in, and the count."""

    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm, bucket_cap_mb=cap)
        train(model, 2)
        lines = [rf"\n  rank {r}: " + (asked if r < 2 else rf"all_reduce.*\({THIRD}\)") for r in range(3)]
        told = "ranks ask for different exchanges" + ".*" + "".join(lines)
        if comm.rank < 2:
            with pytest.raises(MismatchError, match=told + r"\Z"):
                go(model, comm)
        else:
            with pytest.raises(MismatchError, match=told + IN_THIRD.format(2)):
                train(model, 1)

    run_threads(rank, 3)


def test_a_rank_that_has_ended() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        train(model, 2)
        if comm.rank:
            said = r"rank \d.*: rank\(s\) \[0\] ended without taking part" + IN_THIRD.format(comm.rank)
            with pytest.raises(PeerLostError, match=said):
                train(model, 1)

    run_threads(rank, 3)


def test_a_rank_that_waits() -> None:
    over = threading.Event()

    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        train(model, 2)
        if comm.rank == 0:
            over.wait(20)
            return
        try:
            said = r"all_reduce.*" + THIRD + r".*: rank\(s\) \[0\] did not come within 1 s; here are \[1\]"
            with pytest.raises(DeadlineError, match=said + IN_THIRD.format(1)):
                train(model, 1)
        finally:
            over.set()

    run_threads(rank, 2, timeout_s=1.0)


def test_a_rank_that_is_in_no_sync_and_one_that_is_not() -> None:
    """Unequal use of no_sync() is the same mistake."""

    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        train(model, 2)
        with model.no_sync() if comm.rank == 0 else contextlib.nullcontext():
            if comm.rank == 0:
                train(model, 1)
                with pytest.raises(MismatchError, match=THIRD):
                    comm.barrier()
            else:
                with pytest.raises(MismatchError, match=IN_THIRD.format(1)):
                    train(model, 1)

    run_threads(rank, 2)


def test_ranks_that_are_shifted_by_one_go_on() -> None:
    """The last batch of one rank's epoch meets the first of the other's: no exchange is wrong, and none is missing."""

    def rank(comm: Communicator) -> int:
        model = wrap(linear(), comm)
        for batches in ((2, 3), (3, 2))[comm.rank]:
            train(model, batches)
        comm.barrier()
        return model._reducer.progress.number

    assert run_threads(rank, 2) == [5, 5]


def test_over_shared_memory() -> None:
    _, *rest = run_processes(leave_early, 3, "shared memory")
    for rank, (other, waiting, away, ended) in enumerate(rest, start=1):
        count = f"  rank {rank} is in its synchronised backward 3, a rank that is not in it has 2 made. If a rank has"
        assert "\n  rank 0: barrier\n  rank 1: all_reduce(sum)" in other
        for said in (waiting, away):
            assert "DeadlineError" in said
            assert "rank(s) [0] did not come within 1 s" in said or "the group is broken since" in said
        assert ended.startswith("PeerLostError")
        assert "rank 0" in ended
        for said in (other, waiting, away, ended):
            assert count in said, said


def test_over_gloo() -> None:
    _, *rest = run_processes(leave_early, 3, "gloo")
    counts = (
        "  rank 0 has 2 made, rank 1 is in its synchronised backward 3, rank 2 is in its synchronised backward 3. If"
    )
    for waiting, away, ended in rest:
        for said in (waiting, away):
            assert counts in said, said
        assert "synchronised backward 3" in ended, "with rank 0, the store may be gone"
        assert ended.startswith("PeerLostError"), ended
        assert waiting.startswith("DeadlineError")
        assert away.startswith(("DeadlineError", "PeerLostError")), "rank 0 may have been the first to give up"


def leave_early(plain: Communicator, transport: str) -> list[str]:
    """Train three batches, of which rank 0 has two, then is somewhere else; return the others' errors."""
    said = []
    shared = transport == "shared memory"
    if shared:
        said.append(attempt(None, plain, lambda: communicator_for().barrier()))
    for leave in (lambda group: None, dist.barrier):
        group = dist.new_group(timeout=timedelta(seconds=1))
        said.append(attempt(group if shared else C10dCommunicator(group), plain, partial(leave, group)))
        plain.barrier()
    said.append(attempt(None if shared else plain, plain, lambda: None))  # rank 0 destroys the group and ends
    return said


def attempt(group: object, plain: Communicator, leave: Callable[[], object]) -> str:
    model = DistributedDataParallel(linear(), process_group=group)  # type: ignore[arg-type]
    train(model, 2)
    plain.barrier()
    try:
        if plain.rank == 0:
            leave()
        else:
            train(model, 1)
    except (CommunicatorError, MismatchError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

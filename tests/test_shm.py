"""Ranks that share memory keep a communicator's promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import shm_ranks
import torch

from samestep.comm.base import Communicator
from samestep.comm.ops import AllReduce, Barrier, Reduction
from samestep.comm.shm import gather, kernel, kernels
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.gather import Unshared, refusal
from samestep.comm.shm.memory import Mapping, Offer
from samestep.comm.shm.room import room_bytes
from samestep.errors import CommunicatorError, MismatchError, PeerLostError
from samestep.testing.ranks import run_processes, run_threads
from samestep.testing.samples import refused


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_processes_conform(size: int) -> None:
    run_processes(shm_ranks.conform, size)


@pytest.mark.parametrize("compiled", [True, False])
def test_pieces_of_a_small_slot_conform(compiled: bool) -> None:
    run_processes(shm_ranks.conform, 3, 4096, compiled)


_HEADER = Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.skipif(
    shutil.which("cc") is None or not _HEADER.exists(), reason="there is no C compiler, or not Python's headers"
)
def test_the_loops_are_compiled_where_there_is_a_compiler() -> None:
    assert kernels.VERSION > 0


def test_the_loops_are_used_by_all_ranks_or_by_none() -> None:
    def main(control: Communicator) -> None:
        with shm_ranks.gathered(control, kernels=control.rank != 1) as comm:
            assert not comm._room.kernels
            assert bool((comm.all_reduce(torch.ones(100_000)) == 3).all())

    run_threads(main, 3)


def test_a_subgroup_conforms() -> None:
    assert run_processes(shm_ranks.conform_in_subgroup, 3) == [True, False, True]


@pytest.mark.parametrize(("times", "splits"), [(10, True), (100, False)])
def test_communicators_come_and_go_without_growth(times: int, splits: bool) -> None:
    for before, after in run_processes(shm_ranks.make_and_close, 2, times, splits):
        assert after == before
        assert before[1] == 0


def test_memory_that_one_rank_cannot_have() -> None:
    first, second = run_processes(shm_ranks.run_out_of_memory, 2)
    assert first == second == "rank 1: 134221824 bytes of memory to share could not be had (Cannot allocate memory)"


def _both(
    test: Callable[[ShmCommunicator], None],
    size: int,
    slot_bytes: int = shm_ranks.SLOT_BYTES,
    *,
    compiled: bool = True,
) -> None:
    """Run `test` in threads, each a rank that shares memory with the others."""

    def main(control: Communicator) -> None:
        with shm_ranks.gathered(control, slot_bytes=slot_bytes, kernels=compiled) as comm:
            test(comm)

    run_threads(main, size)


_REDUCTIONS = {
    torch.float32: (Reduction.SUM, Reduction.MEAN, Reduction.PRODUCT, Reduction.MAX),
    torch.float64: (Reduction.SUM, Reduction.MEAN),
    torch.bfloat16: (Reduction.SUM, Reduction.MEAN, Reduction.PRODUCT),
    torch.float16: (Reduction.SUM, Reduction.MIN),
    torch.complex64: (Reduction.SUM, Reduction.MEAN),
    torch.int16: (Reduction.SUM, Reduction.BIT_XOR),
}


def _numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.int16:
        return torch.randint(-(2**15), 2**15, (count,), generator=generator).to(dtype)
    return torch.randn(count, generator=generator, dtype=dtype if dtype.is_complex else torch.float32).to(dtype)


def _in_rank_order(parts: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """Reduce one after the other, half types in float32, rounded once: what every way must do, bit for bit."""
    combine = {Reduction.PRODUCT: torch.mul, Reduction.MAX: torch.maximum, Reduction.MIN: torch.minimum}
    wide = [p.float() if p.dtype in (torch.float16, torch.bfloat16) else p for p in parts]
    total = wide[0]
    for part in wide[1:]:
        total = combine.get(reduction, torch.bitwise_xor if reduction is Reduction.BIT_XOR else torch.add)(total, part)
    if reduction is Reduction.MEAN:
        total = (
            torch.view_as_complex(torch.view_as_real(total) / len(parts)) if total.is_complex() else total / len(parts)
        )
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("slot_bytes", [4096, shm_ranks.SLOT_BYTES])
@pytest.mark.parametrize("compiled", [True, False])
def test_all_ways_give_the_bits_of_a_sum_in_rank_order(size: int, slot_bytes: int, compiled: bool) -> None:
    def test(comm: ShmCommunicator) -> None:
        for dtype, reductions in _REDUCTIONS.items():
            arena = comm.empty((100_003,), dtype)
            mixed = arena if comm.rank == 0 else torch.empty(100_003, dtype=dtype)
            for count in (1, 1000, 40_000, 100_003):
                parts = [_numbers(rank, count, dtype) for rank in range(size)]
                for reduction in reductions:
                    expected = _in_rank_order(parts, reduction)
                    for where in (arena[:count], arena[-count:], mixed[:count], torch.empty(count, dtype=dtype)):
                        where.copy_(parts[comm.rank])
                        comm.all_reduce(where, reduction)
                        assert torch.equal(where.view(torch.uint8), expected.view(torch.uint8)), (
                            dtype,
                            count,
                            reduction,
                        )

    _both(test, size, slot_bytes, compiled=compiled)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_scale_is_applied_once_before_the_sum_in_every_way(compiled: bool) -> None:
    def test(comm: ShmCommunicator) -> None:
        scales = [0.1, 1.0, 1 / 3]
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            arena = comm.empty((100_003,), dtype)
            mixed = arena if comm.rank == 0 else torch.empty(100_003, dtype=dtype)
            parts = [_numbers(rank, 100_003, dtype) * scale for rank, scale in enumerate(scales)]
            expected = _in_rank_order(parts, Reduction.SUM)
            for where in (arena, mixed, torch.empty(100_003, dtype=dtype)):
                where.copy_(_numbers(comm.rank, 100_003, dtype))
                comm.start(AllReduce(where, scale=scales[comm.rank])).wait()
                assert torch.equal(where, expected), dtype

    _both(test, 3, 4096, compiled=compiled)


def test_a_tensor_in_the_arena_is_reduced_where_it_is() -> None:
    def test(comm: ShmCommunicator) -> None:
        tensor = comm.empty((3, 50_000))
        assert not tensor.any()
        assert tensor.shape == (3, 50_000)
        tensor.fill_(comm.rank + 1)
        comm.barrier()  # the others have read what was shown before
        slots = (
            comm._room.next(torch.uint8, shm_ranks.SLOT_BYTES),
            comm._room.shown(comm._room.meeting, comm.rank, torch.uint8, 2**20),
        )
        for slot in slots:
            slot.fill_(77)
        comm.barrier()
        comm.all_reduce(tensor)
        assert bool((tensor == 6).all())
        assert all(bool((slot == 77).all()) for slot in slots), "something went through the slots"
        comm.all_reduce(tensor[1:, :].view(-1)[5:])
        assert tensor[0].unique().tolist() == [6]
        assert tensor[1:].unique().tolist() == [6, 18]
        comm.barrier()
        comm.close()
        tensor.add_(1)
        assert tensor[2].unique().tolist() == [19]

    _both(test, 3)


def test_groups_that_are_waited_for_in_opposite_orders() -> None:
    """One group's exchanges go on while another's is waited for, also those of many meetings and those behind them."""

    def test(comm: ShmCommunicator) -> None:
        with shm_ranks.gathered(comm, slot_bytes=4096) as other:
            tensors = [torch.ones(100_000) for _ in range(4)]
            works = [c.start(AllReduce(t)) for c, t in zip((comm, other, comm, other), tensors, strict=True)]
            for work in works if comm.rank else (works[3], works[2], works[1], works[0]):
                work.wait()
            assert all(bool((t == 2).all()) for t in tensors)
            assert all(work.done() for work in works)

    _both(test, 2, 4096)


def test_exchanges_go_on_while_a_message_is_waited_for() -> None:
    """A rank that waits for a message is needed by its peer, which sends it only after the exchange."""

    def test(comm: ShmCommunicator) -> None:
        tensor, word = torch.ones(100_000), torch.zeros(1)
        work = comm.start(AllReduce(tensor))
        if comm.rank == 0:
            comm.recv(word, 1)
            work.wait()
            assert word.item() == 7
        else:
            work.wait()
            comm.send(word.fill_(7), 0)
        assert bool((tensor == 2).all())

    for compiled in (True, False):
        _both(test, 2, 4096, compiled=compiled)


def test_who_has_come_may_leave() -> None:
    def test(comm: ShmCommunicator) -> None:
        other = shm_ranks.gathered(comm)
        work = other.start(Barrier())
        if comm.rank == 1:
            other.close()
            with pytest.raises(CommunicatorError, match="rank 1 of 2: the communicator is closed"):
                work.wait()
            comm.barrier()
            return
        comm.barrier()
        work.wait()
        with pytest.raises(
            PeerLostError, match=r"rank 0 of 2, barrier: rank 1 closed its communicator without taking part\Z"
        ):
            other.barrier()
        refused(comm, "send after an error", lambda: other.send(torch.ones(1), 1), PeerLostError)
        other.close()

    _both(test, 2)


def test_tensors_elsewhere_go_through_control() -> None:
    def test(comm: ShmCommunicator) -> None:
        meeting = comm._room.meeting
        comm.all_reduce(torch.ones(3, device="meta"))
        assert comm._room.meeting == meeting
        comm.barrier()

    _both(test, 2)


def test_counters_wrap_around() -> None:
    def test(comm: ShmCommunicator) -> None:
        comm.barrier()
        control = comm._control
        control.barrier()
        comm._room.meeting = 2**32 - 4
        comm._own.come_to(2**32 - 4)
        control.barrier()
        for turn in range(10):
            assert comm.all_gather_object(turn + comm.rank) == [turn, turn + 1]

    _both(test, 2)


def test_long_signatures_differ_at_their_end() -> None:
    def test(comm: ShmCommunicator) -> None:
        ones = [1] * 500
        shape = (*ones, 1 + comm.rank)
        said = refused(
            comm, "other shapes", lambda: comm.all_reduce(torch.ones(1).expand(shape).clone()), MismatchError
        )
        assert said.count("\n  rank ") == 2
        comm.barrier()

    _both(test, 2)


def test_processes_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        started = kernel.start_time(process.pid)
        assert started is not None
        assert kernel.is_alive(process.pid, started)
        assert not kernel.is_alive(process.pid, started - 1), "another process that had the number"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not kernel.is_alive(process.pid, started), "ended, but not reaped"
    assert not kernel.is_alive(process.pid, started)

    def no_descriptors(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(kernel, "open", no_descriptors, raising=False)
    assert not kernel.is_alive(process.pid, started)
    assert kernel.is_alive(os.getpid(), started), "as far as can be told"


_OFFER = Offer("a boot", 1000, 10, 20, 5, 4096, b"token")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (Offer("another boot", 1000, 11, 21), "ranks 0 and 1 are on different hosts, or in different containers"),
        (Offer("a boot", 0, 11, 21), "ranks 0 and 1 run as different users (1000 and 0)"),
        (Offer(refusal="it needs Linux, this is darwin"), "rank 1: it needs Linux, this is darwin"),
        (_OFFER, ""),
    ],
)
def test_refusals(second: Offer, said: str) -> None:
    assert refusal((_OFFER, second), 0) == said
    assert refusal((second, _OFFER), 1) == said.replace("rank 1", "rank 0").replace("(1000 and 0)", "(0 and 1000)")


def test_if_one_cannot_map_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = gather.map_peer

    def refuses(offer: Offer) -> Mapping:
        if offer.num_bytes == room_bytes(4096):
            raise PermissionError(13, "Permission denied")
        return maps(offer)

    monkeypatch.setattr(gather, "map_peer", refuses)

    def main(control: Communicator) -> Unshared | ShmCommunicator:
        return ShmCommunicator.gather(control, slot_bytes=1)

    answers = run_threads(main, 3)
    assert answers == [Unshared("rank 0 cannot map the memory of rank 1 (Permission denied)")] * 3


def test_if_one_has_no_memory_nobody_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = gather.offered

    def lacks(num_bytes: int) -> AbstractContextManager[tuple[Offer, Mapping]]:
        if num_bytes > 2**20:
            raise OSError(28, "No space left on device")
        return offers(num_bytes)

    monkeypatch.setattr(gather, "offered", lacks)

    def main(control: Communicator) -> Unshared | ShmCommunicator:
        return ShmCommunicator.gather(control, slot_bytes=2**20 if control.rank else 4096)

    said = f"rank 1: {room_bytes(2**20)} bytes of memory to share could not be had (No space left on device)"
    assert run_threads(main, 2) == [Unshared(said)] * 2

#!/usr/bin/env python3
"""All-reduce between processes of one machine: Gloo, shared memory, and one copy, side by side.

    benchmarks/allreduce.py                             # 2 ranks, 1 KiB to 64 MiB
    benchmarks/allreduce.py --ranks 4 --rounds 9

Each row is one size: the median over rounds, in microseconds, of what the slowest rank took for one sum. The ways take
turns, round by round. "in place" is on a tensor in the shared arena; "python" and "python in place" are the same
without compiled loops (where there are none, all are alike). "copy" is one `tensor.copy_` of the same bytes,
alone on rank 0: no all-reduce whose result is in every rank's own memory moves less. "copies" is the same on all ranks
at once, who share the memory's bandwidth, and a core's caches where two of them run on one: what the machine allows.
Ratios are Gloo's time over ours, and our time in place over the copy's and the copies'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from samestep.comm.base import Communicator
from samestep.comm.ops import Reduction
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.testing.ranks import run_processes

__all__ = ["main", "measure", "table"]

SIZES = tuple(1024 * kib for kib in (1, 16, 256, 1024, 4096, 25600, 65536))
_BYTES_A_ROUND = 80e6
_RATIOS = ("gloo / shared", "gloo / in place", "in place / copy", "in place / copies")
_WIDTH = 18


def measure(control: Communicator, rounds: int, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Return, for each size in bytes, the median time of each way in microseconds; every rank calls it."""
    with _shared(control, kernels=True) as comm, _shared(control, kernels=False) as python:
        return [_measure_size(control, comm, python, rounds, num_bytes // 4) for num_bytes in sizes]


def _shared(control: Communicator, *, kernels: bool) -> ShmCommunicator:
    comm = ShmCommunicator.gather(control, kernels=kernels)
    if not isinstance(comm, ShmCommunicator):
        raise SystemExit(f"no shared memory between these ranks: {comm.reason}")
    return comm


def _measure_size(
    control: Communicator, comm: ShmCommunicator, python: ShmCommunicator, rounds: int, count: int
) -> dict[str, float]:
    own = torch.zeros(count)
    ways: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
        "gloo": (control.all_reduce, own),
        "shared": (comm.all_reduce, own),
        "in place": (comm.all_reduce, comm.empty((count,))),
        "python": (python.all_reduce, own),
        "python in place": (python.all_reduce, python.empty((count,))),
    }
    for call, tensor in ways.values():
        tensor.fill_(comm.rank + 1.0)
        call(tensor)
        assert bool(tensor.eq(comm.size * (comm.size + 1) / 2).all()), "wrong sum"
        tensor.zero_()
    repeats = max(2, min(200, int(_BYTES_A_ROUND / (4 * count))))
    copy = torch.ones(count).copy_
    times: dict[str, list[float]] = {name: [] for name in (*ways, "copies", "copy")}
    for _ in range(rounds):
        for name, (call, tensor) in ways.items():
            control.barrier()
            call(tensor)
            spent = torch.tensor(_timed(call, tensor, repeats))
            times[name].append(control.all_reduce(spent, Reduction.MAX).item())
        control.barrier()
        spent = torch.tensor(_timed(copy, own, repeats))
        times["copies"].append(control.all_reduce(spent, Reduction.MAX).item())
        if comm.rank == 0:
            times["copy"].append(_timed(copy, own, repeats))
        control.barrier()
    return {name: statistics.median(of_way) for name, of_way in times.items() if of_way}


def _timed(call: Callable[[Tensor], object], tensor: Tensor, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call(tensor)
    return (time.perf_counter() - start) / repeats * 1e6


def table(sizes: tuple[int, ...], results: list[dict[str, float]]) -> str:
    """Return the measurements as text, one row a size."""
    rows = [f"{'KiB':>6}" + "".join(f"{name:>{_WIDTH}}" for name in (*results[0], *_RATIOS))]
    for num_bytes, us in zip(sizes, results, strict=True):
        ratios = [us[over] / us[under] for over, under in (name.split(" / ") for name in _RATIOS)]
        numbers = [f"{x:>{_WIDTH}.1f}" for x in us.values()] + [f"{x:>{_WIDTH}.2f}" for x in ratios]
        rows.append(f"{num_bytes // 1024:>6}{''.join(numbers)}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results = run_processes(measure, args.ranks, args.rounds, SIZES, timeout_s=600.0)
    sys.stdout.write(f"{args.ranks} ranks, medians of {args.rounds} rounds, us\n{table(SIZES, results[0])}\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Sums over shared memory, all of them checked, with random delays, on more ranks than cores: for as long as wanted.

    benchmarks/stress_shm.py                            # 100,000 sums on 4 ranks
    benchmarks/stress_shm.py --sums 3000000 --ranks 8 --seed 1
    benchmarks/stress_shm.py --seconds 150              # as many as it makes in that time, and says how many

Data that are read before they are there, or memory that is used again too early, make a wrong sum, which ends it with
the rank, the number of the sum and the element.
"""

from __future__ import annotations

import argparse
import sys
import time

from samestep.comm.base import Communicator
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.testing.ranks import run_processes
from samestep.testing.stress import check_sums

__all__ = ["main", "stress"]

_SLOT_BYTES = 4096  # the smallest, so that pieces are many
_AT_A_TIME = 2000


def stress(control: Communicator, sums: int, seconds: float, seed: int) -> int:
    """Add `sums` times, or until `seconds` are over; return how many there were."""
    comm = ShmCommunicator.gather(control, slot_bytes=_SLOT_BYTES, timeout_s=60.0)
    if not isinstance(comm, ShmCommunicator):
        raise SystemExit(f"no shared memory between these ranks: {comm.reason}")
    end, done = time.monotonic() + seconds, 0
    with comm:
        while done < sums and comm.broadcast_object(time.monotonic() < end):
            now = min(_AT_A_TIME, sums - done)
            check_sums(comm, now, seed + done)
            done += now
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sums = args.sums if args.sums is not None else 100_000 if args.seconds is None else sys.maxsize
    seconds = args.seconds if args.seconds is not None else 1e9
    began = time.monotonic()
    results = run_processes(stress, args.ranks, sums, seconds, args.seed, timeout_s=min(seconds, 1e8) + 600.0)
    took = time.monotonic() - began
    sys.stdout.write(f"{args.ranks} ranks: {results[0]} sums, all right, in {took:.0f} s\n")


if __name__ == "__main__":
    main()

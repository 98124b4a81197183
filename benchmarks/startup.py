#!/usr/bin/env python3
"""How long it takes to the first training step: torchrun against `samestep run`, side by side in one run.

    benchmarks/startup.py                               # 2 and 4 workers, 7 rounds
    benchmarks/startup.py --workers 2 --rounds 15
    benchmarks/startup.py --phases                      # and what each worker's time goes to

Launchers take turns, round by round, so that a machine whose speed drifts slows all of them alike; who begins
changes from round to round. The first round warms the disk's cache and isn't counted. The script that they start is
the same: it imports torch, joins the group over Gloo, wraps a small model in torch's own DistributedDataParallel
and makes one step, so the launcher is all that differs. "To the first step" is from the start of the launcher's
process to the moment at which the last rank has made its step, on the system's monotonic clock; "to the end" is
until the launcher's process has ended.

Reads: medians in seconds, and the ratio of them (below 1: less time than torchrun takes).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Start", "main", "measure", "table"]

SCRIPT = """
import time
stamps = {"script": time.monotonic()}
import json, os, sys
import torch
import torch.distributed as dist
stamps["torch"] = time.monotonic()
dist.init_process_group("gloo")
stamps["joined"] = time.monotonic()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 32)).sum().backward()
optimizer.step()
stamps["step"] = time.monotonic()
with open(os.path.join(sys.argv[1], f"{dist.get_rank()}.json"), "w") as file:
    json.dump(stamps, file)
dist.destroy_process_group()
"""

LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone"),
    "samestep run": ("-m", "samestep", "run"),
}
# What each phase is, in the order of the script: until its first line, and so on.
PHASES = {"script": "launcher, interpreter", "torch": "import torch", "joined": "join the group", "step": "first step"}


@dataclass(frozen=True)
class Start:
    """One start, in seconds since the launcher began: its end, and for each rank the end of each phase."""

    end_s: float
    ranks: tuple[Mapping[str, float], ...]

    @property
    def first_step_s(self) -> float:
        """When the last rank had made its first step."""
        return max(rank["step"] for rank in self.ranks)

    def phase_s(self, phase: str) -> float:
        """How long a phase took, in the mean over ranks."""
        names = list(PHASES)
        before = names[names.index(phase) - 1] if phase != names[0] else None
        return statistics.mean(rank[phase] - (rank[before] if before else 0.0) for rank in self.ranks)


def measure(launcher: Sequence[str], num_workers: int, folder: Path, limit_s: float) -> Start:
    """Starts the script once under `launcher`, in a new folder below `folder`.

    Raises RuntimeError, with the end of the output, if that fails or takes longer than `limit_s`.
    """
    place = Path(tempfile.mkdtemp(dir=folder))
    script = place / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, "--nproc-per-node", str(num_workers), str(script), str(place)]
    # Launchers choose different numbers of threads; that is not what is measured. Nor is how long Python compiles the
    # files of a package that is not installed: with this variable it would do that at each start, and for ours alone.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment.update(OMP_NUM_THREADS="1", TMPDIR=str(place))  # torchrun leaves a folder behind
    with (place / "output").open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        end_s = time.monotonic() - began
    files = sorted(place.glob("*.json"))
    if code != 0 or len(files) != num_workers:
        how = f"took longer than {limit_s} s" if code is None else f"ended with {code}"
        said = (place / "output").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command)}\n{how}, {len(files)} of {num_workers} ranks made a step\n{said}")
    ranks = [{name: stamp - began for name, stamp in json.loads(file.read_text()).items()} for file in files]
    return Start(end_s, tuple(ranks))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Lets a launcher end its workers; kills what doesn't end."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def table(starts: Mapping[str, Sequence[Start]], num_workers: int, phases: bool) -> list[str]:
    """Returns the lines that tell how long the starts of each launcher took."""
    median = {
        "to the first step": {name: statistics.median(s.first_step_s for s in runs) for name, runs in starts.items()},
        "to the end": {name: statistics.median(s.end_s for s in runs) for name, runs in starts.items()},
    }
    if phases:
        for phase, text in PHASES.items():
            median[f"  {text}"] = {n: statistics.median(s.phase_s(phase) for s in r) for n, r in starts.items()}
    base, *_ = starts
    lines = [f"{num_workers} workers".ljust(26) + "".join(name.rjust(16) for name in starts) + "ratio".rjust(9)]
    for text, values in median.items():
        *_, last = values.values()
        ratio = f"{last / values[base]:9.2f}" if values[base] > 0.001 else "-".rjust(9)
        lines.append(text.ljust(26) + "".join(f"{value:14.2f} s" for value in values.values()) + ratio)
    for name, runs in starts.items():
        steps = sorted(s.first_step_s for s in runs)
        lines.append(f"  {name}: {len(steps)} starts, {steps[0]:.2f} to {steps[-1]:.2f} s to the first step")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Time to the first step: torchrun against samestep run.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    parser.add_argument("--rounds", type=int, default=7, metavar="R", help="rounds that count (default: 7)")
    parser.add_argument("--phases", action="store_true", help="also say what the workers' time goes to")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds for one start (default: 120)")
    parser.add_argument("--flags", default="", help="more flags for samestep run, in one argument")
    args = parser.parse_args(argv)
    if args.rounds < 1 or min(args.workers) < 1:
        parser.error("--rounds and --workers: expected at least 1")
    launchers = {**LAUNCHERS, "samestep run": (*LAUNCHERS["samestep run"], *args.flags.split())}
    with tempfile.TemporaryDirectory() as folder:
        for num_workers in args.workers:
            starts: dict[str, list[Start]] = {name: [] for name in launchers}
            for number in range(args.rounds + 1):
                for name in list(launchers)[:: 1 if number % 2 else -1]:
                    start = measure(launchers[name], num_workers, Path(folder), args.limit)
                    if number:
                        starts[name].append(start)
            print("\n".join(table(starts, num_workers, args.phases)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

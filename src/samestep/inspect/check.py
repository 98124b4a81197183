"""Runs a program's first steps on several ranks and on one, and finds what is wrong with it as a program of ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from samestep.errors import LaunchError
from samestep.inspect.comparison import Comparison, compare
from samestep.inspect.finding import Finding, Seen
from samestep.inspect.findings import findings
from samestep.inspect.observation import Observation, from_json
from samestep.launch.kernel import die_with_parent
from samestep.world import environment

__all__ = ["Program", "check", "collect"]

_LAST_LINES = 15


@dataclass(frozen=True)
class Program:
    """argv: a script with its arguments, or "-m" and a module with its. local_rank_flag: what the script gets besides.

    timeout_s: how long each of the two runs may take.
    """

    argv: tuple[str, ...]
    nproc_per_node: int = 2
    steps: int = 3
    timeout_s: float = 600.0
    local_rank_flag: str | None = None


def check(program: Program) -> tuple[Seen, list[Finding]]:
    """Run the program twice, under the launcher, and return what was seen and what is wrong.

    Its output is not shown; files that it writes by Python's means go to a folder that is gone afterwards.

    Raises LaunchError if it could not be started, or does not end in time.
    """
    # Ranks that are killed with the launcher may still be making a file when the folder goes.
    with tempfile.TemporaryDirectory(prefix="samestep-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for mode, ranks in (("parts", program.nproc_per_node), ("whole", 1)):
            said = _run(program, folder, mode, ranks)
            if mode == "parts" and len(list(folder.glob("parts-seen-*.json"))) < ranks:
                raise LaunchError(f"the program could not be run on {ranks} ranks:\n{said}")
            if any(one.error or not one.steps for one in _observations(folder, "parts")):
                break  # one rank would tell no more
        seen = collect(folder)
    return seen, findings(seen)


def collect(folder: Path) -> Seen:
    """Return what ranks have left in a folder."""
    parts, whole = _observations(folder, "parts"), _observations(folder, "whole")
    why_not = _why_not(parts, whole)
    if why_not:
        return Seen(parts, [], why_not)
    count = min(len(parts[0].steps), len(whole[0].steps))
    halves = any(one.halves for one in (*parts, *whole))
    comparisons = [_compared(folder, number, halves) for number in range(count)]
    return Seen(parts, comparisons)


def _why_not(parts: Sequence[Observation], whole: Sequence[Observation]) -> str:
    for one in (*parts, *whole):
        if one.incomparable:
            return one.incomparable
    if any(one.error for one in parts):
        return "the program failed"
    if not all(one.steps for one in parts):
        return "no optimizer of torch's took a step"
    if not whole or whole[0].error:
        last = whole[0].error.strip().splitlines()[-1:] if whole else []
        return f"the program can't be run on one rank: {' '.join(last) or 'it was ended'}"
    if not whole[0].steps:
        return "on one rank no optimizer took a step"
    if not _alike(parts):
        return "ranks made different loaders, so it is not plain which batches belong together"
    if not any(one.passes for one in parts[0].loaders):
        return "no batch came from a DataLoader, so one rank could not be given the samples of all"
    if parts[0].steps[0].weights != whole[0].steps[0].weights:
        return "one rank began with other weights than several"
    if any(step.draws for step in whole[0].steps) and not any(step.draws for step in parts[0].steps):
        return "the program draws random numbers on one rank only"
    return ""


def _alike(ranks: Sequence[Observation]) -> bool:
    """Whether loaders of the same number are the same loader, as far as can be told; some ranks may have more."""
    for loaders in zip(*(one.loaders for one in ranks), strict=False):
        lengths = [one.length or 0 for one in loaders]  # of parts that ranks have cut themselves they differ a little
        if len({(one.sampler, one.batch_size) for one in loaders}) > 1 or max(lengths) - min(lengths) > len(ranks):
            return False
    return True


def _compared(folder: Path, number: int, halves: bool) -> Comparison:
    parts, whole = (_tensors(folder / f"{mode}-gradients-{number}.pt") for mode in ("parts", "whole"))
    return compare(parts, whole, halves=halves)


def _tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def _observations(folder: Path, mode: str) -> list[Observation]:
    found = [from_json(path.read_text()) for path in folder.glob(f"{mode}-seen-*.json")]
    return sorted(found, key=lambda one: one.rank)


def _run(program: Program, folder: Path, mode: str, ranks: int) -> str:
    """Run the program on so many ranks, to its end or ours; return the last lines of what it wrote."""
    observed = ("-m", "samestep.inspect.observed", str(folder), mode, str(program.steps))
    command = (sys.executable, "-m", "samestep", "run", "--nproc-per-node", str(ranks), *observed)
    said = folder / f"{mode}-said"
    with (
        said.open("wb") as output,
        subprocess.Popen(
            (*command, program.local_rank_flag or "-", *program.argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            preexec_fn=die_with_parent,
        ) as launcher,
    ):
        try:
            launcher.wait(program.timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"the program was not done with {program.steps} steps on {ranks} rank{'s' * (ranks != 1)} after "
                f"{program.timeout_s:g} s; if it is not stuck, give it more (--timeout)"
            ) from error
        finally:
            if launcher.poll() is None:
                launcher.kill()  # its workers go with it
    return "\n".join(said.read_text(errors="replace").splitlines()[-_LAST_LINES:])

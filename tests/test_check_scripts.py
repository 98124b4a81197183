"""`samestep check` on small scripts: each makes one mistake, which is found; without it, nothing is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import check_ranks
import pytest

from samestep.inspect.check import collect
from samestep.inspect.finding import Finding, Seen
from samestep.inspect.findings import findings
from samestep.inspect.report import report

SCRIPTS = Path(__file__).parent / "scripts" / "check"

# For each script: the kind of its mistake, and what is said of it.
MISTAKES = {
    "scale": ("scale", "every gradient is 2 times smaller on 2 ranks than on one"),
    "by_hand": ("scale", "every gradient is 2 times larger on 2 ranks than on one"),
    "seeds": ("replicas", "Before the first step 0.weight, 0.bias, 4.weight and 1 more on rank 1 differ from rank 0's"),
    "exchange": ("replicas", "At step 0 each rank has its own gradient: 0.weight, 0.bias, 4.weight and 1 more"),
    "batchnorm": ("batchnorm", "Layers: 1. At step 0 5 of 6 gradients differ between 2 ranks and one"),
    "epoch": ("epoch", "A sampler that shuffles gave rank 0 30 samples in the same order twice"),
    "shuffle": (
        "samples",
        "In an epoch of 60 samples 60 are drawn more than once (RandomSampler on every rank), and 0",
    ),
    "same_rank": ("samples", "Ranks 0, 1 drew the same 30 samples in the same order (DistributedSampler)"),
    "stream": ("samples", "Of the first 10 samples of loader 0 that each rank had, 10 were the same on all."),
    "evaluation": ("evaluation", "21 samples are counted as 22: DistributedSampler pads"),
    "files": ("files", "/runs/model.pt: by ranks 0, 1."),
    "clip": ("clipping", "Before step 0 every rank clipped its own gradients"),
    "optimizer": ("optimizer", "Step 0 on rank 0: none of its 4 parameters has a gradient"),
}


# Programs without a mistake, and what is said of their gradients.
FINE = {
    "fine_gan": "agree",
    "fine_text": "agree",
    "fine_stream": "agree",
    "fine_rank0": "agree",
    "fine_random": "not compared: the program draws",
}


@pytest.fixture(scope="module")
def seen_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Seen]:
    """Runs every script, with its mistake and without, all as forks of one process; returns what was seen of each."""
    place = tmp_path_factory.mktemp("check")
    runs = [*((name, right) for name in MISTAKES for right in (False, True)), *((name, True) for name in FINE)]
    folders = {(name, right): place / f"{name}-{'right' if right else 'wrong'}" for name, right in runs}
    jobs = []
    for (name, right), folder in folders.items():
        (folder / "seen").mkdir(parents=True)
        compares = right or name in ("scale", "by_hand", "batchnorm")
        jobs.append((str(folder), compares, [str(SCRIPTS / f"{name}.py"), *(["--right"] if right else [])]))
    (place / "jobs").write_text(json.dumps(jobs))
    subprocess.run([sys.executable, check_ranks.__file__, place / "jobs"], check=True, timeout=110)

    def seen(name: str, right: bool) -> Seen:
        folder = folders[name, right]
        found = collect(folder / "seen")
        said = "".join(path.read_text() for path in folder.glob("*-said-*"))
        assert len(found.ranks) == 2, said
        assert not any(rank.error for rank in found.ranks), said
        return found

    return seen


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_is_found(name: str, seen_of: Callable[[str, bool], Seen]) -> None:
    kind, said = MISTAKES[name]
    found = findings(seen_of(name, False))
    assert [one.kind for one in found] == [kind], found
    assert said in found[0].seen


@pytest.mark.parametrize("name", MISTAKES)
def test_its_twin_without_the_mistake_raises_no_alarm(name: str, seen_of: Callable[[str, bool], Seen]) -> None:
    seen = seen_of(name, True)
    found: list[Finding] = findings(seen)
    assert found == []
    assert len(seen.comparisons) == 2, seen.why_not
    assert all(one.agrees for one in seen.comparisons), seen.comparisons


@pytest.mark.parametrize("name", FINE)
def test_a_program_without_a_mistake_raises_no_alarm(name: str, seen_of: Callable[[str, bool], Seen]) -> None:
    seen = seen_of(name, True)
    assert findings(seen) == []
    (gradients,) = [line for line in report(name, seen, []).splitlines() if line.startswith("  gradients")]
    assert FINE[name] in gradients

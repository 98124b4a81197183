"""The job, end to end: the digits example, and people's own scripts, started as people start them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import samestep.data.digits
from samestep.comm.base import Communicator
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
DIGITS = Path(samestep.data.digits.__file__).parent / "mnist"
LAST_LINE = re.compile(r"test accuracy (0\.9\d{3})  macro F1 (0\.9\d{3})  weights sha256 ([0-9a-f]{64})")


def run(*command: str | Path, folder: Path, limit_s: float) -> str:
    """Run a program in `folder` to its end; return what it printed. It and its group are killed at the limit."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    return output


def launch(*command: str | Path, folder: Path, limit_s: float = 110, ranks: int = 2) -> str:
    return run("-m", "samestep", "run", "--nproc-per-node", str(ranks), *command, folder=folder, limit_s=limit_s)


@pytest.mark.timeout(200)
def test_the_example_on_two_ranks_reads_at_least_97_percent_of_the_digits(tmp_path: Path) -> None:
    output = launch(ROOT / "examples/digits.py", folder=tmp_path, limit_s=190)
    last = output.splitlines()[-1]
    found = LAST_LINE.fullmatch(last.removeprefix("[0] "))
    assert found, output
    assert float(found[1]) >= 0.97
    assert float(found[2]) >= 0.97
    state = torch.load(tmp_path / "runs/digits.pt", weights_only=True)
    assert not any(name.startswith("module.") for name in state), "saved without the wrapper's name"


def test_the_example_by_itself_is_one_rank(tmp_path: Path) -> None:
    output = run(ROOT / "examples/digits.py", "--epochs", "1", "--out", "weights.pt", folder=tmp_path, limit_s=110)
    assert LAST_LINE.fullmatch(output.splitlines()[-1]), output
    assert (tmp_path / "weights.pt").is_file()


def test_the_example_gives_the_same_bits_every_time(tmp_path: Path) -> None:
    lines = [
        launch(ROOT / "examples/digits.py", "--epochs", "1", "--batch", "512", folder=tmp_path, ranks=3).splitlines()[
            -1
        ]
        for _ in range(2)
    ]
    assert "weights sha256" in lines[0]
    assert lines[0] == lines[1]


def test_the_example_names_a_data_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run(ROOT / "examples/digits.py", "--data", "nowhere", folder=tmp_path, limit_s=60)
    assert "nowhere" in str(caught.value)
    assert "MissingDataError" in str(caught.value)


def test_a_script_for_torch_distributed_launch_runs_unchanged(tmp_path: Path) -> None:
    output = launch(SCRIPTS / "template_launch.py", "--data", DIGITS, "--steps", "5", folder=tmp_path)
    losses = re.findall(r"^\[(\d)\] rank (\d) epoch 0 step (\d) loss \d\.\d{6}$", output, re.MULTILINE)
    assert sorted(losses) == [(str(r), str(r), str(s)) for r in range(2) for s in range(5)], output


@pytest.mark.timeout(200)
def test_a_script_for_torchrun_runs_unchanged(tmp_path: Path) -> None:
    output = launch(SCRIPTS / "template_torchrun.py", "--data", DIGITS, "--batch", "64", folder=tmp_path, limit_s=190)
    found = re.search(r"^\[0\] epoch 0 accuracy (0\.\d{4}) macro F1 (0\.\d{4})$", output, re.MULTILINE)
    assert found, output
    assert float(found[1]) > 0.9
    assert (tmp_path / "model.pt").is_file()


def test_published_gradients_come_out_of_our_class() -> None:
    assert run_processes(published_gradients, 2) == ["as published"] * 2


def published_gradients(communicator: Communicator) -> str:
    sys.path.insert(0, str(SCRIPTS))
    from gradients import example

    example(communicator.rank, DistributedDataParallel)  # asserts the numbers
    return "as published"


_AT_WORK_TO_THE_LAST = """
import os, torch, samestep, torch.distributed as dist

def main():
    with samestep.connect():
        model = samestep.DistributedDataParallel(torch.nn.Linear(3, 3))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for _ in range(40):
            dist.all_reduce(torch.ones(1 << 18), async_op=True)

main()
names = {open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")}
print("left:", sorted(name for name in names if "gloo" in name))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in Linux's /proc")
def test_no_thread_of_gloo_is_left_to_meet_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """One that lets go of a Python object then aborts the process; several things once kept the default group alive."""
    (tmp_path / "script.py").write_text(_AT_WORK_TO_THE_LAST)
    output = launch("script.py", folder=tmp_path)
    assert sorted(line for line in output.splitlines() if "left" in line) == ["[0] left: []", "[1] left: []"]

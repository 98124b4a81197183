"""`spawn`: functions on several ranks, from within a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import LaunchError, WorkerError
from samestep.launch.spawn import spawn

# Python 3.12 and newer warn of any fork while another thread runs, such as pytest's own for time limits.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("samestep-*")) == []


def test_closures_and_lambdas_return_their_values_by_rank_time_after_time() -> None:
    offset = 10

    def closure(rank: int, factor: int) -> tuple[int, int, str]:
        return rank * factor + offset, os.getpid(), os.environ["WORLD_SIZE"]

    first = spawn(closure, (2,), nproc=3)
    assert [(value, size) for value, _, size in first] == [(10, "3"), (12, "3"), (14, "3")]
    assert len({pid for _, pid, _ in first} | {os.getpid()}) == 4
    assert spawn(lambda rank: {"rank": rank + offset}, nproc=2) == [{"rank": 10}, {"rank": 11}]
    assert spawn(lambda rank: sys.exit(0)) == [None]


def test_ranks_train_together() -> None:
    def train(rank: int) -> tuple[int, Tensor]:
        with samestep.connect() as comm:
            torch.manual_seed(comm.rank)
            model = samestep.DistributedDataParallel(nn.Linear(3, 2))
            model(torch.full((1, 3), float(rank))).sum().backward()
            return comm.size, model.module.weight.grad

    (size, first), (_, second) = spawn(train, nproc=2)
    assert size == 2
    assert torch.equal(first, torch.full((2, 3), 0.5))
    assert torch.equal(first, second)


class AwkwardError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


def test_the_first_exception_comes_with_its_ranks_own_traceback() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            try:
                raise KeyError("the cause")
            except KeyError as error:
                raise ValueError("no such digit") from error
        signal.pause()  # until it is ended, as rank 1 has failed

    with pytest.raises(
        WorkerError, match=r"(?s)rank 1 of 3 failed first:.*KeyError.*in fail.*ValueError: no such digit"
    ) as e:
        spawn(fail, nproc=3)
    assert e.value.rank == 1
    assert isinstance(e.value.__cause__, ValueError)
    assert "spawned.py" not in str(e.value)


def test_an_exception_that_does_not_pickle_still_tells() -> None:
    def fail(rank: int) -> None:
        raise AwkwardError("own words")

    with pytest.raises(WorkerError, match="AwkwardError: own words") as caught:
        spawn(fail)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda rank: os.kill(os.getpid(), signal.SIGKILL), "rank 0 of 1 failed first: it was killed by SIGKILL"),
        (lambda rank: os._exit(7), "it exited with code 7"),
        (lambda rank: os._exit(0), "it ended before its function returned"),
        (lambda rank: sys.exit(3), "SystemExit: 3"),
        (lambda rank: threading.Lock(), "cannot pickle '_thread.lock' object"),
    ],
)
def test_ranks_that_end_otherwise(fn: Callable[[int], object], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        spawn(fn)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a function to call on every rank, got int"):
        spawn(3)  # type: ignore[arg-type]
    for nproc in (0, -1, 1.5, "two"):
        with pytest.raises(ValueError, match=f"expected at least 1 process, got {nproc!r}"):
            spawn(print, nproc=nproc)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="can't be sent to other processes: cannot pickle"):
        spawn(print, (threading.Lock(),))
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            spawn(print)
        except LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(caught)


SCRIPT = """
import os, sys
import samestep
print("script runs", flush=True)
def work(rank):
    print("hello", flush=True)
    if "fail" in sys.argv or os.path.exists("fail"):
        raise RuntimeError("as asked")
    return rank
print(samestep.spawn(work, nproc=2), flush=True)
"""


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_script_needs_no_guard_and_is_not_run_again(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "script runs"
    assert sorted(lines[1:3]) == ["[0] hello", "[1] hello"]
    assert lines[3:] == ["[0, 1]"]


def test_a_scripts_own_lines_are_in_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    done = run_script(tmp_path)
    assert done.returncode == 1
    assert 'script.py", line 8, in work\n    raise RuntimeError("as asked")' in done.stderr


def test_ctrl_c_ends_the_ranks_and_is_a_keyboard_interrupt() -> None:
    def interrupt(rank: int) -> None:
        if rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        spawn(interrupt, nproc=2)

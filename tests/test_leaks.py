"""Tests that leave something behind are found out."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import leaks
import pytest
import torch.distributed as dist

from samestep.world import environment

Leak = Callable[[], AbstractContextManager[None]]


@contextmanager
def _process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as child:
        yield
        child.kill()


@contextmanager
def _zombie() -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield
    child.wait()


@contextmanager
def _thread() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="straggler")
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def _file() -> Iterator[None]:
    with socket.socket():
        yield


@contextmanager
def _duplicate() -> Iterator[None]:
    """One more descriptor of what was open before."""
    copy = os.dup(0)
    yield
    os.close(copy)


@contextmanager
def _variable() -> Iterator[None]:
    os.environ["A_TEST_WAS_HERE"] = "1"
    yield
    del os.environ["A_TEST_WAS_HERE"]


@contextmanager
def _no_variable() -> Iterator[None]:
    value = os.environ.pop("PATH")
    yield
    os.environ["PATH"] = value


@contextmanager
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (_process, r"^the process \d+ \(.*signal.pause\(\)\)$"),
        (_zombie, r"^the process \d+ \(ended, not waited for\)$"),
        (_thread, "^the thread 'straggler'$"),
        (_file, r"^an open socket:\[\d+\]$"),
        (_duplicate, r"^an open "),
        (_variable, "^the environment variable A_TEST_WAS_HERE: None became '1'$"),
        (_no_variable, "^the environment variable PATH: '.*' became None$"),
        (_group, "torch.distributed's default process group$"),
    ],
)
def test_leaks_are_found(leak: Leak, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_PATIENCE_S", 0.01)
    before = leaks.take()
    assert leaks.left_since(before) == []
    with leak():
        found = leaks.left_since(before)
        assert [line for line in found if re.search(said, line)], found
    assert leaks.left_since(before) == []


def test_what_ends_by_itself_is_no_leak() -> None:
    before = leaks.take()
    cycle: list[Any] = [socket.socket()]
    cycle.append(cycle)
    stop = threading.Event()
    threading.Thread(target=stop.wait).start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del cycle
        stop.set()
        assert leaks.left_since(before) == []


def test_what_multiprocessing_keeps_is_no_leak() -> None:
    before = leaks.take()
    forkserver.ensure_running()
    assert leaks.left_since(before) == []


def test_what_can_be_put_back_is() -> None:
    before = leaks.take()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    os.environ["A_TEST_WAS_HERE"] = "1"
    path = os.environ.pop("PATH")
    leaks.end(before)
    assert os.environ["PATH"] == path
    assert leaks.left_since(before) == []
    child.wait()


_SUITE = """
import os, subprocess, sys
kept = []
def test_nothing(): pass
def test_file(): kept.append(open(__file__))
def test_variable(monkeypatch):
    monkeypatch.setenv("TIDY", "1")
    os.environ["UNTIDY"] = "1"
def test_process(): kept.append(subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]))
def test_nothing_more(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TIDY", "1")
    with open(tmp_path / "file", "w") as file:
        subprocess.run([sys.executable, "-S", "-c", ""], stdout=file, check=True)
"""


def test_tests_that_leak_fail(tmp_path: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(_SUITE)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    ran = subprocess.run(
        command, env={**environment(), "PYTHONPATH": str(here)}, capture_output=True, text=True, timeout=60, check=False
    )
    left = dict(re.findall(r"ERROR at teardown of test_(\w+) _+\nthe test left behind (.*)", ran.stdout))
    assert "5 passed, 3 errors" in ran.stdout
    assert left.keys() == {"file", "variable", "process"}
    assert left["file"] == f"an open {tmp_path / 'test_it.py'}"
    assert left["variable"] == "the environment variable UNTIDY: None became '1'"
    assert re.match(r"the process \d+ \(.*signal.pause\(\)\)", left["process"])

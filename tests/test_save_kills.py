"""A writer that is killed with -9 at any point leaves the old file or the new one, and nothing for long."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.run import files, sealed
from samestep.testing import ranks

POINTS = ["first write", "third write", "comment", "fsync", "replace", "replaced", "folder"]
OLD, NEW = {"a": torch.zeros(1000)}, {"a": torch.ones(3000), "b": torch.ones(5)}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(call: Callable[..., Any], number: int = 1) -> Callable[..., Any]:
    """Be killed at the call of that number."""
    calls = iter(range(1, 1_000))

    def killed(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            die()
        return call(*args, **options)

    return killed


def save_and_die(path: Path, point: str) -> None:
    writes, fsync, replace = sealed._Hashing.write, os.fsync, os.replace
    match point:
        case "first write" | "third write":
            sealed._Hashing.write = before(writes, 1 if point == "first write" else 3)  # type: ignore[method-assign]
        case "comment":
            torch.load = before(torch.load)  # all but the comment is written then
        case "fsync" | "folder":
            os.fsync = before(fsync, 1 if point == "fsync" else 2)
        case "replace":
            os.replace = before(replace)
        case "replaced":
            files._sync_folder = before(files._sync_folder)
    samestep.save(NEW, path)


@pytest.mark.parametrize("point", POINTS)
def test_case_13_killed_while_saving(point: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    samestep.save(OLD, path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ranks.__name__])
    child = context.Process(target=save_and_die, args=(path, point))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    child.close()

    wanted = NEW if point in ("replaced", "folder") else OLD
    found = samestep.load(path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())

    left = [name for name in os.listdir(tmp_path) if name != path.name]
    assert len(left) == (wanted is OLD)
    mine = [files._new_file(str(tmp_path), name) for name in (path.name, "weights.pt.2")]
    samestep.save(NEW, path)
    there = {os.path.basename(file.name) for file in mine} | {path.name}
    assert set(os.listdir(tmp_path)) == there, "what a dead writer left goes; what a living one holds stays"
    for file in mine:
        os.unlink(file.name)
        file.close()


def test_two_writers_of_one_file_both_finish(tmp_path: Path) -> None:
    """One begins and ends while the other is at it; the last to finish has it."""
    path = tmp_path / "weights.pt"

    def write(file: Any) -> None:
        samestep.save(NEW, path)
        sealed.write_sealed(OLD, file)

    files.replace_file(str(path), write)
    assert list(samestep.load(path)) == ["a"]
    assert os.listdir(tmp_path) == [path.name]

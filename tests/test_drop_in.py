"""`samestep run --drop-in`: torch's class is ours in a script, and all else is as under plain Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import samestep.data.digits
from samestep.launch.drop_in import drop_in_command

SCRIPTS = Path(__file__).parent / "scripts"
DIGITS = Path(samestep.data.digits.__file__).parent / "mnist"


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )


def launch(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "samestep", "run", "--no-prefix", *command)


@pytest.mark.parametrize(("script", "args"), [("template_launch.py", ["--steps", "4"]), ("template_torchrun.py", [])])
def test_peoples_scripts_give_the_same_numbers_with_either_class(tmp_path: Path, script: str, args: list[str]) -> None:
    outputs = []
    for flags in ([], ["--drop-in"]):
        done = launch(tmp_path, "--nproc-per-node", "2", *flags, SCRIPTS / script, "--data", DIGITS, *args)
        assert done.returncode == 0, done.stderr
        outputs.append(sorted(done.stdout.splitlines()))
    assert re.search(r"loss \d\.\d{6}|accuracy 0\.9\d{3}", outputs[0][0])
    assert outputs[0] == outputs[1], "on two ranks a sum has two terms, so the bits are the same"


LOOKING = """
import sys, os
import torch
from torch.nn.parallel import DistributedDataParallel as one
from torch.nn.parallel.distributed import DistributedDataParallel as other
from torch import nn
import beside
import __main__
print(one.__module__, one is other is nn.parallel.DistributedDataParallel)
print(__name__, os.path.basename(__file__), os.path.isabs(__file__), __spec__, sys.argv, __main__.__dict__ is globals())
print(sys.path[0] == os.path.dirname(os.path.realpath(__file__)), beside.HERE)
"""


def test_a_script_finds_itself_as_under_plain_python(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "beside.py").write_text("HERE = 'beside'")
    (place / "look.py").write_text(LOOKING)
    plain = run(tmp_path, "place/look.py", "-x", "a b")
    dropped = launch(tmp_path, "--drop-in", "place/look.py", "-x", "a b")
    assert dropped.returncode == plain.returncode == 0, dropped.stderr + plain.stderr
    assert plain.stdout.splitlines()[0] == "torch.nn.parallel.distributed True"
    assert dropped.stdout.splitlines()[0] == "samestep.parallel.distributed True"
    assert dropped.stdout.splitlines()[1:] == plain.stdout.splitlines()[1:]


def test_a_module_finds_itself_as_under_plain_python(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("import sys\nfrom . import other\nprint(__name__, __package__, sys.argv[1:])")
    (package / "other.py").touch()
    plain = run(tmp_path, "-m", "package.part", "x")
    dropped = launch(tmp_path, "--drop-in", "-m", "package.part", "x")
    assert dropped.stdout == plain.stdout == "__main__ package ['x']\n", dropped.stderr


def test_a_folder_with_a_main_runs(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program/__main__.py").write_text("import beside, sys\nprint(__name__, beside.HERE, sys.argv[1:])")
    (tmp_path / "program/beside.py").write_text("HERE = 1")
    dropped = launch(tmp_path, "--drop-in", "program", "y")
    assert dropped.stdout == "__main__ 1 ['y']\n", dropped.stderr


CHILDREN = """
import multiprocessing
def square(x):
    return x * x
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(square, [2, 3]))
"""


def test_processes_that_the_script_starts_find_its_functions(tmp_path: Path) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    dropped = launch(tmp_path, "--drop-in", "children.py")
    assert dropped.stdout == "[4, 9]\n[4, 9]\n", dropped.stderr


@pytest.mark.parametrize(
    ("text", "last"),
    [("def f():\n    return 1 / 0\nf()\n", "ZeroDivisionError: division by zero"), ("x = (\n", "SyntaxError: ")],
)
def test_tracebacks_begin_with_the_script(tmp_path: Path, text: str, last: str) -> None:
    (tmp_path / "wrong.py").write_text(text)
    dropped = launch(tmp_path, "--drop-in", "wrong.py")
    assert dropped.returncode == 1
    assert last in dropped.stderr
    assert 'wrong.py", line' in dropped.stderr
    assert "drop_in" not in dropped.stderr
    assert "runpy" not in dropped.stderr


def test_exit_codes_are_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("raise SystemExit(7)")
    assert launch(tmp_path, "--drop-in", "leave.py").returncode == 7


def test_the_command_of_a_worker() -> None:
    assert drop_in_command(("python", "a.py", "-x")) == ("python", "-m", "samestep.launch.drop_in", "a.py", "-x")
    assert drop_in_command(("python", "-m", "a.b", "c")) == (
        "python",
        "-m",
        "samestep.launch.drop_in",
        "-m",
        "a.b",
        "c",
    )

"""What the zygote imports ahead of a script that takes optimizer steps, and what it leaves to the script."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from launching import Run, named_child_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt another's children")

FORK = ("--nproc-per-node", "1", "--start-method", "fork", "--no-prefix")
# Found in the text, this is enough for the zygote to expect an optimizer.
OPTIMIZER = "\nif False:\n    import torch\n    torch.optim\n"
LOOK = """
names = ["torch", "sympy", "torch.distributed.tensor", "torch._dynamo", "torch.distributed.nn.functional"]
print([name in sys.modules for name in names])
"""
# What keeps a group is the default of an argument, which is that of the moment of its module's import.
STEP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.optim.SGD([torch.ones(1)])
print(torch.distributed.nn.functional.broadcast.__defaults__[0] is dist.group.WORLD)
dist.destroy_process_group()
"""
# Stands in for sympy, and waits for torch's libraries, which nobody but another thread can bring here.
WAIT_FOR_LIBRARIES = """
import os, sys, time
deadline = time.monotonic() + 30
with open("/proc/self/maps") as maps:
    while "libtorch_python.so" not in maps.read():
        assert time.monotonic() < deadline
        os.sched_yield()
        maps.seek(0)
open("linked", "w").write(f"torch is imported: {'torch' in sys.modules}")
"""


# The second piece is written once the first has been read.
PIECES = """
import fcntl, os, select, termios
os.write(2, b"half ")
while any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))):
    select.select([], [], [], 0.001)
os.write(2, b"a line\\nits end")
os._exit(7)
"""


def has_devices() -> bool:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).with_name("lib")
    return any((folder / f"libtorch_{device}.so").exists() for device in ("cuda", "hip", "xpu"))


def fake_torch(folder: Path, **modules: str) -> None:
    """Lays a package called torch, with modules of its own, beside the script."""
    for name, text in {"": "class default_generator:\n    seed = int", **modules}.items():
        path = folder.joinpath("torch", *name.split("__"), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "sympy.py").touch()


def lines_of(run: Run) -> list[str]:
    return [line for line in run.lines(run.err) if "log files" not in line]


def test_dynamo_is_left_to_the_script_and_half_of_what_it_needs_is_not(tmp_path: Path) -> None:
    with Run(tmp_path, LOOK + "note('there')\nwait_for('go')" + STEP, *FORK) as run:
        run.wait_for("there")
        zygote = named_child_of(run.process.pid, "samestep-zygote")
        assert len(os.listdir(f"/proc/{zygote}/task")) == 1
        (tmp_path / "go").touch()
        assert run.wait() == 0
    assert run.out.read_text() == "[True, True, True, False, False]\nTrue\n"


@pytest.mark.skipif(has_devices(), reason="with libraries for devices, torch alone links them")
def test_torch_is_linked_while_something_else_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sympy.py").write_text(WAIT_FOR_LIBRARIES)
    with Run(tmp_path, OPTIMIZER, *FORK) as run:
        assert run.wait() == 0
    assert (tmp_path / "linked").read_text() == "torch is imported: False"


def test_what_a_torch_does_not_have_is_passed_over(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    with Run(tmp_path, LOOK + OPTIMIZER, *FORK) as run:
        assert run.wait() == 0
    assert run.out.read_text() == "[True, True, False, False, False]\n"
    assert "zygote" not in run.err.read_text()


def test_a_torch_that_imports_dynamo_too_early_is_left_to_fresh_interpreters(tmp_path: Path) -> None:
    fake_torch(tmp_path, distributed="", distributed__tensor="import torch._dynamo", _dynamo="")
    with Run(tmp_path, LOOK + OPTIMIZER, *FORK) as run:
        assert run.wait() == 0
    assert run.out.read_text() == "[False, False, False, False, False]\n"
    assert lines_of(run) == [
        "samestep: torch._dynamo would be imported before the script joins its group",
        "samestep: the zygote exited with code 1; workers to come are started as fresh interpreters",
    ]


def test_what_the_zygote_writes_in_pieces_is_shown_in_whole_lines(tmp_path: Path) -> None:
    fake_torch(tmp_path, distributed="", distributed__tensor=PIECES)
    with Run(tmp_path, OPTIMIZER, *FORK) as run:
        assert run.wait() == 0
    assert lines_of(run) == [
        "samestep: half a line",
        "samestep: its end",
        "samestep: the zygote exited with code 7; workers to come are started as fresh interpreters",
    ]

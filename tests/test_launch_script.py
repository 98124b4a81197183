"""A script under `samestep run` finds all as under plain Python, whichever way its process was started."""

from __future__ import annotations

import py_compile
import subprocess
import zipfile
from pathlib import Path

import pytest
from launching import python as run

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])


def launch(folder: Path, method: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "samestep", "run", "--no-prefix", "--start-method", method, *command)


LOOKING = """
import atexit, gc, os, signal, sys, threading
import __main__, beside
print(__name__, os.path.basename(__file__), os.path.isabs(__file__), __spec__, __package__, sys.argv, sys.orig_argv[1:])
print(__builtins__, __main__.__dict__ is globals())
print(sorted(n for n in globals() if n.startswith("__") and n != "__cached__"))
print(sys.path[0] == os.path.dirname(os.path.realpath(__file__)), beside.HERE, sys.path[1:], os.getcwd())
print(threading.current_thread() is threading.main_thread(), threading.active_count())
print(len(os.listdir("/proc/self/task")), sys.getrecursionlimit(), sys.getswitchinterval())
print({s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)})
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), sys.flags, gc.isenabled(), gc.get_threshold())
print([os.isatty(n) for n in range(3)], repr(sys.stdin.read()), sys.stdout.encoding, sys.stderr.errors, sys.stdout.mode)
print(type(__loader__).__name__, sys.exc_info(), os.getpgid(0) == os.getpid() or "plain", sys.stdout.line_buffering)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (started.wait(), print("in a thread")), daemon=False).start() if (
    started := threading.Event()
) else None
started.set()
"""


@METHODS
def test_a_script_finds_itself_as_under_plain_python(tmp_path: Path, method: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "beside.py").write_text("HERE = 'beside'")
    (place / "look.py").write_text(LOOKING)
    plain = run(tmp_path, "place/look.py", "-x", "a b")
    here = launch(tmp_path, method, "place/look.py", "-x", "a b")
    assert plain.returncode == here.returncode == 0, here.stderr + plain.stderr
    # It leads a process group, and its lines come through at once.
    assert here.stdout == plain.stdout.replace(" plain False\n", " True True\n")


@METHODS
def test_a_module_finds_itself_as_under_plain_python(tmp_path: Path, method: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text(
        "import sys\nfrom . import other\nprint(__name__, __package__, __spec__.name, sys.argv[1:], sys.path[0])"
    )
    (package / "other.py").touch()
    plain = run(tmp_path, "-m", "package.part", "x")
    here = launch(tmp_path, method, "-m", "package.part", "x")
    assert here.stdout == plain.stdout == f"__main__ package package.part ['x'] {tmp_path}\n", here.stderr


LASTING = """
import atexit, pickle, sys, threading
def work():
    pass
def late():
    print(len(pickle.dumps(work)) > 0, sys.argv, work is sys.modules["__main__"].work)
atexit.register(late)
"""


@METHODS
def test_main_stays_until_the_process_ends(tmp_path: Path, method: str) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program/__main__.py").write_text(LASTING)
    for command in (("program/__main__.py",), ("program",), ("-m", "program")):
        plain = run(tmp_path, *command, "x")
        here = launch(tmp_path, method, *command, "x")
        assert here.stdout == plain.stdout, here.stderr
        assert here.stdout.startswith("True ")


@METHODS
def test_what_lies_beside_a_script_comes_before_pythons_own(tmp_path: Path, method: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "json.py").write_text("HERE = 1")
    (place / "random.py").write_text("HERE = 2")
    (place / "script.py").write_text("import json, random\nprint(json.HERE, random.HERE)")
    assert launch(tmp_path, method, "place/script.py").stdout == run(tmp_path, "place/script.py").stdout == "1 2\n"


def test_a_compiled_script_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(__name__, __file__)")
    compiled = py_compile.compile(str(tmp_path / "script.py"), cfile=str(tmp_path / "other.pyc"))
    assert launch(tmp_path, "fork", "other.pyc").stdout == f"__main__ {compiled}\n"


STAGE = """
import os
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
import torch, torch.distributed
print(torch.distributed.get_debug_level().name)
"""


@METHODS
def test_what_a_script_sets_before_it_imports_torch_counts(tmp_path: Path, method: str) -> None:
    (tmp_path / "stage.py").write_text(STAGE)
    assert launch(tmp_path, method, "stage.py").stdout == "DETAIL\n"


@METHODS
def test_a_folder_and_an_archive_with_a_main_run(tmp_path: Path, method: str) -> None:
    program = tmp_path / "program"
    program.mkdir()
    files = {"__main__.py": "import beside, sys\nprint(__name__, beside.HERE, sys.argv[1:])", "beside.py": "HERE = 1"}
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        for name, text in files.items():
            (program / name).write_text(text)
            archive.writestr(name, text)
    for name in ("program", "program.zip"):
        here = launch(tmp_path, method, name, "y")
        assert here.stdout == "__main__ 1 ['y']\n", here.stderr


CHILDREN = """
import multiprocessing, subprocess, sys
def square(x):
    return x * x
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(square, [2, 3]))
    print(subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True, text=True).stdout.strip())
"""


@METHODS
def test_processes_that_the_script_starts_find_its_functions(tmp_path: Path, method: str) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    here = launch(tmp_path, method, "children.py")
    assert here.stdout == "[4, 9]\n" * 3 + "6\n", here.stderr


LOADING = """
import os, torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, i):
        return i * i, os.getpid()
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        pairs = list(DataLoader(Squares(), batch_size=3, num_workers=2, multiprocessing_context=method))
        values = torch.cat([values for values, _ in pairs]).tolist()
        print(values, len({pid for _, pids in pairs for pid in pids.tolist()} - {os.getpid()}))
"""


@METHODS
def test_data_loading_children_work(tmp_path: Path, method: str) -> None:
    (tmp_path / "loading.py").write_text(LOADING)
    here = launch(tmp_path, method, "loading.py")
    assert here.stdout == "[0, 1, 4, 9, 16, 25] 2\n" * 2, here.stderr


NUMBERS = """
import os, random, sys, tempfile, uuid
import numpy, torch
print(torch.rand(1).item(), random.random(), numpy.random.rand(), numpy.random.default_rng().random(), uuid.uuid4())
print(tempfile.mktemp())
"""


@METHODS
def test_each_rank_draws_its_own_numbers(tmp_path: Path, method: str) -> None:
    (tmp_path / "draw.py").write_text(NUMBERS)
    here = launch(tmp_path, method, "--nproc-per-node", "2", "draw.py")
    assert len(set(here.stdout.split())) == 12, here.stdout + here.stderr


@METHODS
def test_a_script_may_break_what_importing_torch_needs(tmp_path: Path, method: str) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('this is not the numpy that torch wants')")
    (tmp_path / "script.py").write_text("import torch")
    here = launch(tmp_path, method, "script.py")
    assert here.returncode == 1
    assert here.stderr.splitlines()[-1] == "RuntimeError: this is not the numpy that torch wants"
    assert "zygote" not in here.stderr


@METHODS
def test_tracebacks_begin_with_the_script(tmp_path: Path, method: str) -> None:
    (tmp_path / "wrong.py").write_text("def f():\n    return 1 / 0\nf()\n")
    here = launch(tmp_path, method, "wrong.py")
    plain = run(tmp_path, tmp_path / "wrong.py")
    assert here.returncode == plain.returncode == 1
    shown, _, last = here.stderr.partition("samestep: rank 0 ")
    assert shown.endswith(plain.stderr)
    first, _, told = last.partition("\n")
    assert first.endswith("failed first: it exited with code 1:")
    assert told == plain.stderr


@METHODS
@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        ("raise SystemExit(7)", 7, "failed first: it exited with code 7"),
        ("raise SystemExit('no data')", 1, "SystemExit: no data"),
        ("import sys; sys.excepthook = lambda *_: print('mine'); raise KeyError(3)", 1, "KeyError: 3"),
        ("import os; os.abort()", 134, "line 1 in <module>"),
        ("import ctypes; ctypes.string_at(0)", 139, "line 1 in <module>"),
        ("import os; os._exit(5)", 5, "failed first: it exited with code 5"),
        ("raise KeyError('a' * 10**6)", 1, "aaa'"),
        ("import os; os.closerange(3, 100); raise KeyError(3)", 1, "failed first: it exited with code 1"),
    ],
)
def test_how_it_ended_is_read_last(tmp_path: Path, method: str, text: str, code: int, last: str) -> None:
    (tmp_path / "script.py").write_text(text)
    here = launch(tmp_path, method, "script.py")
    assert here.returncode == code
    assert here.stderr.splitlines()[-1].endswith(last), here.stderr[-2000:]

"""Workers that are forks of a process with torch loaded: who is there, under which name, and what if it is killed."""

import os
import signal
import sys
from pathlib import Path

import pytest
from launching import Run, is_gone, named_child_of, wait_until

from samestep.launch.wants import wanted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt another's children")

TWO = ("--nproc-per-node", "2", "--start-method", "fork")
# What the script says of torch is enough for the zygote to load it.
WAITING = """
if not rank:
    note("loaded", "torch" in sys.modules)
note(f"parent-{rank}", os.getppid())
wait_for("go")
sys.exit(int(open("go").read()))
import torch
"""


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def go(run: Run, code: int = 0) -> None:
    part = run.folder / "go.part"
    part.write_text(str(code))
    part.rename(run.folder / "go")


def test_processes_have_names_and_the_zygote_one_thread(tmp_path: Path) -> None:
    with Run(tmp_path, WAITING, *TWO) as run:
        run.wait_for("parent-0", "parent-1", "loaded")
        zygote = named_child_of(run.process.pid, "samestep-zygote")
        ranks = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
        assert [comm(pid) for pid in (run.process.pid, zygote, *ranks)] == [
            "samestep-agent",
            "samestep-zygote",
            "samestep-r0",
            "samestep-r1",
        ]
        assert len(os.listdir(f"/proc/{zygote}/task")) == 1
        assert {(tmp_path / f"parent-{rank}").read_text() for rank in range(2)} == {str(run.process.pid)}
        assert (tmp_path / "loaded").read_text() == "True", "before the script's own import"
        go(run)
        assert run.wait() == 0
        assert is_gone(zygote)


def test_a_killed_zygote_does_no_harm_to_its_workers(tmp_path: Path) -> None:
    with Run(tmp_path, WAITING, *TWO) as run:
        run.wait_for("parent-0", "parent-1")
        zygote = named_child_of(run.process.pid, "samestep-zygote")
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda: is_gone(zygote))
        go(run)
        assert run.wait() == 0
    (line,) = run.lines(run.err)
    assert line == "samestep: the zygote was killed by SIGKILL; workers to come are started as fresh interpreters"


def test_a_zygote_that_is_killed_before_it_is_ready_is_replaced_by_fresh_interpreters(tmp_path: Path) -> None:
    with Run(tmp_path, WAITING, *TWO) as run:
        os.kill(named_child_of(run.process.pid, "samestep-zygote"), signal.SIGKILL)
        run.wait_for("loaded")
        go(run, code=3)
        assert run.wait() == 3
    assert (tmp_path / "loaded").read_text() == "False", "a fresh interpreter"
    assert "samestep: the zygote was killed by SIGKILL; workers to come" in run.err.read_text()


def test_a_restart_after_the_zygote_was_killed(tmp_path: Path) -> None:
    text = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("second")
    sys.exit(0)
note(f"first-{rank}")
wait_for("go")
sys.exit(4)
"""
    with Run(tmp_path, text, *TWO, "--max-restarts", "1") as run:
        run.wait_for("first-0", "first-1")
        os.kill(named_child_of(run.process.pid, "samestep-zygote"), signal.SIGKILL)
        go(run)
        assert run.wait() == 0
    assert sorted(run.lines(run.out)) == ["[0] second", "[1] second"]


@pytest.mark.parametrize("name", ["samestep-agent", "samestep-zygote"])
def test_a_signal_while_torch_is_being_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "numpy.py").write_text("import os, signal; open('loading', 'w'); signal.pause()")
    with Run(tmp_path, "import torch", *TWO) as run:
        wait_until((tmp_path / "loading").exists)
        zygote = named_child_of(run.process.pid, "samestep-zygote")
        os.kill(run.process.pid, signal.SIGTERM if name == "samestep-agent" else signal.SIGKILL)
        code = run.wait()
        wait_until(lambda: is_gone(zygote))
    assert code == (128 + signal.SIGTERM if name == "samestep-agent" else -signal.SIGKILL)
    assert run.noted_pids() == []


def test_the_launcher_leaves_no_orphan_unreaped(tmp_path: Path) -> None:
    text = """
if rank == 0:
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        note("orphan", os.getpid())
        os._exit(0)
    wait_for("orphan")
    sys.exit(0)
wait_for("go")
"""
    with Run(tmp_path, text, *TWO) as run:
        run.wait_for("orphan")
        orphan = int((tmp_path / "orphan").read_text())
        wait_until(lambda: not Path(f"/proc/{orphan}").exists())
        go(run)
        assert run.wait() == 0


def test_what_a_script_wants_is_found_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/__init__.py").write_text("")
    (tmp_path / "inner/part.py").write_text("from torch import nn\nimport torch.optim")
    files = {
        "plain.py": "import os, numpy",
        "direct.py": "import torch",
        "optimizer.py": "import torch\ntorch.optim.SGD",
        "deep.py": "import middle",
        "middle.py": "from inner import part",
        "wrong.py": "import torch(",
        "ring.py": "import ring, direct",
        "stage.py": "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch",
        "reads.py": "import os\nif os.environ['RANK'] == '0': pass\nimport torch",
        "after.py": "import os, torch\nos.environ['OMP_NUM_THREADS'] = '1'",
        "between.py": "import os, torch\nos.environ['SYMPY_USE_CACHE'] = 'no'\ntorch.optim.SGD",
        "beside.py": "import settings\nimport torch",
        "settings.py": "import sys\nsys.path.insert(0, '/mine')",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = {name: wanted([str(tmp_path / name), "x"]) for name in (*files, "nothere.py")}
    assert found == {
        "plain.py": [],
        "direct.py": ["torch"],
        "optimizer.py": ["torch", "torch._dynamo"],
        "deep.py": ["torch", "torch._dynamo"],
        "middle.py": ["torch", "torch._dynamo"],
        "wrong.py": [],
        "ring.py": ["torch"],
        "stage.py": [],
        "reads.py": ["torch"],
        "after.py": ["torch"],
        "between.py": ["torch"],
        "beside.py": [],
        "settings.py": [],
        "nothere.py": [],
    }

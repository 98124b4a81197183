"""The command `samestep check`: people's scripts, unchanged, and how it ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launching import python as run

import samestep.data.digits
from samestep.cli.main import main

SCRIPTS = Path(__file__).parent / "scripts"
DIGITS = Path(samestep.data.digits.__file__).parent / "mnist"


def check(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "samestep", "check", *command)


def test_a_script_for_torch_distributed_launch_has_nothing_wrong(tmp_path: Path) -> None:
    done = check(tmp_path, "--pass-local-rank", SCRIPTS / "template_launch.py", "--data", DIGITS, "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  steps      3 on every rank" in done.stdout
    assert "  gradients  8 agree between 2 ranks and one" in done.stdout
    assert done.stdout.endswith("Nothing wrong was found.\n")
    assert done.stderr == ""


def test_a_script_for_torchrun_pads_on_three_ranks_and_no_file_is_touched(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("weeks of work")
    script = (SCRIPTS / "template_torchrun.py", "--data", DIGITS, "--epochs", "5", "--out", "model.pt")
    done = check(tmp_path, "--nproc-per-node", "3", "--steps", "1", *script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "  gradients  8 agree between 3 ranks and one" in done.stdout
    assert "2000 samples are counted as 2001: DistributedSampler pads" in done.stdout
    assert done.stdout.endswith("\n1 thing to put right.\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.pt", "weeks of work")]


FAILING = """
import os, signal, sys
if sys.argv[1] == "hang":
    signal.pause()
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raise":
    raise KeyError("what is wrong")
"""


@pytest.mark.parametrize(
    ("how", "flags", "said"),
    [
        ("raise", [], "KeyError: 'what is wrong'\n\nThe program failed on 2 ranks"),
        ("die", [], "samestep: the program could not be run on 2 ranks:"),
        ("hang", ["--timeout", "1.5"], "samestep: the program was not done with 3 steps on 2 ranks after 1.5 s"),
    ],
)
def test_a_program_that_cannot_be_looked_at(how: str, flags: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    done = check(tmp_path, *flags, "script.py", how)
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["missing.py"], "script 'missing.py' does not exist"),
        (["--nproc-per-node", "1", "x.py"], "got '1', expected an integer of at least 2"),
        (["--nproc-per-node", "some", "x.py"], "got 'some', expected an integer"),
        (["--steps", "0", "x.py"], "got '0', expected an integer of at least 1"),
        (["--timeout", "0", "x.py"], "got '0', expected a number of seconds above 0"),
        (["--nothing", "x.py"], "--nothing"),
        ([], "the following arguments are required: script"),
    ],
)
def test_a_wrong_call_ends_with_2(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *command]) == 2
    assert said in capsys.readouterr().err

"""`python -m samestep.launch` in the place of `python -m torch.distributed.launch`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import samestep.data
from samestep.cli.launch import main
from samestep.launch.options import Options
from samestep.world import environment

TEMPLATE = Path(__file__).with_name("scripts") / "template_launch.py"
DATA = Path(samestep.data.__file__).with_name("mnist")

# Each rank leaves its arguments, and the names by which Python knows the script.
TELL = """
import json, os, sys
with open(f"seen-{os.environ['RANK']}", "w") as f:
    json.dump([sys.argv, __name__, os.environ["LOCAL_RANK"]], f)
"""


def launched(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "samestep.launch", *argv],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ([], "--local-rank"),
        (["--local-rank-spelling", "hyphen"], "--local-rank"),
        (["--local-rank-spelling", "underscore"], "--local_rank"),
        (["--local_rank_spelling=underscore"], "--local_rank"),
        (["--use-env"], None),
        (["--use_env"], None),
        (["--use-env", "--no-python"], None),
    ],
)
def test_flags_reach_the_launcher(argv: list[str], flag: str | None, asked: list[Options]) -> None:
    program = sys.executable if "--no-python" in argv else str(TEMPLATE)
    assert main([*argv, "--nproc-per-node", "2", program, "--use-env"]) == 42
    (options,) = asked
    assert (options.nproc_per_node, options.local_rank_flag, options.num_script_args) == (2, flag, 1)
    assert options.command[-2:] == (program, "--use-env")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: script"),
        (["nothere.py"], "script 'nothere.py' does not exist"),
        (["--local-rank-spelling", "long", "x.py"], "--local-rank-spelling: got 'long', expected hyphen or underscore"),
        (["--use-env", "--local-rank-spelling", "hyphen", __file__], "contradict each other"),
        (["--no-python", sys.executable], "--no-python needs --use-env"),
        (["--nproc-per-node", "0", __file__], "--nproc-per-node: got 0"),
        (["--nope", __file__], "unknown: --nope"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], message: str, asked: list[Options], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), asked) == ("", 1, [])
    assert err.startswith("python -m samestep.launch: ")
    assert message in err


def test_help_is_short_and_fits(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) < 80
    assert not any("_per_node" in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["tell.py"], ["--local-rank={}"]),
        (["tell.py", "a b", "--local_rank", "'"], ["--local-rank={}", "a b", "--local_rank", "'"]),
        (["--local-rank-spelling", "underscore", "-m", "tell", "-x"], ["--local_rank={}", "-x"]),
        (["--drop-in", "-m", "tell", "-x"], ["--local-rank={}", "-x"]),
        (["--start-method", "spawn", "tell.py", "-x"], ["--local-rank={}", "-x"]),
        (["--use-env", "tell.py", "-x"], ["-x"]),
    ],
)
def test_the_local_rank_is_the_first_argument(argv: list[str], arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    done = launched(tmp_path, "--nproc-per-node", "2", *argv)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        seen, name, local_rank = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert (seen[1:], name, local_rank) == ([a.format(rank) for a in arguments], "__main__", str(rank))
        assert Path(seen[0]).name == "tell.py"


def test_a_script_as_people_have_it(tmp_path: Path) -> None:
    done = launched(tmp_path, "--nproc-per-node", "2", str(TEMPLATE), "--data", str(DATA), "--steps", "2")
    assert done.returncode == 0, done.stderr
    steps = sorted(" ".join(line.split()[1:7]) for line in done.stdout.splitlines())
    assert steps == [f"rank {rank} epoch 0 step {step}" for rank in range(2) for step in range(2)]


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("raise SystemExit(7)")
    assert launched(tmp_path, "leave.py").returncode == 7

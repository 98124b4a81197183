"""`--max-restarts`: all workers are started again after a failure, so many times."""

import signal
from pathlib import Path

import pytest
from launching import Run

TWO = ("--nproc-per-node", "2")
TEXT = """
count, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
print("attempt", count, "of", most)
note(f"up-{count}-{rank}")
wait_for(f"up-{count}-{1 - rank}")
if rank == 1 and int(count) < FAILURES:
    raise ValueError(f"attempt {count}")
while rank == 0 and int(count) < FAILURES:
    signal.pause()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_attempt_that_succeeds_is_the_last(tmp_path: Path, method: str) -> None:
    flags = ("--max-restarts", "3", "--start-method", method, "--log-dir", str(tmp_path / "logs"), "--rdzv-id", "mine")
    with Run(tmp_path, TEXT.replace("FAILURES", "2"), *TWO, *flags) as run:
        assert run.wait() == 0, run.err.read_text()
    assert run.lines(run.out) == sorted(run.lines(run.out), key=lambda line: line.split()[2])
    assert len(run.lines(run.out)) == 6
    said = [line for line in run.lines(run.err) if line.startswith("samestep: ") and "was ended" not in line]
    assert [line.partition(" (")[0] for line in said] == [
        "samestep: rank 1",
        "samestep: all workers are started again",
    ] * 2
    assert said[3].endswith("(restart 2 of 3)")
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name.startswith("mine_")
    logs = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    assert len(logs) == 12
    assert logs["attempt_2/1/stdout.log"] == "attempt 2 of 3\n"
    assert logs["attempt_0/1/stderr.log"].endswith("ValueError: attempt 0\n")
    assert logs["attempt_2/1/stderr.log"] == ""


def test_the_last_failure_is_the_launchers(tmp_path: Path) -> None:
    with Run(tmp_path, TEXT.replace("FAILURES", "9"), *TWO, "--max-restarts", "1") as run:
        assert run.wait() == 1
    assert run.lines(run.err)[-1] == "ValueError: attempt 1"


def test_who_is_told_to_end_does_not_start_again(tmp_path: Path) -> None:
    with Run(tmp_path, 'note(f"up-{rank}")\nforever()', *TWO, "--max-restarts", "5") as run:
        run.wait_for("up-0", "up-1")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert run.lines(run.err) == ["samestep: ended by SIGTERM"]

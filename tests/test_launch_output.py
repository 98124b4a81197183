"""What `samestep run` writes: every byte of every rank, a bar on a terminal, and what if nobody reads it."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest
from launching import Run, is_gone, wait_until
from screen import Screen

TWO = ("--nproc-per-node", "2")


BYTES = """
import random
random.seed(rank)
data = bytes(random.choices(b"\\x00\\xff\\x1b\\r abc", k=200_000)) + b"\\n"
data += b"".join(b"%d of %d\\n" % (i, rank) for i in range(3000)) + b"no newline"
for fd in (1, 2):
    rest = data
    while rest:
        rest = rest[os.write(fd, rest[:random.randrange(1, 30_000)]):]
"""


@pytest.mark.parametrize("prefix", [True, False])
def test_all_bytes_of_all_ranks_come_out_as_whole_lines(tmp_path: Path, prefix: bool) -> None:
    count = "3" if prefix else "1"
    with Run(tmp_path, BYTES + 'note(f"data-{rank}")\nopen(f"data-{rank}", "wb").write(data)',
             "--nproc-per-node", count, *([] if prefix else ["--no-prefix"])) as run:  # fmt: skip
        assert run.wait() == 0
    for path in (run.out, run.err):
        lines = [line for line in path.read_bytes().split(b"\n") if b"OMP_NUM_THREADS" not in line]
        assert lines.pop() == b""
        for rank in range(int(count)):
            mark = b"[%d] " % rank if prefix else b""
            written = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
            assert written == (tmp_path / f"data-{rank}").read_bytes().split(b"\n")
        assert len(lines) == 3002 * int(count)


def test_both_streams_may_go_to_one_place(tmp_path: Path) -> None:
    both = tmp_path / "both"
    with both.open("wb") as file, Run(
        tmp_path, 'for i in range(200): os.write(1 + i % 2, b"%d\\n" % i)', "--no-prefix",
        stdout=file.fileno(), stderr=file.fileno(),
    ) as run:  # fmt: skip
        assert run.wait() == 0
    first, *lines = both.read_text().splitlines()
    assert first.startswith("samestep: OMP_NUM_THREADS=")
    for parity in range(2):
        assert [int(line) for line in lines if int(line) % 2 == parity] == list(range(parity, 200, 2))


# ---- a terminal


def test_on_a_terminal_rank_0_draws_a_bar_below_the_lines_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
if rank == 0:
    from rich.progress import BarColumn, Progress, TextColumn
    with Progress(BarColumn(None), TextColumn("{task.percentage:.0f}%"), expand=True) as progress:
        task = progress.add_task("train", total=2)
        progress.advance(task)
        progress.refresh()
        note("half")
        wait_for("said")
        progress.advance(task)
    print("done")
else:
    wait_for("half")
    print("one\\ntwo")
    note("said")
"""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    terminal, program_side = pty.openpty()
    fcntl.ioctl(program_side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with Run(tmp_path, text, *TWO, stdout=program_side, stderr=program_side) as run:
        os.close(program_side)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the other side open any more
            while data := os.read(terminal, 65536):
                seen += data
        assert run.wait() == 0
    os.close(terminal)
    screen = Screen(100)
    screen.write(seen)
    bar = "[0] " + "━" * 91 + " 100%"
    first, *rows = screen.rows
    assert "OMP_NUM_THREADS" in first
    assert sorted(rows) == ["", "[0] done", bar, "[1] one", "[1] two"]
    drawn = re.findall(rb"\x1b\[\?7l(.*?)\x1b\[\?7h", seen)
    assert any(b" 50%" in frame for frame in drawn)


# ---- output that nobody takes


def test_a_reader_that_goes_away_ends_the_run(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    with Run(tmp_path, 'while True:\n    print("y", flush=True)', *TWO, stdout=writable) as run:
        os.close(writable)
        run.wait_for("rank-0", "rank-1")
        os.close(readable)
        assert run.wait() == 141
        run.assert_nobody_is_left(2)
    assert run.lines(run.err)[-1] == "samestep: stdout can't be written to (Broken pipe), so the run was ended"
    assert "Traceback" not in run.err.read_text().replace("[0]", "").partition("samestep: stdout")[2]


def test_a_reader_that_does_not_read_holds_up_neither_signals_nor_the_end(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    text = """
written = 0
def told(*_):
    note("written", written)
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
while True:
    written += os.write(1, b"x" * 1023 + b"\\n")
    if written == 1 << 20:
        note("much")
"""
    with Run(tmp_path, text, "--shutdown-timeout", "0.2", stdout=writable) as run:
        os.close(writable)
        run.wait_for("much")
        run.process.terminate()
        assert run.wait() == 143
        run.assert_nobody_is_left(1)
    os.close(readable)
    assert int((tmp_path / "written").read_text()) < 2 << 20  # the rank had to wait, nothing is stored without limit


def test_what_a_rank_wrote_before_its_end_is_kept_for_a_slow_reader(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    text = """
os.set_blocking(1, False)
data, written = b"%0999d\\n" * 4000 % tuple(range(4000)), 0
while select.select([], [1], [], 0.3)[1]:  # until every pipe is full and the launcher takes no more
    try:
        written += os.write(1, data[written:written + 4096])
    except BlockingIOError:
        continue
note("written", written)
"""
    with Run(tmp_path, text, "--no-prefix", stdout=writable) as run:
        os.close(writable)
        run.wait_for("written")
        wait_until(lambda: is_gone(int((tmp_path / "rank-0").read_text())))
        with open(readable, "rb") as reader:
            received = reader.read()
        assert run.wait() == 0
    data = b"%0999d\n" * 4000 % tuple(range(4000))
    expected = data[: int((tmp_path / "written").read_text())]
    assert received == expected.removesuffix(b"\n") + b"\n"

"""Much output at once: every line of every rank arrives, whole and in order, and the launcher still hears signals."""

import hashlib
import os
from pathlib import Path

import pytest
from launching import Run, is_gone

FOUR = ("--nproc-per-node", "4")
NUM_LINES = 200_000

# Two ranks write line by line, as print does; two in blocks that end anywhere.
FLOOD = f"""
def line(i):
    return f"line {{i}} of rank {{rank}}" + "." * (i % 37)
if rank % 2:
    for i in range({NUM_LINES}):
        print(line(i), file=sys.stderr if i % 10 == 0 else sys.stdout)
else:
    out, err = (memoryview("".join(line(i) + "\\n" for i in range({NUM_LINES}) if (i % 10 == 0) == is_err).encode())
        for is_err in (False, True))
    while out or err:
        out = out[os.write(1, out[:50_001]):] if out else out
        err = err[os.write(2, err[:5_003]):] if err else err
"""


def lines_of(path: Path, rank: int) -> list[bytes]:
    """What a rank wrote there, without its prefix."""
    mark = b"[%d] " % rank
    return [line[len(mark) :] for line in path.read_bytes().split(b"\n") if line.startswith(mark)]


def test_every_line_of_a_flood_arrives_whole_and_in_order(tmp_path: Path) -> None:
    with Run(tmp_path, FLOOD, *FOUR) as run:
        assert run.wait() == 0
    for rank in range(4):
        written = [b"line %d of rank %d%s" % (i, rank, b"." * (i % 37)) for i in range(NUM_LINES)]
        plain = [line for i, line in enumerate(written) if i % 10]
        # Not shown in full should it fail: that would be a flood as well.
        assert (lines_of(run.out, rank) == plain) is True
        assert (lines_of(run.err, rank) == written[::10]) is True
    assert run.out.read_bytes().count(b"\n") == 4 * NUM_LINES * 9 // 10
    assert len(run.lines(run.err)) == 4 * NUM_LINES // 10


@pytest.mark.parametrize("who", ["launcher", "rank"])
def test_a_flood_does_not_keep_the_launcher_from_ending(tmp_path: Path, who: str) -> None:
    text = """
if rank == 3:
    wait_for("go")
    sys.exit(7)
data = b"much of the same\\n" * 1000
note(f"flooding-{rank}")
while True:
    os.write(1, data)
"""
    with open(os.devnull, "wb") as null, Run(tmp_path, text, *FOUR, stdout=null.fileno()) as run:
        run.wait_for("rank-3", *(f"flooding-{rank}" for rank in range(3)))
        if who == "launcher":
            run.process.terminate()
        else:
            (tmp_path / "go").touch()
        assert run.wait() == (143 if who == "launcher" else 7)
        assert len(run.noted_pids()) == 4
        assert all(map(is_gone, run.noted_pids()))


# Ranks 0 and 1 write a line of 10 MB each, of all bytes but a newline; the others write short lines meanwhile.
LONG = """
import hashlib, random
if rank < 2:
    data = random.Random(rank).randbytes(10_000_000).replace(b"\\n", b"\\r")
    note(f"digest-{rank}", hashlib.sha256(data).hexdigest())
    rest = memoryview(data + b"\\n")
    while rest:
        rest = rest[os.write(1 + rank, rest):]
else:
    for i in range(20_000):
        os.write(1 + i % 2, b"%d\\n" % i)
"""


def test_a_line_of_10_mb_passes_undamaged(tmp_path: Path) -> None:
    with Run(tmp_path, LONG, *FOUR) as run:
        assert run.wait() == 0
    for rank, path in enumerate((run.out, run.err)):
        (line,) = lines_of(path, rank)
        assert len(line) == 10_000_000
        assert hashlib.sha256(line).hexdigest() == (tmp_path / f"digest-{rank}").read_text()
    for rank in (2, 3):
        for parity, path in enumerate((run.out, run.err)):
            assert lines_of(path, rank) == [b"%d" % i for i in range(parity, 20_000, 2)]


# ---- log files

BYTES = """
import random
chance = random.Random(rank)
for fd, name in ((1, "stdout"), (2, "stderr")):
    data = chance.randbytes(300_000) + b"\\n" + b"".join(b"%d\\n" % i for i in range(20_000)) + b"no newline"
    with open(f"{rank}-{name}", "wb") as copy:
        copy.write(data)
    while data:
        data = data[os.write(fd, data[:chance.randrange(1, 60_000)]):]
"""


@pytest.mark.parametrize("flags", [(), ("--redirects", "3"), ("--local-ranks-filter", "0", "--tee", "3")])
def test_log_files_get_the_same_bytes(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with Run(tmp_path, BYTES, *FOUR, "--log-dir", str(tmp_path / "logs"), *flags) as run:
        assert run.wait() == 0, run.err.read_text(errors="replace")[-2000:]
    shown = {(): range(4), ("--redirects", "3"): ()}.get(flags, (0,))
    for rank in range(4):
        for name, path in (("stdout", run.out), ("stderr", run.err)):
            written = (tmp_path / f"{rank}-{name}").read_bytes()
            (log,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/{name}.log")
            assert (log.read_bytes() == written) is True
            assert (lines_of(path, rank) == (written.split(b"\n") if rank in shown else [])) is True

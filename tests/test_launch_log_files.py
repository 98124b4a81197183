"""Log files of ranks: which streams get one, what is in it, and what happens where it can't be written."""

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from samestep.errors import LaunchError
from samestep.launch.log_files import LogFiles, LogSettings, Route, route

STREAMS = ("stdout", "stderr")
BOTH, FILE, SCREEN, NOWHERE = "both", "file", "screen", "nowhere"


def where(settings: LogSettings, local_rank: int, stream: str) -> str:
    way = route(settings, local_rank, stream)
    return {(True, True): BOTH, (True, False): FILE, (False, True): SCREEN, (False, False): NOWHERE}[
        way.file, way.screen
    ]


# ---- what goes where


@pytest.mark.parametrize(
    ("settings", "expected"),  # of rank 0's stdout and stderr, then rank 1's
    [
        ({}, [SCREEN] * 4),
        ({"log_dir": "logs"}, [BOTH] * 4),
        ({"log_dir": "logs", "redirects": 1}, [FILE, SCREEN] * 2),
        ({"log_dir": "logs", "redirects": 2, "tee": 1}, [BOTH, FILE] * 2),
        ({"log_dir": "logs", "redirects": 3, "tee": 3}, [BOTH] * 4),
        ({"redirects": 3}, [FILE] * 4),
        ({"redirects": {1: 3}}, [SCREEN, SCREEN, FILE, FILE]),
        ({"tee": {0: 2, 1: 1}}, [SCREEN, BOTH, BOTH, SCREEN]),
        ({"redirects": {0: 0, 1: 0}, "log_dir": "logs"}, [BOTH] * 4),
        ({"local_ranks_filter": frozenset({1})}, [NOWHERE, NOWHERE, SCREEN, SCREEN]),
        ({"local_ranks_filter": frozenset({1}), "tee": 1}, [FILE, NOWHERE, BOTH, SCREEN]),
        ({"local_ranks_filter": frozenset({1}), "redirects": 2}, [NOWHERE, FILE, SCREEN, FILE]),
        ({"local_ranks_filter": frozenset({0}), "log_dir": "logs"}, [BOTH, BOTH, FILE, FILE]),
        ({"log_dir": os.devnull, "redirects": 3, "tee": 1}, [SCREEN] * 4),
    ],
)
def test_where_streams_go(settings: Mapping[str, object], expected: list[str]) -> None:
    told = LogSettings(**settings)  # type: ignore[arg-type]
    assert [where(told, rank, stream) for rank in range(2) for stream in STREAMS] == expected


def test_the_screen_takes_over_only_for_ranks_that_show_there() -> None:
    settings = LogSettings("logs", redirects=3, local_ranks_filter=frozenset({1}))
    assert route(settings, 1, "stdout") == Route(file=True, screen=False, spill=True)
    assert route(settings, 0, "stdout") == Route(file=True, screen=False, spill=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"redirects": 4}, r"redirects is 4; expected 0 \(none\), 1 \(stdout\), 2 \(stderr\) or 3 \(both\)"),
        ({"tee": {2: -1}}, "tee for local rank 2 is -1; expected"),
        ({"tee": {-2: 1}}, "tee names local rank -2; expected at least 0"),
        ({"local_ranks_filter": frozenset({-1, 0})}, "local_ranks_filter has -1; expected at least 0"),
        ({"log_dir": ""}, "log_dir is empty; expected a folder"),
    ],
)
def test_bad_numbers_are_refused(settings: Mapping[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LogSettings(**settings)  # type: ignore[arg-type]


# ---- files


def files_below(folder: Path) -> dict[str, bytes]:
    """All files, by their path without the random part."""
    found = {}
    for path in folder.rglob("*.log"):
        run, *rest = path.relative_to(folder).parts
        found["/".join([run[: -len("_12345678")], *rest])] = path.read_bytes()
    return found


def test_files_lie_as_torchruns_and_hold_every_byte_at_once(tmp_path: Path) -> None:
    with LogFiles(LogSettings(str(tmp_path / "a" / "b")), "job") as logs:
        for attempt in range(2):
            logs.open_attempt(attempt, range(2))
            assert logs.sink(0, "stdout").write(b"\0\xff\r no newline") is None
            assert logs.sink(1, "stderr").write(b"%d\n" % attempt) is None
            assert logs.sink(1, "stderr").write(b"") is None
            assert logs.sink(1, "stderr").screen
        found = files_below(tmp_path / "a" / "b")  # before anything is closed
        assert logs.folder is not None
        assert logs.folder.parent == tmp_path / "a" / "b"
        assert not logs.is_temporary
    assert found == {
        f"job/attempt_{attempt}/{rank}/{stream}.log": text
        for attempt in range(2)
        for rank, stream, text in (
            (0, "stdout", b"\0\xff\r no newline"),
            (0, "stderr", b""),
            (1, "stdout", b""),
            (1, "stderr", b"%d\n" % attempt),
        )
    }


def test_only_streams_that_ask_for_it_get_a_file(tmp_path: Path) -> None:
    settings = LogSettings(str(tmp_path), redirects={1: 2}, tee={0: 1})
    with LogFiles(settings, "job") as logs:
        logs.open_attempt(0, range(3))
        for rank in range(3):
            for stream in STREAMS:
                assert logs.sink(rank, stream).write(b"x") is None
    assert files_below(tmp_path) == {"job/attempt_0/0/stdout.log": b"x", "job/attempt_0/1/stderr.log": b"x"}


def test_runs_of_the_same_name_do_not_share_a_folder(tmp_path: Path) -> None:
    with LogFiles(LogSettings(str(tmp_path)), "job") as a, LogFiles(LogSettings(str(tmp_path)), "job") as b:
        assert a.folder != b.folder
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("run_id", ["", "a/b", "../up", "with space"])
def test_a_run_id_stays_one_folder(tmp_path: Path, run_id: str) -> None:
    inner = tmp_path / "inner"
    with LogFiles(LogSettings(str(inner)), run_id) as logs:
        assert logs.folder is not None
        assert logs.folder.parent == inner
        assert logs.folder.name.startswith(run_id.replace("/", "_") + "_")


def test_without_a_log_dir_files_go_to_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LogFiles(LogSettings(redirects=1), "none") as logs:
        assert logs.is_temporary
        logs.open_attempt(0, [0])
        assert logs.sink(0, "stdout").write(b"kept") is None
    assert files_below(tmp_path) == {"samestep_none/attempt_0/0/stdout.log": b"kept"}


@pytest.mark.parametrize("settings", [LogSettings(), LogSettings(os.devnull, redirects=3), LogSettings(tee={0: 0})])
def test_where_no_files_are_wanted_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: LogSettings
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LogFiles(settings, "none") as logs:
        assert logs.folder is None
        assert not logs.is_temporary
        logs.open_attempt(0, [0])
        assert logs.sink(0, "stdout").write(b"x") is None
        assert logs.sink(0, "stdout").screen
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with LogFiles(LogSettings("logs"), "job") as logs:
        monkeypatch.chdir(tmp_path / "elsewhere")
        logs.open_attempt(0, [0])
    assert set(files_below(tmp_path / "logs")) == {f"job/attempt_0/0/{stream}.log" for stream in STREAMS}


def test_a_file_that_is_cut_short_gets_no_hole(tmp_path: Path) -> None:
    with LogFiles(LogSettings(str(tmp_path)), "job") as logs:
        logs.open_attempt(0, [0])
        logs.sink(0, "stdout").write(b"rotated away\n")
        (path,) = tmp_path.rglob("0/stdout.log")
        os.truncate(path, 0)
        logs.sink(0, "stdout").write(b"new\n")
        assert path.read_bytes() == b"new\n"


def open_below(folder: Path) -> list[int]:
    """The descriptors of files in a folder that this process has open."""
    places = {fd: Path(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd"))}
    return [fd for fd, place in places.items() if place.exists() and place.resolve().is_relative_to(folder)]


def test_what_was_opened_is_closed_and_not_inherited(tmp_path: Path) -> None:
    with LogFiles(LogSettings(str(tmp_path)), "job") as logs:
        logs.open_attempt(0, range(2))
        logs.open_attempt(1, range(2))
        assert len(open_below(tmp_path)) == 4
        assert not any(os.get_inheritable(fd) for fd in open_below(tmp_path))
        logs.sink(0, "stdout").close()
        logs.sink(0, "stdout").close()
    assert open_below(tmp_path) == []


# ---- places that can't be written to


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(LaunchError, match=r"log folder .*taken can't be made or written to \(.*\); give --log-dir a"):
        LogFiles(LogSettings(str(tmp_path / "taken")), "job")
    with pytest.raises(LaunchError, match=r"log folder .*taken/below can't be made or written to \(Not a directory\)"):
        LogFiles(LogSettings(str(tmp_path / "taken" / "below")), "job")


def test_a_run_id_that_is_too_long_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"log folder .* can't be made or written to \(File name too long\)"):
        LogFiles(LogSettings(str(tmp_path)), "x" * 300)


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    code = f"""
import os
from samestep.errors import LaunchError
from samestep.launch.log_files import LogFiles, LogSettings
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    LogFiles(LogSettings({str(tmp_path)!r}), "job")
except LaunchError as e:
    print(e)
"""
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"log folder {tmp_path} can't be made or written to (Permission denied)" in said


def test_too_many_files_at_once(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with LogFiles(LogSettings(str(tmp_path)), "job") as logs:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 9, hard))
        try:
            with pytest.raises(LaunchError, match=r"log file .*/std\w+.log of local rank \d+ .*Too many open files"):
                logs.open_attempt(0, range(300))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert open_below(tmp_path) == []


# ---- places that fill up meanwhile


def test_a_file_that_fails_leaves_the_rest_to_the_screen(tmp_path: Path) -> None:
    settings = LogSettings(str(tmp_path), redirects=3, local_ranks_filter=frozenset({0}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LogFiles(settings, "job") as logs:
        logs.open_attempt(0, range(2))
        out, err, hidden = logs.sink(0, "stdout"), logs.sink(0, "stderr"), logs.sink(1, "stdout")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            assert out.write(b"x" * 900) is None
            assert not out.screen
            warning = out.write(b"y" * 900)
            said = [err.write(b"z" * 1001), hidden.write(b"z" * 1001), out.write(b"more")]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert warning is not None
        assert f"0/stdout.log can't be written to ({os.strerror(errno.EFBIG)}) and ends there; the output" in warning
        assert "\n" not in warning
        assert said == [None] * 3  # one line for all
        assert (out.screen, err.screen, hidden.screen) == (True, True, False)
    assert files_below(tmp_path)["job/attempt_0/0/stdout.log"] == b"x" * 900 + b"y" * 100


def test_a_full_disk(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=60).returncode != 0:
        pytest.skip("a small disk can't be mounted here: unshare --mount is refused")
    code = f"""
import os
from samestep.launch.log_files import LogFiles, LogSettings
with LogFiles(LogSettings({str(tmp_path)!r}, redirects=1), "job") as logs:
    logs.open_attempt(0, [0])
    sink, data, num_bytes = logs.sink(0, "stdout"), os.urandom(10_000), 0
    while not (warning := sink.write(data)):
        num_bytes += len(data)
        assert num_bytes < 1 << 20
    (path,) = logs.folder.rglob("stdout.log")
    written = path.read_bytes()
    assert written == (data * 1000)[:len(written)] and num_bytes <= len(written)
    assert sink.screen
    print(warning)
"""
    mount = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "stdout.log can't be written to (No space left on device)" in ended.stdout
    assert list(tmp_path.iterdir()) == []  # the mount was the child's alone

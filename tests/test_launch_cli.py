"""The command line: what is taken, what is refused and how, and where the workers will meet."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.cli.main import main, parser
from samestep.errors import LaunchError
from samestep.launch import agent
from samestep.launch.port import reserved_port
from samestep.launch.spec import LaunchSpec


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """Collects what would be launched, and launches nothing."""
    seen: list[LaunchSpec] = []

    def note(spec: LaunchSpec) -> int:
        seen.append(spec)
        return 42

    monkeypatch.setattr(agent, "run", note)
    return seen


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must not run')")
    return str(path)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_flags_reach_the_launcher(specs: list[LaunchSpec], script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", "seen")
    argv = ["run", "--nproc-per-node", "3", "--master-addr", "::1", "--master-port=7", "--shutdown-timeout", "1.5"]
    assert main([*argv, "--no-prefix", script, "-m", "--nproc-per-node", "9", "--", "x"]) == 42
    (spec,) = specs
    assert spec.command == (sys.executable, script, "-m", "--nproc-per-node", "9", "--", "x")
    assert (spec.nproc_per_node, spec.master_addr, spec.master_port) == (3, "::1", 7)
    assert (spec.shutdown_timeout_s, spec.prefix, spec.environment["MARK"]) == (1.5, False, "seen")
    assert spec.cores == len(os.sched_getaffinity(0))


def test_what_a_launch_is_without_flags(specs: list[LaunchSpec], script: str) -> None:
    assert main(["run", script]) == 42
    (spec,) = specs
    assert (spec.nproc_per_node, spec.master_addr, spec.master_port) == (1, "127.0.0.1", 0)
    assert (spec.shutdown_timeout_s, spec.prefix) == (30.0, True)


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc_per_node", "2", "--master_addr", "A", "--master_port", "5", "--shutdown_timeout", "0", "--no_prefix"],
        ["--nproc_per_node=2", "--master_addr=A", "--master_port=5", "--shutdown_timeout=0", "--no_prefix"],
    ],
)
def test_underscores_are_taken_as_torchrun_takes_them(specs: list[LaunchSpec], script: str, argv: list[str]) -> None:
    assert main(["run", *argv, script]) == 42
    (spec,) = specs
    assert (spec.nproc_per_node, spec.master_addr, spec.master_port) == (2, "A", 5)
    assert (spec.shutdown_timeout_s, spec.prefix) == (0.0, False)


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_modules(specs: list[LaunchSpec], flag: str) -> None:
    assert main(["run", flag, "timeit", "-s", "pass"]) == 42
    assert specs[0].command == (sys.executable, "-m", "timeit", "-s", "pass")


def test_one_worker_for_each_core(specs: list[LaunchSpec], script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    assert main(["run", "--nproc-per-node", "cpu", script]) == 42
    assert (specs[0].nproc_per_node, specs[0].cores) == (3, 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run"], "arguments are required: script"),
        (["run", "nothere.py"], "script 'nothere.py' does not exist in "),
        (["run", "/"], "script '/' is a directory"),
        (["run", "-m", "not.here"], "module 'not.here' can't be found"),
        (["run", "--nproc-per-node", "0", __file__], "--nproc-per-node: got 0, expected at least 1"),
        (["run", "--nproc-per-node", "-1", __file__], "--nproc-per-node: got -1, expected at least 1"),
        (["run", "--nproc_per_node", "foo", __file__], "--nproc_per_node: got 'foo', expected an integer"),
        (["run", "--nproc-per-node", "gpu", __file__], "--nproc-per-node: got 'gpu': GPUs are not counted"),
        (["run", "--master-port", "65536", __file__], "--master-port: got '65536', expected 0 (a free one) to 65535"),
        (["run", "--master-port", "x", __file__], "--master-port: got 'x'"),
        (["run", "--master-addr", "", __file__], "--master-addr: got nothing"),
        (["run", "--shutdown-timeout", "-1", __file__], "--shutdown-timeout: got '-1', expected a number of seconds"),
        (["run", "--shutdown-timeout", "inf", __file__], "--shutdown-timeout: got 'inf'"),
        (["run", "--nproc", "2", __file__], "unknown: --nproc"),
        (["run", "--rdzv-id", "2", __file__], "unknown: --rdzv-id"),
        (["walk"], "invalid choice: 'walk'"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    argv: list[str], message: str, specs: list[LaunchSpec], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("samestep" if argv == ["walk"] else "samestep run: ")
    assert err.count("\n") == 1
    assert specs == []


def test_the_command_alone_shows_its_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capfd.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"]])
def test_help_is_short_and_fits(
    argv: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(argv) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 80
    assert not any("_per_node" in line for line in lines)


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("samestep 0.")


def test_a_launch_that_fails_is_one_line(
    script: str, listener: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    port = listener.getsockname()[1]
    assert main(["run", "--master-port", str(port), script]) == 1
    out, err = capfd.readouterr()
    taken = f"samestep: master port {port} is taken by another program; leave it out to have a free one picked\n"
    assert (out, err) == ("", taken)


def test_the_parser_can_be_had_without_running_anything() -> None:
    args = parser().parse_args(["run", "--nproc-per-node", "2", "train.py", "--epochs", "3"])
    assert (args.command, args.script, args.args) == ("run", "train.py", ["--epochs", "3"])


@pytest.mark.parametrize("module", ["samestep.cli.main", "samestep.launch.agent"])
def test_the_launcher_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# ---- the master port


def bind(port: int, *, reuse: bool) -> socket.socket:
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        s.bind(("0.0.0.0", port))
    except OSError:
        s.close()
        raise
    return s


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_reserved_port_is_for_those_who_share_it(address: str) -> None:
    with reserved_port(address) as port:
        with pytest.raises(OSError, match="in use"):
            bind(port, reuse=False)
        with bind(port, reuse=True) as store:  # as the store of rank 0 does
            store.listen()
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with reserved_port(address) as other:
            assert other != port
        with reserved_port(address, port) as asked_for:
            assert asked_for == port
    bind(port, reuse=False).close()


def test_a_port_with_a_listener_is_refused(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(LaunchError, match=f"master port {port} is taken"), reserved_port("127.0.0.1", port):
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [("192.0.2.1", "is not one of this machine's"), ("no such host", "can't be resolved")],
)
def test_a_master_that_is_elsewhere_is_refused(address: str, message: str) -> None:
    with pytest.raises(LaunchError, match=f"master address '{address}' .*{message}"), reserved_port(address):
        pass

"""The command line: what is taken, and what is refused and how."""

import argparse
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.cli import flags
from samestep.cli.main import main, parser
from samestep.launch import devices
from samestep.launch.options import Conf, Options


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must not run')")
    return str(path)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_flags_reach_the_launcher(asked: list[Options], script: str) -> None:
    argv = "--nproc-per-node 3 --max-restarts=2 --role trainer --start-method spawn --drop-in --monitor-interval 5"
    argv += (
        " --nnodes 1:4 --rdzv-endpoint [::1]:7 --rdzv-id=x --rdzv-conf is_host=1 --node-rank=2 --local-addr 10.0.0.1"
    )
    argv += " --log-dir logs -r 1 -t 0:3 --local-ranks-filter 0,2 --no-prefix"
    argv += " --shutdown-timeout 1.5 --signals-to-handle SIGUSR1"
    assert main(["run", *argv.split(), script, "-m", "--nproc-per-node", "9", "--", "x"]) == 42
    assert asked == [
        Options(
            command=(sys.executable, script, "-m", "--nproc-per-node", "9", "--", "x"),
            num_script_args=5,
            nproc_per_node=3,
            drop_in=True,
            min_nodes=1,
            max_nodes=4,
            node_rank=2,
            rendezvous="c10d",
            endpoint_host="::1",
            endpoint_port=7,
            run_id="x",
            conf=Conf(is_host=True),
            local_addr="10.0.0.1",
            max_restarts=2,
            role="trainer",
            start_method="spawn",
            log_dir="logs",
            redirects=1,
            tee={0: 3},
            local_ranks_filter=frozenset({0, 2}),
            shutdown_timeout_s=1.5,
            signals=(signal.SIGUSR1,),
            prefix=False,
        )
    ]


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_what_a_launch_is_without_flags(
    asked: list[Options], script: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert main(["run", script]) == 42
    assert asked == [Options((sys.executable, script), start_method="fork" if platform == "linux" else "spawn")]


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc_per_node", "2", "--master_addr", "A", "--master_port", "5", "--shutdown_timeout", "0", "--no_prefix"],
        ["--nproc_per_node=2", "--master_addr=A", "--master_port=5", "--shutdown_timeout=0", "--no_prefix"],
    ],
)
def test_underscores_are_taken_as_torchrun_takes_them(asked: list[Options], script: str, argv: list[str]) -> None:
    assert main(["run", *argv, script]) == 42
    (options,) = asked
    assert (options.nproc_per_node, options.master_addr, options.master_port) == (2, "A", 5)
    assert (options.shutdown_timeout_s, options.prefix) == (0.0, False)


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_modules(asked: list[Options], flag: str) -> None:
    assert main(["run", flag, "timeit", "-s", "pass"]) == 42
    assert (asked[0].command, asked[0].num_script_args) == ((sys.executable, "-m", "timeit", "-s", "pass"), 2)


def test_programs(asked: list[Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tool"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("tool", "./tool", str(program)):
        assert main(["run", "--no-python", name, "-x"]) == 42
    assert [options.command for options in asked] == [(n, "-x") for n in (str(program), "./tool", str(program))]
    assert {(options.is_python, options.start_method) for options in asked} == {(False, "spawn")}


def test_a_file_to_run_by_path_is_what_is_run_anyway(asked: list[Options], script: str) -> None:
    assert main(["run", "--run-path", script]) == 42
    assert main(["run", "--start-method", "forkserver", script]) == 42
    assert asked == [Options((sys.executable, script))] * 2


def test_workers_are_counted(asked: list[Options], script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    for gpus in (0, 4):
        monkeypatch.setattr(devices, "num_gpus", lambda environ, gpus=gpus: gpus)
        for text in ("cpu", "auto", "8", "gpu"):
            assert main(["run", "--nproc-per-node", text, script]) == (2 if (gpus, text) == (0, "gpu") else 42)
    assert [options.nproc_per_node for options in asked] == [3, 3, 8, 3, 4, 8, 4]


def test_the_static_rendezvous_says_who_holds_the_store(asked: list[Options], script: str) -> None:
    for rank in ("0", "1"):
        assert main(["run", "--nnodes=2", "--master-addr=10.0.0.1", "--node-rank", rank, script]) == 42
    assert [(options.rendezvous, options.node_rank, options.conf.is_host) for options in asked] == [
        ("static", 0, True),
        ("static", 1, False),
    ]
    assert (asked[0].endpoint_host, asked[0].endpoint_port) == ("10.0.0.1", 29500)


def test_variables_stand_in_for_flags_as_with_torchrun(
    asked: list[Options], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_MODULE", "1")
    monkeypatch.setenv("PET_STANDALONE", "0")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert main(["run", "--nproc-per-node", "2", "timeit"]) == 42
    assert main(["run", "--shutdown-timeout", "1", "timeit"]) == 42
    assert [(o.nproc_per_node, o.max_restarts, o.shutdown_timeout_s) for o in asked] == [(2, 3, 7.0), (5, 3, 1.0)]
    assert asked[0].command == (sys.executable, "-m", "timeit")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PET_NNODES", "x", "PET_NNODES in the environment: got 'x', expected a number of nodes"),
        ("PET_STANDALONE", "yes", "PET_STANDALONE in the environment: got 'yes'"),
        ("PET_VIRTUAL_LOCAL_RANK", "1", "--virtual-local-rank is not honoured"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT in the environment: got 'x'"),
    ],
)
def test_variables_that_make_no_sense_are_refused_by_name(
    variable: str, text: str, message: str, asked: list[Options], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert_refused(["run", script], message, asked)


def assert_refused(argv: list[str], message: str, asked: list[Options]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(argv) == 2
    assert out.getvalue() == ""
    assert message in err.getvalue()
    assert err.getvalue().startswith("samestep" if argv == ["walk"] else "samestep run: ")
    assert err.getvalue().count("\n") == 1
    assert asked == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "arguments are required: script"),
        (["nothere.py"], "script 'nothere.py' does not exist in "),
        (["/"], "script '/' is a directory"),
        (["-m", "not.here"], "module 'not.here' can't be found"),
        (["--nproc-per-node", "0", __file__], "--nproc-per-node: got 0, expected at least 1"),
        (["--nproc-per-node", "-1", __file__], "--nproc-per-node: got -1, expected at least 1"),
        (["--nproc_per_node", "foo", __file__], "--nproc_per_node: got 'foo', expected an integer"),
        (["--nproc-per-node", "xpu", __file__], "--nproc-per-node: got 'xpu': Intel's GPUs are not counted"),
        (["--master-port", "65536", __file__], "--master-port: got '65536', expected 0 (a free one) to 65535"),
        (["--master-port", "x", __file__], "--master-port: got 'x'"),
        (["--master-addr", "", __file__], "--master-addr: got nothing"),
        (["--master-addr", "host:1", __file__], "--master-addr: 'host:1' has a port"),
        (["--shutdown-timeout", "-1", __file__], "--shutdown-timeout: got '-1', expected a number of seconds"),
        (["--shutdown-timeout", "inf", __file__], "--shutdown-timeout: got 'inf'"),
        (["--max-restarts", "-1", __file__], "--max-restarts: got '-1', expected an integer of at least 0"),
        (["--role", "", __file__], "--role: got nothing, expected a name"),
        (["--log-dir", "", __file__], "--log-dir: got nothing, expected a folder"),
        (["--start-method", "thread", __file__], "--start-method: got 'thread', expected fork or spawn"),
        (["-r", "4", __file__], "-r/--redirects: got '4', expected 0 (none)"),
        (["--nproc", "2", __file__], "unknown: --nproc"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(argv: list[str], message: str, asked: list[Options]) -> None:
    assert_refused(["run", *argv], message, asked)


def test_a_command_that_is_none(asked: list[Options]) -> None:
    assert_refused(["walk"], "invalid choice: 'walk'", asked)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--logs-specs", "mine"], "--logs-specs: not honoured: files are laid out by --log-dir"),
        (["--numa-binding", "node"], "--numa-binding: not honoured: the system places workers"),
        (["--event-log-handler", "mine"], "--event-log-handler: not honoured: there are no events"),
        (["--duplicate-stdout-filters", "a"], "--duplicate-stdout-filters: not honoured: give --tee"),
        (["--duplicate_stderr_filters", "a"], "--duplicate_stderr_filters: not honoured: give --tee"),
        (["--virtual-local-rank"], "--virtual-local-rank is not honoured: LOCAL_RANK numbers the workers"),
        (["--rdzv-backend", "etcd"], "--rdzv-backend: got 'etcd', which needs a server of etcd"),
        (["--rdzv-conf", "rank=0"], "--rdzv-conf: rank is not honoured: give --node-rank"),
        (["--node-rank", "1"], "--node-rank is 1, but there is one node"),
        (["--standalone", "--nnodes", "2"], "--standalone is for one machine"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint"),
        (["--no-python", "-m"], "--no-python and --module contradict each other"),
        (["--no-python", "--drop-in"], "--no-python and --drop-in contradict each other"),
        (["--run-path", "-m"], "--run-path and --module contradict each other"),
        (["--no-python", "--start-method", "fork"], "--no-python and --start-method fork contradict each other"),
        (
            ["--nnodes=2", "--master-addr=a", "--node-rank=1", "--rdzv-conf=is_host=1"],
            "--rdzv-conf says is_host, but --node-rank is 1",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_with_the_reason(argv: list[str], message: str, asked: list[Options]) -> None:
    assert_refused(["run", *argv, __file__], message, asked)


def test_refused_flags_may_ask_for_what_is_done_anyway(asked: list[Options], script: str) -> None:
    assert main(["run", "--event-log-handler", "null", "--duplicate-stdout-filters", "", script]) == 42


def test_every_flag_of_torchrun_is_known() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    ours = argparse.ArgumentParser()
    flags.add_flags(ours)
    assert theirs - {flag for action in ours._actions for flag in action.option_strings} == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n  pass\n", ", line 1: SyntaxError: invalid syntax"),
        ("a = 1\nif a:\nb = 2\n", ", line 3: IndentationError: expected an indented block"),
        ("\n\nreturn 1\n", ", line 3: SyntaxError: 'return' outside function"),
        ("x = '\0'\n", "null bytes"),
    ],
)
def test_a_syntax_error_is_told_before_anything_starts(
    text: str, message: str, asked: list[Options], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert_refused(["run", str(script)], f"script {str(script)!r}", asked)
    assert_refused(["run", str(script)], message, asked)


def test_scripts_are_compiled_without_a_word(
    asked: list[Options], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, data in (("odd.py", b"# coding: latin-1\nx = '\\d \xe9'\n"), ("no_suffix", b"(")):
        (tmp_path / name).write_bytes(data)
        assert main(["run", str(tmp_path / name)]) == 42
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["no_suffix", "odd.py"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("nothere", "program 'nothere' can't be found in PATH"),
        ("./nothere", "program './nothere' can't be found"),
        ("./plain", "program './plain' can't be executed: its permissions forbid it"),
        ("plain", "program 'plain' can't be executed: it is not in PATH; is ./plain meant?"),
        ("./folder", "program './folder' is a directory"),
    ],
)
def test_programs_that_can_not_be_run(
    program: str, message: str, asked: list[Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    assert_refused(["run", "--no-python", program], message, asked)


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
    assert len(lines) <= 60
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

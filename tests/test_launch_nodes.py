"""`samestep run` on several machines: launchers in network stacks of their own, whole runs from start to exit code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launching import Run, wait_until
from netns import Network

NAMES = ("alpha", "beta", "gamma")
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_RANK")
print("sum", total.item(), [os.environ[name] for name in names])
dist.destroy_process_group()
"""


@contextmanager
def launchers(
    net: Network, folder: Path, text: str, *flags: str, nodes: int = 2, **each: object
) -> Iterator[list[Run]]:
    """A launcher on each machine with the same flags; those in `each`, by machine, come first."""
    with ExitStack() as stack:
        runs = []
        for name in NAMES[:nodes]:
            (folder / name).mkdir()
            run = launcher(net, name, folder / name, text, *each.get(name, ()), *flags)
            runs.append(stack.enter_context(run))
        yield runs


def launcher(net: Network, name: str, folder: Path, text: str, *flags: str) -> Run:
    place = ("--rdzv-endpoint", f"{net.address('alpha')}:29400", "--start-method", "spawn")
    return Run(folder, text, *place, *flags, preexec_fn=net.on(name))


def endings(runs: list[Run]) -> list[int]:
    codes = [run.wait() for run in runs]
    for run in runs:
        run.assert_nobody_is_left(len(run.noted_pids()))
    return codes


def test_workers_of_three_machines_are_one_world(tmp_path: Path) -> None:
    flags = ("--nnodes", "3")
    more = {"beta": ("--nproc-per-node", "2")}
    with Network(*NAMES) as net, launchers(net, tmp_path, SUM, *flags, nodes=3, **more) as runs:
        assert endings(runs) == [0, 0, 0], [run.err.read_text() for run in runs]
    lines = [line for run in runs for line in run.lines(run.out)]
    assert [int(line[1]) for line in sorted(lines)] == [0, 1, 2, 3], "prefixes are ranks, not local ranks"
    assert lines[0] == "[0] sum 10.0 ['0', '3', '0', '1', '4', '0']", "who holds the store is node 0"
    assert {line[4:12] for line in lines} == {"sum 10.0"}
    assert len({line.split("[")[2] for line in lines}) == 4


def test_a_failure_on_one_machine_ends_the_others_and_a_restart_is_everybodys(tmp_path: Path) -> None:
    text = """
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
note(f"up-{attempt}")
if os.environ["GROUP_RANK"] == "1":
    wait_for(f"../alpha/up-{attempt}")  # else it would end the other before that has said anything
    raise ValueError("lost it")
forever()
"""
    flags = ("--nnodes", "2", "--max-restarts", "1")
    with Network(*NAMES[:2]) as net, launchers(net, tmp_path, text, *flags) as runs:
        assert endings(runs) == [1, 1]
    alpha, beta = runs
    assert alpha.lines(alpha.out) == ["[0] attempt 0 of 1", "[0] attempt 1 of 1"]
    assert beta.lines(beta.out) == ["[1] attempt 0 of 1", "[1] attempt 1 of 1"]
    for run in runs:
        lines = run.lines(run.err)
        assert lines[-1] == "ValueError: lost it"
        assert (
            len([line for line in lines if "failed first: it exited with code 1:" in line and "on beta" in line]) == 2
        )
        assert "samestep: all workers are started again (restart 1 of 1)" in lines


def test_machines_that_vanish_are_named(tmp_path: Path) -> None:
    """The cable of one is cut, then the launcher of another is killed; the last one goes on alone until it is told."""
    text = "note(f\"up-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['WORLD_SIZE']}\")\nforever()"
    flags = ("--nnodes", "1:3", "--max-restarts", "5", "--shutdown-timeout", "3")
    conf = ("--rdzv-conf", "last_call_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3")
    with Network(*NAMES) as net, launchers(net, tmp_path, text, *flags, *conf, nodes=3) as (alpha, beta, gamma):
        for run in (alpha, beta, gamma):
            run.wait_for("up-0-3")
        net.cut("gamma")
        alpha.wait_for("up-1-2")
        assert gamma.wait() == 1, "it can't reach the store any more"
        beta.wait_for("up-1-2")
        beta.process.kill()
        alpha.wait_for("up-2-1")
        alpha.process.send_signal(signal.SIGTERM)
        assert alpha.wait() == 128 + signal.SIGTERM
        said = alpha.err.read_text()
        beta.assert_nobody_is_left(2)
    assert "(gamma) is gone: it has shown no life for 3 s" in said
    assert "(beta) is gone: its launcher was killed" in said
    assert "no longer answers" in gamma.err.read_text()


def test_a_machine_that_comes_late_takes_part_from_the_next_attempt_on(tmp_path: Path) -> None:
    text = 'size = os.environ["WORLD_SIZE"]\nnote(f"up-{size}")\nwhile size == "1":\n    signal.pause()'
    flags = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1")
    with Network(*NAMES[:2]) as net, launchers(net, tmp_path, text, *flags, nodes=1) as (alpha,):
        alpha.wait_for("up-1")
        (tmp_path / "beta").mkdir()
        with launcher(net, "beta", tmp_path / "beta", text, *flags) as beta:
            assert endings([alpha, beta]) == [0, 0]
            beta.wait_for("up-2")
    assert "samestep: beta came to take part, so all workers are started again" in alpha.err.read_text()


@pytest.mark.parametrize("kind", ["missing", "twice"])
def test_machines_that_do_not_come_together(tmp_path: Path, kind: str) -> None:
    own = {"alpha": ("--node-rank", "0"), "beta": ("--node-rank", "0" if kind == "twice" else "1")}
    flags = ("--nnodes", "3" if kind == "missing" else "2", "--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=3")
    with Network(*NAMES[:2]) as net, launchers(net, tmp_path, "", *flags, **own) as runs:
        assert [run.wait() for run in runs] == [1, 1]
    for run in runs:
        said = run.err.read_text()
        assert "alpha" in said
        assert "beta" in said
        assert ("1 is missing" if kind == "missing" else "--node-rank") in said, said
        assert run.noted_pids() == []


def test_who_is_told_to_end_says_so_to_the_others(tmp_path: Path) -> None:
    with (
        Network(*NAMES[:2]) as net,
        launchers(net, tmp_path, 'note("up")\nforever()', "--nnodes", "2") as (alpha, beta),
    ):
        alpha.wait_for("up")
        beta.wait_for("up")
        beta.process.send_signal(signal.SIGINT)
        assert endings([beta, alpha]) == [130, 1]
        wait_until(lambda: "(beta) is gone: " in alpha.err.read_text())

"""The zygote: loads what the script will want, then forks a worker for each request. Stays single-threaded."""

import gc
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from samestep.errors import LaunchError
from samestep.launch.guard import watch_from
from samestep.launch.kernel import die_with_parent, name_process
from samestep.launch.preload import preload
from samestep.launch.script import be_script, forget_shadowed, places_of_modules, prepare
from samestep.launch.wants import wanted
from samestep.world import set_environment

__all__ = ["main"]

# The exit code of a zygote that could not import what the script wants; known in zygote.py, too.
_CANT_LOAD = 3
_FDS_PER_WORKER = 4


def main(args: Sequence[str], at_start: Collection[str]) -> None:
    """Serves requests until the launcher is gone. Returns in workers too, once their script has run."""
    requests, guard_fd, launcher = socket.socket(fileno=int(args[0])), int(args[1]), int(args[2])
    os.set_inheritable(requests.fileno(), False)
    os.set_inheritable(guard_fd, False)
    name_process("samestep-zygote")
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # of workers, until they run their script
    gc.disable()  # nearly all that an import makes stays; looking through it again and again takes a third of the time
    _load(args[3:], at_start)
    requests.sendall(b"r")
    gc.freeze()  # what is here now is shared with the workers, as long as no collection writes to it
    gc.enable()
    while received := _receive(requests):
        jobs, fds = received
        number = _fork(len(jobs), launcher)
        if number is not None:
            requests.close()
            mine = slice(_FDS_PER_WORKER * number, _FDS_PER_WORKER * (number + 1))
            for fd in set(fds) - set(fds[mine]):
                os.close(fd)
            job, told_fd = jobs[number], fds[mine][-1]
            _become(job, fds[mine], guard_fd)
            be_script(job["argv"], told_fd=told_fd, drop_in=job["drop_in"])
            return
        for fd in fds:
            os.close(fd)


def _load(argv: Sequence[str], at_start: Collection[str]) -> None:
    """Imports what the script will, with the modules beside it in their place, as they are for the script."""
    places = places_of_modules(argv)
    forget_shadowed(places, at_start)
    sys.path[:0] = places
    try:
        preload(wanted(argv))
    except LaunchError as e:
        sys.exit(str(e))
    except BaseException:  # noqa: BLE001 - the script meets the same, and shows it to its user
        os._exit(_CANT_LOAD)
    del sys.path[: len(places)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _receive(requests: socket.socket) -> tuple[list[dict[str, Any]], list[int]] | None:
    header, fds, _, _ = socket.recv_fds(requests, 8, 253)
    if not header:
        return None
    with requests.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(header, "big"))), list(fds)


def _fork(count: int, launcher: int) -> int | None:
    """Forks processes whose parent is the launcher; tells which of them this is, or None where it is none."""
    between = 0
    try:
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return None
        between = os.getpid()
        for number in range(count):
            if os.fork() == 0:
                return _adopted(number, between, launcher)
    except OSError as e:
        print(f"no process could be forked: {e.strerror}", file=sys.stderr, flush=True)
        if not between:
            return None
    os._exit(0)


def _adopted(number: int, between: int, launcher: int) -> int:
    while os.getppid() == between:
        os.sched_yield()
    if os.getppid() != launcher:  # it has died, or the kernel knows no adoption
        os._exit(1)
    return number


def _become(job: dict[str, Any], fds: Sequence[int], guard_fd: int) -> None:
    """Makes a forked process what a fresh interpreter would be at the first line of its script."""
    go, stdout, stderr, told = fds
    launcher = os.getppid()
    os.setsid()
    watch_from(guard_fd)
    os.close(guard_fd)
    die_with_parent()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    with suppress(OSError):
        os.write(go, os.getpid().to_bytes(8, "big"))
    if os.getppid() != launcher or os.read(go, 1) != b"g":
        os._exit(1)
    os.close(go)
    set_environment(job["environment"])
    prepare(job["argv"], told_fd=told, name=job["name"])
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()

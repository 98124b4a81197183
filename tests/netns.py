"""Machines for the tests: network stacks of their own, joined by a switch, each with a name and addresses.

They are held by nothing but open files of this process, so they vanish with it, whatever happens.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

__all__ = ["Network"]

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """Machines with the given names on one switch; skips the test where such can't be made."""

    def __init__(self, *names: str) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            pytest.skip("network namespaces need Linux and root")
        ip = shutil.which("ip", path=f"{os.defpath}:/sbin:/usr/sbin")
        if ip is None:
            pytest.skip("network namespaces need the program ip (Debian: iproute2)")
        self._ip = ip
        self._names = names
        self._stack = ExitStack()
        self._fds: dict[str, int] = {}

    def __enter__(self) -> Network:
        with self._stack:
            for name in ("switch", *self._names):
                fd = self._fds[name] = _new_namespace()
                self._stack.callback(os.close, fd)
            self._run("switch", "link add hub type bridge")
            self._run("switch", "link set hub up")
            for name in self._names:
                path = f"/proc/{os.getpid()}/fd/{self._fds[name]}"
                self._run("switch", f"link add {name} type veth peer name eth0 netns {path}")
                self._run("switch", f"link set {name} master hub up")
                self._run(name, "link set lo up")
                self._run(name, "link set eth0 up")
                self._run(name, f"address add {self.address(name)}/24 dev eth0")
                self._run(name, f"address add {self.address6(name)}/64 dev eth0 nodad")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, name: str) -> str:
        """The machine's IPv4 address."""
        return f"10.77.0.{1 + self._names.index(name)}"

    def address6(self, name: str) -> str:
        """The machine's IPv6 address."""
        return f"fd77::{1 + self._names.index(name)}"

    def on(self, name: str) -> Callable[[], None]:
        """What a new process is to call before anything else, so that it runs on this machine."""
        fd = self._fds[name]

        def enter() -> None:
            _checked(_LIBC.setns(fd, _CLONE_NEWNET))
            _checked(_LIBC.unshare(_CLONE_NEWUTS))
            _checked(_LIBC.sethostname(name.encode(), len(name)))

        return enter

    def cut(self, name: str) -> None:
        """Pulls the machine's cable."""
        self._run("switch", f"link set {name} down")

    def _run(self, name: str, command: str) -> None:
        done = subprocess.run(
            [self._ip, *command.split()], preexec_fn=self.on(name), capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"ip {command}: {done.stderr}"


def _new_namespace() -> int:
    """A file that holds a network stack: made in a thread, as it is a thread's own."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _checked(_LIBC.unshare(_CLONE_NEWNET))
            made.append(os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as e:
            made.append(e)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        pytest.skip(f"network namespaces can't be made here: {made[0].strerror}")
    return made[0]


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

"""The launcher's side of a meeting of nodes: starts the process that meets the other nodes, and talks with it.

That process imports torch, which the launcher does not. It lives in a session of its own, and ends by itself, with a
word to the other nodes, when the launcher is gone: so it is not to be killed along with it.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import IO

from samestep.errors import LaunchError
from samestep.launch.events import Event, Failure, Met, Refused, from_line
from samestep.launch.nodes import MeetingSettings
from samestep.world import environment

__all__ = ["Meeting", "MeetingProcess", "start_meeting"]

# Where modules are found is as in the launcher: the folder that it was started in is not searched first.
_START = "import sys; sys.path[:] = sys.argv[1:]; from samestep.launch.meeting import main; main()"
# Importing torch from a slow disk takes a while, and nothing is said meanwhile.
_FIRST_WORD_S = 120.0
_READ_BYTES = 1 << 16
_LAST_LINES = 3


class MeetingProcess:
    """What `start_meeting` has started, and the file that takes what it has to say when it breaks."""

    def __init__(self, process: "subprocess.Popen[bytes]", complaints: IO[bytes]) -> None:
        self.process = process
        self.complaints = complaints


def start_meeting(preexec_fn: Callable[[], None] | None = None) -> MeetingProcess:
    """Starts the process that meets the other nodes. Raises LaunchError where the system refuses."""
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            # torch tells at length of connections that don't come about at once.
            env={"TORCH_CPP_LOG_LEVEL": "FATAL", **environment(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=preexec_fn,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        complaints.close()
        raise LaunchError(f"the process that meets the other nodes could not be started: {e}") from e
    return MeetingProcess(process, complaints)


class Meeting:
    """One node's part in the meeting, for a loop that waits for several things.

    `fd` becomes readable when something has happened; `take` says what. It is to be called at `deadline` (monotonic)
    at the latest, as silence is news as well; None says that nothing will come any more. After a `Refused` nothing
    does. `close` is always due.
    """

    def __init__(self, settings: MeetingSettings, start: Callable[[], MeetingProcess] = start_meeting) -> None:
        self._settings = settings
        started = start()
        self._process, self._complaints = started.process, started.complaints
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.fd = self._stdout.fileno()
        self.pid = self._process.pid
        self.deadline: float | None = time.monotonic() + _FIRST_WORD_S
        self._pending = b""
        self._round = 0
        self._is_silent = False
        os.set_blocking(self.fd, False)
        self._send(asdict(settings))

    def take(self) -> list[Event]:
        """Returns what has happened since the last call; does not wait."""
        events: list[Event] = []
        if self.deadline is None:
            return events
        data, has_ended = self._read()
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            fields = json.loads(line)
            if "patience_s" in fields:
                self.deadline = time.monotonic() + fields["patience_s"]
                continue
            event = from_line(line.decode())
            events.append(event)
            if isinstance(event, Met):
                self._round = event.round
            if isinstance(event, Refused):
                self.deadline = None
                return events
        if has_ended:
            events.append(Refused(self._how_it_ended()))
            self.deadline = None
        elif time.monotonic() >= self.deadline:
            self._is_silent = True
            events.append(
                Refused(
                    f"the store at {self._settings.place}, where the nodes meet, no longer answers: the machine that"
                    " holds it, or the network to it, is down"
                )
            )
            self.deadline = None
        return events

    def done(self, exit_code: int) -> None:
        """Tells that all workers of this node have ended well."""
        self._send({"do": "done", "round": self._round, "exit_code": exit_code})

    def failed(self, failure: Failure) -> None:
        """Tells of the first failure on this node in this round."""
        self._send({"do": "failed", "round": self._round, "failure": asdict(failure.shortened())})

    def again(self) -> None:
        """Tells that no worker of this node is left, and that it is ready for the next round."""
        self._send({"do": "again", "round": self._round})

    def close(self, patience_s: float = 5.0) -> None:
        """Says goodbye to the other nodes, ends the process and reaps it, within `patience_s` or by force.

        The node that holds the store stays until all the others have said goodbye, as long as patience lasts.
        """
        if self._is_silent:
            self._process.kill()
        self._send({"do": "bye", "patience_s": 0.8 * patience_s})
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._wait_for_end(time.monotonic() + patience_s)
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        self._complaints.close()
        self.deadline = None

    def _wait_for_end(self, end: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.fd, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                if selector.select(left) and self._read()[1]:
                    return

    def _read(self) -> tuple[bytes, bool]:
        """What lies there, and whether that is the end."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.fd, _READ_BYTES):
                data += chunk
            return data, True
        return data, False

    def _send(self, command: dict[str, object]) -> None:
        # It may have been killed; `take` says so.
        with contextlib.suppress(BrokenPipeError):
            line = memoryview(json.dumps(command).encode() + b"\n")
            while line:
                line = line[self._stdin.write(line) or 0 :]

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return f"the process that meets the other nodes (pid {self.pid}) {how}" + "".join(f"\n{line}" for line in said)

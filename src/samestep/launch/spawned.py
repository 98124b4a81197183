"""What a process of `spawn` does: unpack the function, call it, leave its result or its exception in a file."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from samestep.launch.kernel import name_process
from samestep.world import environment

__all__ = ["main"]

_NO_FILE = "<dynamic-code>"


def main(folder: str) -> None:
    """Be one rank of the call that lies in `folder`; exits with code 1 if the function raised."""
    rank, place = int(environment()["RANK"]), Path(folder)
    name_process(f"samestep-r{rank}")
    try:
        fn, args = cloudpickle.loads((place / "call").read_bytes())
        _leave(place / f"result-{rank}", fn(rank, *args))
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:  # noqa: BLE001 - told to the process that waits for this one
        if isinstance(error, SystemExit) and error.code in (0, None):
            _leave(place / f"result-{rank}", None)
            return
        _leave(place / f"error-{rank}", (_told(error, (place / "script").read_text()), _pickled(error)))
        sys.exit(1)


def _leave(path: Path, value: Any) -> None:
    """Write a whole file or none."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(cloudpickle.dumps(value))
    os.replace(part, path)


def _told(error: BaseException, script: str) -> str:
    """Format the traceback from the caller's function on; this file's own frames say nothing to its author.

    cloudpickle drops the file names of functions that it sends along: those of the script's own get theirs back.
    """
    told: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    assert told is not None
    lines = told
    while told is not None:
        frames = [frame for frame in told.stack if frame.filename != __file__]
        told.stack = traceback.StackSummary.from_list(
            [
                traceback.FrameSummary(script, frame.lineno, frame.name)
                if frame.filename == _NO_FILE and os.path.isfile(script)
                else frame
                for frame in frames
            ]
        )
        told = told.__cause__ or told.__context__
    return "".join(lines.format())


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:  # noqa: BLE001 - an exception that cannot travel; its traceback does
        return None
    return pickled

"""Runs a script as one rank of a checked program.

    python -m samestep.inspect.observed FOLDER MODE STEPS SPELLING script [args ...]

SPELLING is the flag with which the script gets its local rank, or a dash for none.
"""

import random
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy
import torch

from samestep.inspect.loaders import watch_loaders
from samestep.inspect.recorder import Mode, Recorder
from samestep.inspect.scratch import Scratch
from samestep.inspect.steps import silence_dropout, watch_steps
from samestep.launch.script import be_script, places_of_modules
from samestep.world import World

__all__ = ["observe"]

# A program that seeds nothing would begin anew each time, and a single rank as no other; ranks stay unlike.
_SEED = 1000


def observe(folder: Path, mode: Mode, steps: int, argv: Sequence[str]) -> None:
    """Be the script `argv`, or the module after "-m", and leave in `folder` what it does.

    Raises what the script raises. This changes torch and Python's files for the rest of the process.
    """
    world = World.from_env(device="cpu")
    recorder = Recorder(folder, mode, steps, world.rank, world.size)
    Scratch(folder, f"files-{mode}", recorder.wrote).install()
    watch_steps(recorder)
    watch_loaders(recorder)
    silence_dropout()
    random.seed(_SEED + world.rank)
    numpy.random.seed(_SEED + world.rank)
    torch.manual_seed(_SEED + world.rank)
    try:
        be_script(argv, told_fd=-1, drop_in=False)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            recorder.seen.error = "".join(traceback.format_exception(type(error), error, _from_script_on(error)))
        raise
    finally:
        recorder.finish()


def _from_script_on(error: BaseException) -> TracebackType | None:
    ours = {__file__, be_script.__code__.co_filename}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _main() -> None:
    folder, mode, steps, spelling, *argv = sys.argv[1:]
    at = 2 if argv[0] == "-m" else 1
    if spelling != "-":
        argv.insert(at, f"{spelling}={World.from_env(device='cpu').local_rank}")
    sys.argv = argv[at - 1 :]
    sys.path[:1] = places_of_modules(argv)  # in place of the current folder, where this module was looked for
    observe(Path(folder), cast(Mode, mode), int(steps), argv)


if __name__ == "__main__":
    _main()

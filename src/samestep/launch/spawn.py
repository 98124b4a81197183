"""Runs a function on several ranks from within a program or a notebook, and brings their results back."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from samestep.errors import WorkerError
from samestep.launch.agent import watch
from samestep.launch.ending import Elsewhere, Exit, Interrupt, OutputLost, State
from samestep.launch.failures import how, signal_name
from samestep.launch.spec import LaunchSpec
from samestep.launch.worker import usable_cores
from samestep.world import environment

__all__ = ["spawn"]

# Where modules are found, samestep among them, is as in the caller's process from the first import on.
_START = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/path'));"
    "from samestep.launch.spawned import main; main(sys.argv[1])"
)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nproc: int = 1,
    *,
    shutdown_timeout_s: float = 30.0,
    prefix: bool = True,
) -> list[Any]:
    """Call `fn(rank, *args)` in `nproc` new processes of this machine and return the results in rank order.

    fn: any callable; lambdas, closures and functions of a notebook's cells will do. It, `args` and the results travel
    by cloudpickle: what an importable module defines is imported on the other side, all else is sent along. Each
    process has the environment of a rank under `samestep run`, so `World.from_env()` and `connect()` work in it. It is
    a fresh interpreter that does not run the caller's script again, so neither a guard around the script's main part
    nor the state of CUDA here matters. shutdown_timeout_s: how long ranks may take to end after one has failed. prefix:
    whether their output has the rank before each line.

    Raises WorkerError once all ranks have ended if one failed: with its rank, its own traceback or the signal that
    killed it, and as `__cause__` its exception where that can be pickled. Raises ValueError for less than one process,
    TypeError if `fn` is not callable or something can't be pickled, KeyboardInterrupt after Ctrl-C, and LaunchError
    where processes can't be started, also outside the main thread. No process and no file is left in any case.
    """
    if not callable(fn):
        raise TypeError(f"expected a function to call on every rank, got {type(fn).__name__}")
    if not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"expected at least 1 process, got {nproc!r}")
    packed = _packed(fn, tuple(args))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryDirectory(prefix="samestep-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(packed)
        (folder / "path").write_text(json.dumps(sys.path))
        (folder / "script").write_text(os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or ""))
        spec = LaunchSpec(
            command=(sys.executable, "-c", _START, name),
            nproc_per_node=nproc,
            environment=environment(),
            cores=usable_cores(),
            shutdown_timeout_s=shutdown_timeout_s,
            prefix=prefix,
        )
        state = watch(spec)
        failure = _failure(state, folder, nproc)
        results = [] if failure else [_result(folder, rank) for rank in range(nproc)]
    if isinstance(state.cause, Interrupt) and state.cause.signum != signal.SIGINT:
        signal.raise_signal(state.cause.signum)  # what it would have done without us
    if failure is not None:
        raise failure
    return results


def _packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"the function or its arguments can't be sent to other processes: {error}") from error
    return packed


def _result(folder: Path, rank: int) -> Any:
    return cloudpickle.loads((folder / f"result-{rank}").read_bytes())


def _failure(state: State, folder: Path, nproc: int) -> BaseException | None:
    match state.cause:
        case Exit() as first:
            return _worker_error(first.rank, how(first), folder, nproc)
        case Interrupt(signum=signum):
            return KeyboardInterrupt() if signum == signal.SIGINT else WorkerError(f"ended by {signal_name(signum)}")
        case OutputLost(stream=stream):
            return BrokenPipeError(f"{stream} can't be written to any more, so the ranks were ended")
        case Elsewhere(lines=lines):  # never on one machine
            return WorkerError("\n".join(lines))
        case None:
            silent = [rank for rank in range(nproc) if not (folder / f"result-{rank}").exists()]
            return _worker_error(silent[0], "ended before its function returned", folder, nproc) if silent else None


def _worker_error(rank: int, how: str, folder: Path, nproc: int) -> WorkerError:
    who = f"rank {rank} of {nproc}"
    told = folder / f"error-{rank}"
    if not told.exists():
        return WorkerError(f"{who} failed first: it {how}", rank)
    trace, pickled = cloudpickle.loads(told.read_bytes())
    error = WorkerError(f"{who} failed first:\n\n{trace}", rank)
    error.__cause__ = None if pickled is None else cloudpickle.loads(pickled)
    return error

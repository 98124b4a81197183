"""Run a function as the ranks of a small world: as threads (deterministic) or as processes (real)."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep.comm.base import Communicator
from samestep.comm.c10d import C10dCommunicator
from samestep.comm.threads import thread_communicators
from samestep.errors import CommunicatorError

__all__ = ["RankError", "run_processes", "run_threads"]

T = TypeVar("T")


def run_threads(fn: Callable[[Communicator], T], size: int, *, timeout_s: float = 30.0) -> list[T]:
    """Call `fn(communicator)` in `size` threads, one a rank; return their results in rank order.

    If ranks raise, the others learn of it at their next exchange with them. Then the cause is raised here: the lowest
    rank's error that is not itself the consequence of another rank's end.
    """
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def main(communicator: Communicator) -> None:
        try:
            results[communicator.rank] = fn(communicator)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors[communicator.rank] = error
        finally:
            communicator.close()

    threads = [
        threading.Thread(target=main, args=(c,), name=f"rank {c.rank}")
        for c in thread_communicators(size, timeout_s=timeout_s)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        causes = [r for r in sorted(errors) if not isinstance(errors[r], CommunicatorError)] or sorted(errors)
        raise errors[causes[0]]
    return results


class RankError(AssertionError):
    """Some rank of `run_processes` raised, died or did not end in time; the message has each one's traceback."""


def run_processes(
    fn: Callable[..., T], size: int, *args: Any, backend: str = "gloo", timeout_s: float = 60.0
) -> list[T]:
    """Call `fn(communicator, *args)` in `size` processes joined by a torch.distributed group; return results by rank.

    `fn`, `args` and the results are pickled, so `fn` is a module's function. Raises RankError, with every failed rank's
    traceback or exit code, if a rank fails or is not done after `timeout_s` seconds, which is also the group's own
    timeout. No process is left in any case. Processes are forked from a server that has torch imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe(duplex=False)
                rest = (Path(folder, "store"), rank, size, backend, timeout_s)
                process: BaseProcess = context.Process(
                    target=_rank_main, args=(fn, args, theirs, *rest), name=f"rank {rank}"
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _collect(ranks, deadline)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                process.close()
                connection.close()


def _collect(ranks: list[tuple[BaseProcess, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending:
        ready: list[Any] = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.update((rank, "not done in time") for rank in pending.values())
            break
        for connection in ready:
            rank = pending.pop(connection)
            try:
                finished, outcome = connection.recv()
            except EOFError:
                ranks[rank][0].join()
                finished, outcome = False, f"died with exit code {ranks[rank][0].exitcode}"
            (results if finished else failures)[rank] = outcome
    if failures:
        raise RankError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    connection: Connection,
    store: Path,
    rank: int,
    size: int,
    backend: str,
    timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        communicator = C10dCommunicator()
        communicator.barrier()  # a rank that is done early leaves; nobody may still be connecting to it then
        outcome = ForkingPickler.dumps((True, fn(communicator, *args)))
    except BaseException:  # noqa: BLE001 - told to the parent, which raises it
        outcome = ForkingPickler.dumps((False, traceback.format_exc()))
    connection.send_bytes(outcome)
    connection.close()
    if dist.is_initialized():
        dist.destroy_process_group()

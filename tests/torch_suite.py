"""Runs the distributed tests that come in torch's wheel, on the CPU, over a backend of choice.

    tests/torch_suite.py --backend gloo --ranks 2 test_all_reduce_sum test_broadcast
    tests/torch_suite.py --backend samestep --ranks 4 --json outcomes.json
    tests/torch_suite.py --backend gloo --ranks 2 --ours test_ddp_namedtuple

Prints one line of JSON for each test: its name, its outcome (passed, skipped, failed or hung), how long it took, and
what was said. The ranks are forked once torch's suite is imported, and take one test after the other, each with a
process group of its own; after one that failed they are ended and forked anew.

torch's suite decides by the name of the backend which tests there are at all, when it is imported; "gloo" is what it
sees then, so that no test is left out for another backend's name. In tests that ask for GPUs, what they call there does
nothing, and the tensors stay on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["main"]

# What a test may take, in seconds; and the others' time once a rank has failed.
_LIMIT_S, _GRACE_S = 40.0, 2.0
# Which tests ask for GPUs only because they call `.cuda()`.
_OF_MODULES = re.compile(r"ddp|DDP|DistributedDataParallel|_join_|Join|DistributedSampler", re.IGNORECASE)
# Which tests have code for "gloo" and for other backends that they know, and none for others.
_KNOW_GLOO = ("test_accumulate_gradients_",)
_OF_GPUS = re.compile(r"cuda|nccl|multigpu|multi_gpu", re.IGNORECASE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--ours", action="store_true", help="our DistributedDataParallel and SyncBatchNorm instead")
    parser.add_argument("--json", type=Path, help="write {test: [outcome, seconds]} here")
    parser.add_argument("--skip", nargs="*", default=[], help="tests to leave out")
    parser.add_argument("tests", nargs="*", help="all that need no GPU, if none is named")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        suite = _import_suite(args.ranks, folder, ours=args.ours)
        outcomes = {}
        tests = [test for test in args.tests or _all(suite) if test not in args.skip]
        for test, outcome, took_s, said in _run(suite, tests, args.ranks, args.backend, folder):
            outcomes[test] = outcome, round(took_s, 2)
            sys.stdout.write(json.dumps([test, outcome, round(took_s, 2), said]) + "\n")
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(outcomes, indent=0, sort_keys=True) + "\n")
    return 0


def _import_suite(ranks: int, folder: str, *, ours: bool) -> ModuleType:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TEMP_DIR=folder,
        GLOO_SOCKET_IFNAME="lo",
    )
    for name in ("barrier", "test_dir", "init_dir"):
        Path(folder, name).mkdir()
    import torch
    import torch.testing._internal.common_distributed as common

    common.skip_if_lt_x_gpu = common.require_n_gpus_for_nccl_backend = lambda *_, **__: lambda fn: fn
    common.skip_if_no_gpu = lambda fn: fn
    common.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    if ours:
        importlib.import_module("samestep.launch.drop_in").replace_torchs_class()
        own = importlib.import_module("samestep.parallel.batchnorm").SyncBatchNorm
        torch.nn.SyncBatchNorm = torch.nn.modules.SyncBatchNorm = own  # type: ignore[misc]
    suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    _keep_on_the_cpu()
    return suite


def _all(suite: ModuleType) -> list[str]:
    names = sorted(n for n in dir(suite.DistributedTest._DistTestBase) if n.startswith("test_"))
    return [n for n in names if _OF_MODULES.search(n) or not _OF_GPUS.search(n)]


def _run(
    suite: ModuleType, tests: list[str], size: int, backend: str, folder: str
) -> Iterator[tuple[str, str, float, str]]:
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for test in tests:
            method = getattr(suite.DistributedTest._DistTestBase, test)
            if getattr(method, "__unittest_skip__", False):
                yield test, "skipped", 0.0, method.__unittest_skip_why__
                continue
            ranks = ranks or _start(suite, size, backend, folder)
            suite.Barrier.init()
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(dir=folder) as place:
                for _, connection in ranks:
                    connection.send((test, str(Path(place, "store"))))
                told = _collect([connection for _, connection in ranks])
                outcome = _worst(told, size)
                if outcome in ("failed", "hung"):
                    _end(ranks)
                    ranks = []
            for rank in told.keys() & {r for r, (_, text) in told.items() if text == "died"}:
                told[rank] = "failed", "died: " + Path(folder, f"log{rank}").read_text("utf-8", "replace")[-2500:]
            said = "\n".join(f"rank {r} {o}: {t}" for r, (o, t) in sorted(told.items()) if t)
            yield test, outcome, time.monotonic() - begin, said
    finally:
        _end(ranks)


def _start(suite: ModuleType, size: int, backend: str, folder: str) -> list[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("fork")
    ranks: list[tuple[BaseProcess, Connection]] = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        log = str(Path(folder, f"log{rank}"))
        process = context.Process(target=_rank_main, args=(suite, rank, size, backend, theirs, log), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    return ranks


def _end(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    for process, connection in ranks:
        process.kill()
        process.join()
        connection.close()


def _collect(connections: list[Connection]) -> dict[int, tuple[str, str]]:
    """Return each rank's outcome and what it said; ranks that are not done in time are missing."""
    told: dict[int, tuple[str, str]] = {}
    pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + _LIMIT_S
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[call-overload]
            try:
                told[rank] = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                told[rank] = "failed", "died"
            if told[rank][0] == "failed":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return told


def _worst(told: dict[int, tuple[str, str]], size: int) -> str:
    outcomes = {outcome for outcome, _ in told.values()}
    if "failed" in outcomes:
        return "failed"
    if len(told) < size:
        return "hung"
    return "skipped" if "skipped" in outcomes else "passed"


def _rank_main(suite: ModuleType, rank: int, size: int, backend: str, connection: Connection, log: str) -> None:
    import torch
    import torch.distributed as dist

    if backend != "gloo":
        importlib.import_module("samestep")
    torch.set_num_threads(1)
    with open(log, "w+") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
        with contextlib.suppress(EOFError):
            while True:
                test, store = connection.recv()  # once all have told how the one before went
                if dist.is_initialized():
                    dist.destroy_process_group()
                faulthandler.dump_traceback_later(_LIMIT_S - 1, file=file, exit=True)
                connection.send(_one(suite, test, rank, size, backend, store))
                faulthandler.cancel_dump_traceback_later()


def _one(suite: ModuleType, test: str, rank: int, size: int, backend: str, store: str) -> tuple[str, str]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.set_debug_level(dist.DebugLevel.OFF)
    suite.Barrier.barrier_id = 0
    suite.BACKEND = os.environ["BACKEND"] = "gloo" if test.startswith(_KNOW_GLOO) else backend
    case = type("Case", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})(test)
    case.rank, case.file_name = rank, store
    try:
        dist.init_process_group(
            backend, init_method=f"file://{store}", world_size=size, rank=rank, timeout=timedelta(seconds=_LIMIT_S)
        )
        getattr(type(case), test)(case)
    except unittest.SkipTest as reason:
        return "skipped", str(reason)
    except SystemExit as stop:
        return "skipped" if stop.code in {s.exit_code for s in suite.TEST_SKIPS.values()} else "failed", str(stop)
    except BaseException:  # noqa: BLE001 - told to whoever asked
        return "failed", traceback.format_exc()[-2500:]
    return "passed", ""


def _keep_on_the_cpu() -> None:
    """Make `.cuda()`, `device_ids=[rank]` and the like mean the CPU."""
    import torch

    cpu = torch.device("cpu")

    def is_gpu(arg: object) -> bool:
        if isinstance(arg, int):
            return not isinstance(arg, bool)
        return isinstance(arg, str | torch.device) and torch.device(arg).type == "cuda"

    def moved(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_gpu(kwargs.get("device")):
                kwargs["device"] = cpu
            return real(self, *(cpu if is_gpu(a) else a for a in args), **kwargs)

        return call

    def made(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_gpu(kwargs.get("device")):
                kwargs["device"] = cpu
            return real(*args, **kwargs)

        return call

    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
        kind.to = moved(kind.to)  # type: ignore[method-assign]
    for name in ("rand", "randn", "zeros", "ones", "empty", "tensor", "full", "arange", "randint", "as_tensor"):
        setattr(torch, name, made(getattr(torch, name)))
    for name in ("rand_like", "randn_like", "zeros_like", "ones_like", "empty_like"):
        setattr(torch, name, made(getattr(torch, name)))
    real_init = torch.nn.parallel.DistributedDataParallel.__init__

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **kw: Any) -> None:
        real_init(self, module, None, None, *rest, **kw)

    torch.nn.parallel.DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_, **__: _Nothing()  # type: ignore[assignment, return-value]
    torch.cuda.current_device = lambda: 0
    for name in ("set_device", "synchronize", "_sleep"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())


class _Nothing:
    """A stream or an event of a device that isn't there."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: _Nothing() if name == "record_event" else True

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


if __name__ == "__main__":
    sys.exit(main())

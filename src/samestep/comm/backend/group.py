"""The process group of the backend "samestep"."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from samestep.comm.backend import calls, progress
from samestep.comm.backend.calls import Call
from samestep.comm.backend.control import GlooControl
from samestep.comm.backend.forms import listed, nested, options
from samestep.comm.backend.work import BackendWork
from samestep.comm.ops import Reduction
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.errors import BackendError, DeadlineError

__all__ = ["SharedMemoryGroup"]

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")

# How often to look whether an asynchronous exchange has ended (2 us each, if it hasn't), before it is left to the
# progress thread, which takes 50 to 100 us to wake up.
_LOOKS = 32
# The numbers that DistributedDataParallel's join() sums in the forward pass are waited for in the backward one, by C++
# code that keeps no reference to the Python half of a work, and without it would wait for ever. So the group keeps the
# last works that are of no size.
_KEPT, _KEPT_BYTES = 64, 64
# The longest sleep in a wait with a timeout, in seconds.
_SLEEP_S = 0.1

# What torch 2.13 renamed.
_FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}

_warned: set[str] = set()

# Its annotations lack some of its methods and constructors.
_ProcessGroup: Any = dist.ProcessGroup


class SharedMemoryGroup(_ProcessGroup):
    """A process group that sends what its ranks exchange through memory that they share, if they are on one host.

    Collectives of dense tensors on the CPU go there. Messages between two ranks, sparse tensors, reductions that our
    communicators do not have, and groups whose ranks cannot share memory are served by Gloo, tensors on GPUs by NCCL.
    All of that is chosen alike on all ranks of a group.

    Its methods take what those of torch's class take, also in its shorter forms: `allreduce(tensor, op)`. A collective
    called with `asyncOp` returns at once; the exchange goes on in whatever calls this process makes next, in a wait, or
    in a thread of ours. A failed exchange raises, in `wait` and in futures, what `samestep.errors` says.
    """

    def __init__(self, given: Any, nccl_options: Any = None) -> None:
        """Join the ranks of a new group; torch.distributed calls it on all of them, with its extended arguments."""
        rank, size = given.group_rank, given.group_size
        super().__init__(rank, size)  # with a store it would not be of this class to C++
        self._given, self._nccl_options = given, nccl_options
        self._pid = os.getpid()
        gloo = dist.ProcessGroupGloo(given.store, rank, size, timeout=given.timeout)
        gloo._set_sequence_number_for_group()
        # torch's own group over the same backends. Called by way of `super()`, its methods could end up in ours.
        self._plain = _ProcessGroup(given.store, rank, size)
        self._add(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        self._works: deque[BackendWork] = deque()
        self._kept: deque[BackendWork] = deque(maxlen=_KEPT)
        self._settling = Lock()
        self._num_calls = 0
        made = ShmCommunicator.gather(GlooControl(gloo), timeout_s=given.timeout.total_seconds())
        self._comm = made if isinstance(made, ShmCommunicator) else None
        if not isinstance(made, ShmCommunicator):
            _warn(made.reason)
        progress.enter(self)

    # Collectives

    def allreduce(self, tensors: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts, tensors = options(c10d.AllreduceOptions, opts, *more), listed(tensors)
        reduction = self._reduction(opts, tensors)
        if reduction is None or len(tensors) != 1:
            return self._plainly("allreduce", tensors, tensors, opts)
        return self._run(calls.all_reduce(tensors[0], reduction), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = options(c10d.AllreduceCoalescedOptions, opts)
        reduction = self._reduction(opts, tensors)
        if reduction is None:
            return self._plainly("allreduce_coalesced", tensors, tensors, opts)
        return self._run(calls.all_reduce_coalesced(tensors, reduction), opts)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts, tensors = options(c10d.ReduceOptions, opts, *more), listed(tensors)
        reduction = self._reduction(opts, tensors)
        if reduction is None or len(tensors) != 1:
            return self._plainly("reduce", tensors, tensors, opts)
        return self._run(calls.reduce(tensors[0], reduction, opts.rootRank, self.rank()), opts)

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts, tensors = options(c10d.BroadcastOptions, opts, *more), listed(tensors)
        if not self._serves(tensors) or len(tensors) != 1:
            return self._plainly("broadcast", tensors, tensors, opts)
        return self._run(calls.broadcast(tensors[0], opts.rootRank), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options(c10d.AllgatherOptions, opts)
        outputs, inputs = nested(outputs, inputs), listed(inputs)
        if not self._serves(inputs) or len(inputs) != 1:
            return self._plainly("allgather", inputs, outputs, inputs, opts)
        self._expect_all("allgather", outputs[0])
        return self._run(calls.all_gather(outputs[0], inputs[0]), opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = options(c10d.AllgatherOptions, opts)
        if not self._serves([tensor]):
            return self._plainly("all_gather_single", [tensor], output, tensor, opts)
        return self._run(calls.all_gather_singles([output], [tensor]), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = options(c10d.AllgatherOptions, opts)
        if not self._serves(inputs):
            return self._plainly("allgather_coalesced", inputs, outputs, inputs, opts)
        self._expect_all("allgather_coalesced", outputs)
        return self._run(calls.all_gather_lists(outputs, inputs), opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = options(c10d.AllgatherOptions, opts)
        if not self._serves(inputs):
            return self._plainly("all_gather_single_coalesced", inputs, outputs, inputs, opts)
        return self._run(calls.all_gather_singles(outputs, inputs), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts = options(c10d.GatherOptions, opts, *more)
        outputs, inputs = nested(outputs, inputs), listed(inputs)
        if not self._serves(inputs) or len(inputs) != 1:
            return self._plainly("gather", inputs, outputs, inputs, opts)
        mine = outputs[0] if outputs else []
        self._expect_at_root("gather", mine, opts.rootRank)
        return self._run(calls.gather(mine, inputs[0], opts.rootRank, self.rank(), self.size()), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts = options(c10d.ScatterOptions, opts, *more)
        inputs, outputs = nested(inputs, outputs), listed(outputs)
        if not self._serves(outputs) or len(outputs) != 1:
            return self._plainly("scatter", outputs, outputs, inputs, opts)
        mine = inputs[0] if inputs else []
        self._expect_at_root("scatter", mine, opts.rootRank)
        return self._run(calls.scatter(outputs[0], mine, opts.rootRank, self.rank(), self.size()), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts = options(c10d.ReduceScatterOptions, opts, *more)
        inputs, outputs = nested(inputs, outputs), listed(outputs)
        reduction = self._reduction(opts, outputs)
        if reduction is None or len(outputs) != 1:
            return self._plainly("reduce_scatter", outputs, outputs, inputs, opts)
        self._expect_all("reduce_scatter", inputs[0])
        return self._run(calls.reduce_scatter(outputs[0], inputs[0], reduction, self.rank()), opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = options(c10d.ReduceScatterOptions, opts)
        reduction = self._reduction(opts, [tensor])
        if reduction is None:
            return self._plainly("reduce_scatter_single", [tensor], output, tensor, opts)
        return self._run(calls.reduce_scatter_singles([output], [tensor], reduction), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = options(c10d.ReduceScatterOptions, opts)
        reduction = self._reduction(opts, inputs)
        if reduction is None:
            return self._plainly("reduce_scatter_single_coalesced", inputs, outputs, inputs, opts)
        return self._run(calls.reduce_scatter_singles(outputs, inputs, reduction), opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = options(c10d.AllToAllOptions, opts)
        if not self._serves(inputs):
            return self._plainly("alltoall", inputs, outputs, inputs, opts)
        self._expect_all("alltoall", inputs)
        return self._run(calls.all_to_all(outputs, inputs), opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, receives: list[int], sends: list[int], opts: Any = None
    ) -> dist.Work:
        opts = options(c10d.AllToAllOptions, opts)
        if not self._serves([tensor]):
            return self._plainly("all_to_all_single", [tensor], output, tensor, receives, sends, opts)
        return self._run(calls.all_to_all_single(output, tensor, receives, sends, self.size()), opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = options(c10d.BarrierOptions, opts)
        if self._comm is None or (opts.device is not None and opts.device.type != "cpu"):
            if opts.device is not None:
                self._see_to(opts.device.type)
            return self._plainly("barrier", [], opts)
        return self._run(calls.barrier(), opts)

    # The names that these had before torch 2.13

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._plainly("send", tensors, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        return self._plainly("recv", tensors, tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._plainly("recv_anysource", tensors, tensors, tag)

    # What torch.distributed wants to know, and how it ends

    def getBackendName(self) -> str:  # noqa: N802 - C++ asks for it
        return "samestep"

    def get_group_store(self) -> Any:
        return self._given.store

    def _get_backend(self, device: torch.device) -> Any:
        self._see_to(device.type)
        return super()._get_backend(device)

    def _get_sequence_number_for_group(self) -> int:
        number: int = self._plain._get_sequence_number_for_group() + self._num_calls
        return number

    def shutdown(self) -> None:
        """Give back what the group holds; works under way fail."""
        if self._pid != os.getpid():
            return  # a forked process has its parent's group, which goes on there
        if self._comm is not None:
            self._comm.close()
            self.settle_all()
        self._kept.clear()
        progress.leave(self)
        self._plain.shutdown()

    def abort(self) -> None:
        self.shutdown()

    # Works under way

    @property
    def busy(self) -> bool:
        return bool(self._works)

    def attend(self, most_s: float) -> None:
        """Carry on, as the progress thread."""
        assert self._comm is not None
        self._comm.attend(most_s)
        while (work := self._next_over()) is not None:
            if work.has_futures:
                progress.step_aside()
            work.settle()

    def settle_all(self) -> None:
        """Complete the works whose exchanges have ended."""
        while (work := self._next_over()) is not None:
            work.settle()

    def _next_over(self) -> BackendWork | None:
        """Take the first of the works, if its exchanges have ended.

        It is settled outside of the lock: a callback may wait for the next one, which another thread can then settle.
        """
        if self._works:
            with self._settling:
                if self._works and self._works[0].is_over():
                    return self._works.popleft()
        return None

    def wait_within(self, work: BackendWork, timeout_s: float) -> None:
        assert self._comm is not None
        deadline = time.monotonic() + timeout_s
        while not work.settle():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"rank {self.rank()} of {self.size()}: wait() timed out after {timeout_s:g} s; the exchange goes "
                    "on, and may be waited for again"
                )
            self._comm.attend(min(left, _SLEEP_S))

    def _run(self, call: Call, opts: Any) -> dist.Work:
        if torch.is_inference_mode_enabled():  # memory is shared with code outside of it
            with torch.inference_mode(False), torch.no_grad():
                return self._run(call, opts)
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function(f"samestep:{call.name}"):
                return self._begin(call, opts)
        return self._begin(call, opts)

    def _begin(self, call: Call, opts: Any) -> dist.Work:
        assert self._comm is not None
        self._num_calls += 1
        started = [self._comm.start(op) for op in call.ops]
        work = BackendWork(self, started, call.results, call.finish)
        if not getattr(opts, "asyncOp", True):
            work.wait(opts.timeout)
            return work
        if sum(tensor.nbytes for tensor in call.results) <= _KEPT_BYTES:
            self._kept.append(work)
        for _ in range(_LOOKS):
            if work.settle():
                self.settle_all()
                return work
            os.sched_yield()
        self._works.append(work)
        progress.look_after(self)
        return work

    # Who serves what

    def _serves(self, tensors: Sequence[Tensor]) -> bool:
        return self._comm is not None and all(t.is_cpu and t.layout is torch.strided for t in tensors)

    def _reduction(self, opts: Any, tensors: Sequence[Tensor]) -> Reduction | None:
        return calls.reduction_of(opts.reduceOp, tensors) if tensors and self._serves(tensors) else None

    def _plainly(self, name: str, tensors: Sequence[Tensor], *args: Any) -> dist.Work:
        """Have the backend that torch has for these tensors serve a call."""
        for tensor in tensors:
            self._see_to(tensor.device.type)
        method = getattr(self._plain, name, None) or getattr(self._plain, _FORMER_NAMES[name])
        work: dist.Work = method(*args)
        return work

    def _see_to(self, device_type: str) -> None:
        """Have NCCL in this group from the first time on that a tensor on a GPU needs it."""
        if device_type != "cuda" or _CUDA in self._device_types:
            return
        if not dist.is_nccl_available():
            raise BackendError(f"rank {self.rank()}: tensors on GPUs need NCCL, which this build of torch lacks")
        made = isinstance(self._nccl_options, dist.ProcessGroupNCCL.Options)
        settings = self._nccl_options if made else dist.ProcessGroupNCCL.Options()
        settings._timeout = self._given.timeout
        with suppress(AttributeError):  # not in torch 2.6
            settings.global_ranks_in_group = self._given.global_ranks_in_group
        store = c10d.PrefixStore("cuda/", self._given.store)
        nccl = dist.ProcessGroupNCCL(store, self.rank(), self.size(), settings)
        nccl._set_sequence_number_for_group()
        name = self.group_name
        self._add(_CUDA, dist.ProcessGroup.BackendType.NCCL, nccl)
        self._set_group_name(name)

    def _add(self, device: torch.device, kind: Any, backend: Any) -> None:
        for group in (self, self._plain):
            group._register_backend(device, kind, backend)
            group._set_default_backend(kind)

    def _expect_all(self, name: str, given: Sequence[Any]) -> None:
        if len(given) != self.size():
            raise ValueError(
                f"rank {self.rank()}: {name}: expected a list for {self.size()} ranks, got one of {len(given)}"
            )

    def _expect_at_root(self, name: str, given: Sequence[Tensor], root: int) -> None:
        if self.rank() == root:
            self._expect_all(name, given)
        elif given:
            raise ValueError(f"rank {self.rank()}: {name}: only rank {root}, the root, gives a list of tensors")


def _warn(reason: str) -> None:
    """Say once in a process why groups go through Gloo."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f'backend "samestep": {reason}; what the ranks of this group exchange goes through Gloo instead of shared '
            "memory",
            stacklevel=4,
        )

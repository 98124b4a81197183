"""Communication hooks of ours: a bucket's average over a communicator, in full or in half precision.

They are called as torch's are, `hook(state, bucket)`. The state is what exchanges: a samestep Communicator, a
torch.distributed group, or None for the default group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samestep.comm.base import DoneWork, Work
from samestep.comm.ops import AllReduce
from samestep.comm.select import communicator_for
from samestep.parallel.hooks import GradBucket, Traits
from samestep.parallel.reduction import sum_sparse

__all__ = ["Averaged", "allreduce_hook", "average", "bf16_compress_hook", "fp16_compress_hook", "mark"]


class Averaged:
    """An average under way: `wait` returns it."""

    def __init__(self, work: Work, finish: Callable[[], Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        self._work.wait()
        return self._finish()


def allreduce_hook(state: object, bucket: GradBucket) -> Averaged:
    """Average in the gradients' own dtype; what happens without a hook, to the bit."""
    return average(state, bucket)


def fp16_compress_hook(state: object, bucket: GradBucket) -> Averaged:
    """Average in float16: half of what float32 takes, rounded before and after.

    As `fp16_compress_hook` in torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py.
    """
    return average(state, bucket, torch.float16)


def bf16_compress_hook(state: object, bucket: GradBucket) -> Averaged:
    """Average in bfloat16: half of what float32 takes, with its range."""
    return average(state, bucket, torch.bfloat16)


def average(
    state: object, bucket: GradBucket, dtype: torch.dtype | None = None, *, divide_first: bool = True
) -> Averaged:
    """Average `bucket` in `dtype` (None: its own) over the ranks that `state` names.

    Dividing first keeps float16 from overflowing; torch's mixed precision divides after.
    Raises TypeError for complex gradients that were to travel in a real dtype.
    """
    communicator, buffer = communicator_for(state), bucket.buffer()
    if dtype is not None and buffer.is_complex() and not dtype.is_complex:
        raise TypeError(f"rank {communicator.rank}: complex gradients can't be averaged in {dtype}; use allreduce_hook")
    factor = 1.0 / communicator.size
    if buffer.is_sparse:  # rows travel in `dtype` and are added in their own
        total = sum_sparse(communicator, buffer * factor if divide_first else buffer, dtype)
        return Averaged(DoneWork(), lambda: total if divide_first else total * factor)
    cast = buffer if dtype is None else buffer.to(dtype)
    if divide_first:
        cast.mul_(factor)
    work = communicator.start(AllReduce(cast))
    return Averaged(work, lambda: cast if divide_first else cast.mul_(factor))


def mark(hook: Callable[..., object]) -> None:
    """Let it be known of `hook`, a function, that it averages over all ranks, in one exchange."""
    hook.traits = Traits(averages=True, at_once=True)  # type: ignore[attr-defined]


for _hook in (allreduce_hook, fp16_compress_hook, bf16_compress_hook):
    mark(_hook)

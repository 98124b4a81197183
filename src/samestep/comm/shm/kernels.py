"""The compiled loops over shared memory, where they could be built: see `_kernels.c`. Nothing depends on them.

What they gain is measured by `benchmarks/allreduce.py`, which has both ways side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.comm.ops import AllReduce, Reduction
from samestep.comm.shm.board import BOARD_BYTES, COUNTER, DOZING, SLEEPING, STATE, State
from samestep.comm.shm.room import NUM_SLOTS

_MOST_RANKS = 256

try:
    from samestep.comm.shm import _kernels
except ImportError:  # no compiler when the package was built, or another system than Linux
    VERSION = 0
else:
    VERSION = _kernels.VERSION
    gather, reduce_all, stream = _kernels.gather, _kernels.reduce_all, _kernels.stream
    assert _kernels.LAYOUT == (COUNTER, SLEEPING, DOZING, STATE, State.CLOSED, BOARD_BYTES, NUM_SLOTS, _MOST_RANKS)

__all__ = ["VERSION", "divisor_of", "gather", "gathers", "reduce_all", "serve", "stream", "version_for"]

_DTYPES = frozenset({torch.float32, torch.float64})


def version_for(size: int) -> int:
    """Return the version of the loops that `size` ranks could use; 0 if there are none."""
    return VERSION if size <= _MOST_RANKS else 0


def gathers(tensor: Tensor) -> bool:
    """Tell whether `gather` can copy to `tensor`."""
    return VERSION > 0 and tensor.is_cpu and tensor.dtype in _DTYPES


def serve(op: AllReduce) -> bool:
    """Tell whether the loops can do `op`: a sum or mean of float32 or float64."""
    return op.tensor.dtype in _DTYPES and op.reduction in (Reduction.SUM, Reduction.MEAN)


def divisor_of(op: AllReduce, size: int) -> int:
    return size if op.reduction is Reduction.MEAN else 1

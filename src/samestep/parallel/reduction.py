"""How a bucket is summed over the ranks: each policy is one function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import AllReduce

__all__ = ["Exchange", "plain_sum", "sum_sparse"]

Exchange = Callable[[Communicator, Tensor], Work]
"""Starts summing a flat tensor over the ranks, in place."""


def plain_sum(communicator: Communicator, flat: Tensor) -> Work:
    """Sum with the transport's own all-reduce: fast, equal on all ranks, in an order that depends on their number."""
    return communicator.start(AllReduce(flat))


def sum_sparse(communicator: Communicator, gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the coalesced sum of the ranks' sparse COO `gradient`s, added in rank order.

    Each rank sends its rows to all others, as `dtype` (None: as they are): right for gradients of which few rows are
    there.
    """
    gradient = gradient.coalesce()
    indices = communicator.all_gather_uneven(gradient.indices().t().contiguous())
    values = torch.cat(communicator.all_gather_uneven(gradient.values().to(dtype or gradient.dtype)))
    values = values.to(gradient.dtype)
    total = torch.sparse_coo_tensor(torch.cat(indices).t(), values, gradient.shape, check_invariants=False)
    return total.coalesce()

"""Adds, or otherwise reduces, what the ranks have shown: in rank order, so that every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.comm.ops import Reduction

__all__ = ["reduce_into"]

_HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
_ROUNDING = frozenset({Reduction.SUM, Reduction.MEAN, Reduction.PRODUCT})

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.MEAN: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BIT_AND: torch.bitwise_and,
    Reduction.BIT_OR: torch.bitwise_or,
    Reduction.BIT_XOR: torch.bitwise_xor,
}


def reduce_into(out: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
    """Reduce `parts`, in their order, into `out`, which may be one of the first two of them, or none.

    Half types are reduced in float32 and rounded once.
    """
    combine = _COMBINE[reduction]
    first, *others = parts
    if out.dtype in _HALF_TYPES and reduction in _ROUNDING:
        wide = first.to(torch.float32)
        for part in others:
            combine(wide, part, out=wide)
        out.copy_(wide.div_(len(parts)) if reduction is Reduction.MEAN else wide)
        return
    if not others:
        if out is not first:
            out.copy_(first)
        return
    combine(first, others[0], out=out)
    for part in others[1:]:
        combine(out, part, out=out)
    if reduction is Reduction.MEAN:  # complex numbers part by part: their own division rounds more than once
        (torch.view_as_real(out) if out.is_complex() else out).div_(len(parts))

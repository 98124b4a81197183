"""Numbers for conformance checks: every rank can tell every other's, and what an exchange has to make of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from samestep.comm.base import Communicator
from samestep.comm.ops import Reduction

__all__ = ["DTYPES", "expect", "is_defined", "name", "refused", "sample", "samples", "total"]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, torch.bool)

_DEFINED: dict[Reduction, tuple[torch.dtype, ...]] = {
    Reduction.SUM: (*INTEGERS, *FLOATS, *COMPLEX),
    Reduction.MEAN: (*FLOATS, *COMPLEX),
    Reduction.MIN: (*INTEGERS, *FLOATS, torch.bool),
    Reduction.MAX: (*INTEGERS, *FLOATS, torch.bool),
    Reduction.PRODUCT: (*INTEGERS, *FLOATS),
    Reduction.BIT_AND: (*INTEGERS, torch.bool),
    Reduction.BIT_OR: (*INTEGERS, torch.bool),
    Reduction.BIT_XOR: (*INTEGERS, torch.bool),
}

_BITWISE = {
    Reduction.BIT_AND: torch.bitwise_and,
    Reduction.BIT_OR: torch.bitwise_or,
    Reduction.BIT_XOR: torch.bitwise_xor,
}


def is_defined(reduction: Reduction, dtype: torch.dtype) -> bool:
    """Tell whether numbers of `dtype` can be reduced in that way."""
    return dtype in _DEFINED[reduction]


def sample(comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None = None) -> Tensor:
    """Return rank `rank`'s numbers (None: this rank's): different on every rank, and so small that sums are exact."""
    count = torch.Size(shape).numel()
    places = torch.arange(count, dtype=torch.int64, device=comm.device)
    numbers = (places * 2 + 3 * (comm.rank if rank is None else rank)) % 5
    if dtype is torch.bool:
        numbers = numbers % 2
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers + places % 3).double()).to(dtype).view(shape)
    return numbers.to(dtype).view(shape)


def samples(comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return all ranks' numbers, [size, *shape]."""
    return torch.stack([sample(comm, shape, dtype, rank) for rank in range(comm.size)])


def total(parts: Tensor, reduction: Reduction) -> Tensor:
    """Reduce [size, ...] over its first dimension, in the widest dtype of its kind, rounded once at the end."""
    if reduction in _BITWISE:
        return reduce(_BITWISE[reduction], parts.unbind())
    wide = parts.to(_wide(parts.dtype))
    match reduction:
        case Reduction.SUM:
            result = wide.sum(0)
        case Reduction.MEAN:
            result = wide.sum(0) / len(parts)
        case Reduction.MIN:
            result = wide.amin(0)
        case Reduction.MAX:
            result = wide.amax(0)
        case _:
            result = wide.prod(0)
    return result.to(parts.dtype)


def expect(comm: Communicator, what: str, got: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless `got` has the shape, the dtype and the bits of `expected`."""
    if got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(got, expected):
        return
    raise AssertionError(
        f"rank {comm.rank} of {comm.size}, {what}: expected {name(expected)} {expected.flatten()[:20].tolist()}, "
        f"got {name(got)} {got.flatten()[:20].tolist()}"
    )


def refused(comm: Communicator, what: str, call: Callable[[], object], *kinds: type[Exception]) -> str:
    """Return the message of the error, one of `kinds`, that `call` raises; raise AssertionError if it doesn't."""
    try:
        call()
    except kinds as error:
        return str(error)
    names = " or ".join(kind.__name__ for kind in kinds)
    raise AssertionError(f"rank {comm.rank} of {comm.size}, {what}: expected {names}, but nothing was raised")


def name(tensor: Tensor) -> str:
    """Return dtype and shape: `float32[3, 4]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64

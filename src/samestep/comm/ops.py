"""What ranks can ask of a communicator: small frozen requests, checked here once for every transport.

A request holds the tensors it reads and writes. The tensors belong to the transport from `Communicator.start` until
`Work.wait` has returned: neither read a result nor change an input in between.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Broadcast",
    "Op",
    "Recv",
    "ReduceScatter",
    "Reduction",
    "Send",
    "check",
    "describe",
    "detached",
    "signature",
]


class Reduction(enum.Enum):
    """How the ranks' numbers become one. Mean is the sum divided by the number of ranks."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BIT_AND = "bit_and"
    BIT_OR = "bit_or"
    BIT_XOR = "bit_xor"


# Gloo takes 31 bits; transports keep the upper half of them to themselves.
_NUM_TAGS = 2**30

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_REDUCIBLE = {
    Reduction.SUM: _INTEGERS | _FLOATS | _COMPLEX,
    Reduction.MEAN: _FLOATS | _COMPLEX,
    Reduction.MIN: _INTEGERS | _FLOATS | {torch.bool},
    Reduction.MAX: _INTEGERS | _FLOATS | {torch.bool},
    Reduction.PRODUCT: _INTEGERS | _FLOATS,
    Reduction.BIT_AND: _INTEGERS | {torch.bool},
    Reduction.BIT_OR: _INTEGERS | {torch.bool},
    Reduction.BIT_XOR: _INTEGERS | {torch.bool},
}


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Reduce `tensor` over all ranks, element by element, in place; every rank gets the same bits.

    Before that each rank multiplies its numbers by its own `scale` (floats and complex numbers only). What `purpose`
    says as text, if it is given, is told where ranks ask for different exchanges.
    """

    tensor: Tensor
    reduction: Reduction = Reduction.SUM
    scale: float = 1.0
    purpose: object = None


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Copy `tensor` of rank `source` into every rank's `tensor`."""

    tensor: Tensor
    source: int = 0


@dataclass(frozen=True, eq=False)
class AllGather:
    """Lay the ranks' `tensor`s one after the other, in rank order, into `output` (size x numel elements)."""

    output: Tensor
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class ReduceScatter:
    """Reduce `tensor` (size x numel elements of output) over all ranks; rank r keeps the r-th part, in `output`."""

    output: Tensor
    tensor: Tensor
    reduction: Reduction = Reduction.SUM


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send consecutive parts of `tensor` to the ranks in order; receive theirs, in rank order, in `output`.

    Both are flat; the splits count elements and add up to their lengths.
    """

    output: Tensor
    tensor: Tensor
    output_splits: tuple[int, ...]
    input_splits: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Send:
    """Send `tensor` to rank `peer`, where a `Recv` of the same shape, dtype and tag waits for it.

    Tags run from 0 to 2**30 - 1.
    """

    tensor: Tensor
    peer: int
    tag: int = 0


@dataclass(frozen=True, eq=False)
class Recv:
    """Receive into `tensor` what rank `peer` sends with the same tag."""

    tensor: Tensor
    peer: int
    tag: int = 0


@dataclass(frozen=True, eq=False)
class Barrier:
    """Wait until every rank has come here."""


Op = AllReduce | Broadcast | AllGather | ReduceScatter | AllToAll | Send | Recv | Barrier

_NAMES: dict[type, str] = {
    AllReduce: "all_reduce",
    Broadcast: "broadcast",
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
    Send: "send",
    Recv: "recv",
    Barrier: "barrier",
}


def describe(op: Op) -> str:
    """Say in a few words what `op` is: `all_reduce(sum) of float32[3, 4]`, and what it is for."""
    purpose = getattr(op, "purpose", None)
    return _kind(op) if purpose is None else f"{_kind(op)} ({purpose})"


def _kind(op: Op) -> str:
    text = _NAMES[type(op)]
    match op:
        case AllReduce(reduction=reduction) | ReduceScatter(reduction=reduction):
            text += f"({reduction.value})"
        case Broadcast(source=source):
            text += f"(source={source})"
        case Send(peer=peer, tag=tag) | Recv(peer=peer, tag=tag):
            text += f"(peer={peer}, tag={tag})"
        case AllToAll(output_splits=receives, input_splits=sends):
            text += f"(sends={list(sends)}, receives={list(receives)})"
        case _:
            pass
    if isinstance(op, Barrier):
        return text
    return f"{text} of {_name(op.tensor.dtype)}{list(op.tensor.shape)}"


def signature(op: Op) -> str:
    """Return what must be equal on every rank for `op` to be one exchange (all_to_all's lengths may differ)."""
    if isinstance(op, AllToAll):
        return f"all_to_all of {_name(op.tensor.dtype)}"
    return _kind(op)


def detached(op: Op) -> Op:
    """Return `op` on the same memory, with tensors that autograd does not follow."""
    followed = [(name, tensor) for name, tensor in _tensors(op) if tensor.requires_grad]
    return replace(op, **{name: tensor.detach() for name, tensor in followed}) if followed else op  # type: ignore[arg-type]


def check(op: Op, rank: int, size: int) -> None:
    """Raise ValueError or TypeError, naming `rank`, if no transport over `size` ranks could serve its `op`."""
    try:
        _check(op, size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"rank {rank}: {error}") from None


def _check(op: Op, size: int) -> None:
    if type(op) not in _NAMES:
        raise TypeError(f"expected one of {', '.join(c.__name__ for c in _NAMES)}, got {type(op).__name__}")
    for name, tensor in _tensors(op):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAMES[type(op)]}: expected a tensor as {name}, got {type(tensor).__name__}")
    for name, kind in _SETTINGS[type(op)]:
        value = getattr(op, name)
        if not isinstance(value, kind):
            raise TypeError(f"{_NAMES[type(op)]}: expected {_article(kind)} as {name}, got {value!r}")
    for name, tensor in _tensors(op):
        if tensor.layout is not torch.strided:
            raise ValueError(f"{describe(op)}: {name} is {tensor.layout}, only dense tensors can be exchanged")
        if not tensor.is_contiguous():
            raise ValueError(f"{describe(op)}: {name} is not contiguous (strides {tensor.stride()})")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{describe(op)}: {name} is a lazy view; use its resolve_conj() and resolve_neg()")
    match op:
        case Broadcast(source=peer) | Send(peer=peer) | Recv(peer=peer):
            if not 0 <= peer < size:
                raise ValueError(f"{describe(op)}: rank {peer} is not among the {size} ranks 0 to {size - 1}")
            if not (isinstance(op, Broadcast) or 0 <= op.tag < _NUM_TAGS):
                raise ValueError(f"{describe(op)}: expected a tag from 0 to {_NUM_TAGS - 1}")
        case AllReduce(tensor=tensor, reduction=reduction, scale=scale):
            _check_reduction(op, tensor.dtype, reduction)
            if scale != 1.0 and not (tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError(f"{describe(op)}: a scale ({scale:g}) is not defined for {_name(tensor.dtype)}")
        case ReduceScatter(output=output, tensor=tensor, reduction=reduction):
            _check_reduction(op, tensor.dtype, reduction)
            _check_sizes(op, whole=tensor, part=output, size=size)
        case AllGather(output=output, tensor=tensor):
            _check_sizes(op, whole=output, part=tensor, size=size)
        case AllToAll():
            _check_splits(op, size)
        case _:
            pass


_KINDS: dict[str, type] = {"reduction": Reduction, "scale": float, "source": int, "peer": int, "tag": int}
_FIELDS = {kind: [f.name for f in fields(kind)] for kind in _NAMES}
_SETTINGS = {kind: [(name, _KINDS[name]) for name in names if name in _KINDS] for kind, names in _FIELDS.items()}
_TENSORS = {kind: [name for name in names if name in ("tensor", "output")] for kind, names in _FIELDS.items()}


def _article(kind: type) -> str:
    return {int: "an integer", float: "a float"}.get(kind, f"a {kind.__name__}, such as {kind.__name__}.SUM,")


def _tensors(op: Op) -> list[tuple[str, Tensor]]:
    return [(name, getattr(op, name)) for name in _TENSORS[type(op)]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_reduction(op: Op, dtype: torch.dtype, reduction: Reduction) -> None:
    allowed = _REDUCIBLE[reduction]
    if dtype not in allowed:
        names = ", ".join(sorted(map(_name, allowed)))
        raise ValueError(f"{describe(op)}: {reduction.value} is not defined for {_name(dtype)}, only for {names}")


def _check_sizes(op: AllGather | ReduceScatter, *, whole: Tensor, part: Tensor, size: int) -> None:
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{describe(op)}: expected {size} x {part.numel()} elements of {_name(part.dtype)} on the long side, "
            f"got {whole.numel()} of {_name(whole.dtype)}"
        )


def _check_splits(op: AllToAll, size: int) -> None:
    for name, tensor, splits in (
        ("tensor", op.tensor, op.input_splits),
        ("output", op.output, op.output_splits),
    ):
        if tensor.dim() != 1:
            raise ValueError(f"{describe(op)}: expected a flat {name}, got the shape {list(tensor.shape)}")
        if len(splits) != size or min(splits, default=0) < 0 or sum(splits) != tensor.numel():
            raise ValueError(
                f"{describe(op)}: {name} has {tensor.numel()} elements; its splits {list(splits)} must be "
                f"{size} lengths that add up to that"
            )
    if op.tensor.dtype != op.output.dtype:
        raise ValueError(f"{describe(op)}: output is {_name(op.output.dtype)}")

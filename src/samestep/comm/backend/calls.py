"""What a call of torch.distributed comes to: exchanges, and where their results belong.

Each function takes what a process group's method of the same meaning takes, and returns a `Call`. Tensors that are not
contiguous, or that only code under `torch.inference_mode` may change, are replaced by others, from which the result is
copied when the exchange has ended, by whichever thread sees that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.memory import contiguous
from samestep.comm.ops import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Op, ReduceScatter, Reduction, check

__all__ = [
    "Call",
    "all_gather",
    "all_gather_lists",
    "all_gather_singles",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_singles",
    "reduction_of",
    "scatter",
]


class Call(NamedTuple):
    """The exchanges of a call, in order; what is to be done once they have ended; the tensors that have the result."""

    ops: tuple[Op, ...]
    results: list[Tensor]
    finish: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """How profilers know it, by torch's names of collectives."""
        return _NAMES[type(self.ops[0])] if self.ops else "nothing"


_NAMES: dict[type, str] = {
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    AllToAll: "all_to_all",
    Barrier: "barrier",
    Broadcast: "broadcast",
    ReduceScatter: "reduce_scatter",
}


_REDUCTIONS = {
    dist.ReduceOp.SUM: Reduction.SUM,
    dist.ReduceOp.AVG: Reduction.MEAN,
    dist.ReduceOp.MIN: Reduction.MIN,
    dist.ReduceOp.MAX: Reduction.MAX,
    dist.ReduceOp.PRODUCT: Reduction.PRODUCT,
    dist.ReduceOp.BAND: Reduction.BIT_AND,
    dist.ReduceOp.BOR: Reduction.BIT_OR,
    dist.ReduceOp.BXOR: Reduction.BIT_XOR,
}


def reduction_of(how: Any, tensors: Sequence[Tensor]) -> Reduction | None:
    """Return our name of a reduction, if it is one that we have for the tensors' dtypes."""
    reduction = _REDUCTIONS.get(how.op)
    if reduction is None or not all(_is_defined(reduction, tensor.dtype) for tensor in tensors):
        return None
    return reduction


def all_reduce(tensor: Tensor, reduction: Reduction) -> Call:
    dense = _dense(tensor)
    return Call((AllReduce(dense, reduction),), [tensor], _back(dense, tensor))


def all_reduce_coalesced(tensors: Sequence[Tensor], reduction: Reduction) -> Call:
    """One exchange for all tensors of a dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    flats = [(_joined(group), group) for group in groups.values()]

    def finish() -> None:
        for flat, group in flats:
            _part(flat, group)

    return Call(tuple(AllReduce(flat, reduction) for flat, _ in flats), list(tensors), finish)


def reduce(tensor: Tensor, reduction: Reduction, root: int, rank: int) -> Call:
    """All ranks get the result; only the root keeps it."""
    if rank == root:
        return all_reduce(tensor, reduction)
    return Call((AllReduce(_staged(tensor), reduction),), [tensor])


def broadcast(tensor: Tensor, root: int) -> Call:
    dense = _dense(tensor)
    return Call((Broadcast(dense, root),), [tensor], _back(dense, tensor))


def all_gather(outputs: Sequence[Tensor], tensor: Tensor) -> Call:
    """`outputs[r]` takes rank r's tensor; all are of one shape."""
    _expect_alike("all_gather", outputs, tensor)
    op, finish = _gathering(outputs, tensor)
    return Call((op,), list(outputs), finish)


def all_gather_lists(outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> Call:
    """`outputs[r][i]` takes rank r's tensor i; tensors may differ in shape and dtype."""
    for of_rank in outputs:
        if len(of_rank) != len(tensors):
            raise ValueError(f"all_gather: expected {len(tensors)} tensors from each rank, got {len(of_rank)}")
    columns = [[of_rank[i] for of_rank in outputs] for i in range(len(tensors))]
    for column, tensor in zip(columns, tensors, strict=True):
        _expect_alike("all_gather", column, tensor)
    steps = [_gathering(column, tensor) for column, tensor in zip(columns, tensors, strict=True)]
    return Call(tuple(op for op, _ in steps), [t for row in outputs for t in row], _all(f for _, f in steps))


def all_gather_singles(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Call:
    """`outputs[i]` takes all ranks' tensors i, one after the other."""
    dense = [_dense(output) for output in outputs]
    ops = tuple(AllGather(output, contiguous(tensor)) for output, tensor in zip(dense, tensors, strict=True))
    return Call(ops, list(outputs), _all(_back(d, o) for d, o in zip(dense, outputs, strict=True)))


def gather(outputs: Sequence[Tensor], tensor: Tensor, root: int, rank: int, size: int) -> Call:
    """The root's `outputs[r]` takes rank r's tensor; other ranks have none."""
    flat = contiguous(tensor).view(-1)
    sends = _only(root, flat.numel(), size)
    if rank != root:
        return Call((AllToAll(_empty(0, tensor), flat, (0,) * size, sends),), [])
    _expect_alike("gather", outputs, tensor)
    received = _empty(size * flat.numel(), tensor)
    op = AllToAll(received, flat, (flat.numel(),) * size, sends)
    return Call((op,), list(outputs), functools.partial(_part, received, outputs))


def scatter(output: Tensor, tensors: Sequence[Tensor], root: int, rank: int, size: int) -> Call:
    """The root's `tensors[r]` goes to rank r's output; other ranks have none."""
    dense = _dense(output)
    flat, receives = dense.view(-1), _only(root, dense.numel(), size)
    if rank == root:
        _expect_alike("scatter", tensors, output)
        op = AllToAll(flat, _joined(tensors), receives, (flat.numel(),) * size)
    else:
        op = AllToAll(flat, _empty(0, output), receives, (0,) * size)
    return Call((op,), [output], _back(dense, output))


def reduce_scatter(output: Tensor, tensors: Sequence[Tensor], reduction: Reduction, rank: int) -> Call:
    """Rank r gets the sum of all ranks' `tensors[r]`, which may be of other lengths than other ranks' parts."""
    if len({t.numel() for t in tensors}) == 1:
        return reduce_scatter_singles([output], [_joined(tensors)], reduction)
    flat, start = _joined(tensors), sum(t.numel() for t in tensors[:rank])
    part = flat[start : start + tensors[rank].numel()]
    if part.numel() != output.numel():
        raise ValueError(f"reduce_scatter: expected an output of {part.numel()} elements, got {list(output.shape)}")
    return Call((AllReduce(flat, reduction),), [output], functools.partial(_part, part, [output]))


def reduce_scatter_singles(outputs: Sequence[Tensor], tensors: Sequence[Tensor], reduction: Reduction) -> Call:
    """Rank r gets the r-th part of the sum of all ranks' `tensors[i]` in `outputs[i]`."""
    dense = [_dense(output) for output in outputs]
    ops = tuple(ReduceScatter(d, contiguous(t), reduction) for d, t in zip(dense, tensors, strict=True))
    return Call(ops, list(outputs), _all(_back(d, o) for d, o in zip(dense, outputs, strict=True)))


def all_to_all(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Call:
    """`tensors[r]` goes to rank r, `outputs[r]` takes what comes from there; all may differ in shape."""
    sent, received = _joined(tensors), _empty(sum(o.numel() for o in outputs), tensors[0])
    op = AllToAll(received, sent, tuple(o.numel() for o in outputs), tuple(t.numel() for t in tensors))
    return Call((op,), list(outputs), functools.partial(_part, received, outputs))


def all_to_all_single(output: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int], size: int) -> Call:
    """Rows of `tensor` go to the ranks in order, as many to each as `sends` says; if it is empty, equally many."""
    dense = _dense(output)
    splits = _elements("output", output, receives, size), _elements("input", tensor, sends, size)
    op = AllToAll(dense.view(-1), contiguous(tensor).view(-1), *splits)
    return Call((op,), [output], _back(dense, output))


def barrier() -> Call:
    return Call((Barrier(),), [])


@functools.cache
def _is_defined(reduction: Reduction, dtype: torch.dtype) -> bool:
    try:
        check(AllReduce(torch.empty(1, dtype=dtype, device="cpu"), reduction), 0, 1)
    except ValueError:
        return False
    return True


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor itself if an exchange may work on it, in whatever thread; else one of the same contents."""
    if tensor.is_contiguous() and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg()):
        return tensor
    return _staged(tensor)


def _staged(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _empty(tensor.numel(), tensor).view(tensor.shape).copy_(tensor)


def _empty(count: int, like: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(count, dtype=like.dtype, device="cpu")


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors' elements one after the other, copied."""
    with torch.inference_mode(False), torch.no_grad():
        flat = _empty(sum(t.numel() for t in tensors), tensors[0])
        for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor)
    return flat


def _part(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive parts of `flat` to the tensors that they are for."""
    for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        _write(tensor, part.view(tensor.shape))


def _write(tensor: Tensor, values: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)


def _back(dense: Tensor, tensor: Tensor) -> Callable[[], None] | None:
    return None if dense is tensor else functools.partial(_write, tensor, dense)


def _all(steps: Iterable[Callable[[], None] | None]) -> Callable[[], None] | None:
    needed = [step for step in steps if step is not None]
    if not needed:
        return None

    def finish() -> None:
        for step in needed:
            step()

    return finish


def _gathering(outputs: Sequence[Tensor], tensor: Tensor) -> tuple[Op, Callable[[], None]]:
    received = _empty(len(outputs) * tensor.numel(), tensor)
    return AllGather(received, contiguous(tensor)), functools.partial(_part, received, outputs)


def _only(root: int, count: int, size: int) -> tuple[int, ...]:
    return tuple(count if rank == root else 0 for rank in range(size))


def _expect_alike(name: str, tensors: Sequence[Tensor], one: Tensor) -> None:
    for tensor in tensors:
        if tensor.numel() != one.numel() or tensor.dtype != one.dtype:
            raise ValueError(
                f"{name}: expected tensors like {one.dtype} {list(one.shape)} from or for every rank, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )


def _elements(name: str, tensor: Tensor, rows: Sequence[int], size: int) -> tuple[int, ...]:
    """Return how many elements go to or come from each rank."""
    length = len(tensor) if tensor.dim() else 1
    if not rows:
        if length % size:
            raise ValueError(
                f"all_to_all_single: expected an {name} whose first dimension is divisible by {size} ranks, got "
                f"{list(tensor.shape)}"
            )
        return (tensor.numel() // size,) * size
    if len(rows) != size or sum(rows) != length:
        raise ValueError(
            f"all_to_all_single: expected {size} {name} splits that add up to {length} rows, got {list(rows)}"
        )
    row = tensor.numel() // length if length else 0
    return tuple(n * row for n in rows)

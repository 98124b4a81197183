"""What a right communicator does with tensors: one function for each promise, run by all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from samestep.comm.base import Communicator
from samestep.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, Reduction
from samestep.testing.samples import DTYPES, expect, is_defined, name, refused, sample, samples, total

__all__ = ["PROMISES"]

_KINDS = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def all_reduce_takes_every_dtype(comm: Communicator) -> None:
    for reduction, dtype in _defined():
        parts = _exact(samples(comm, (3, 5), dtype), reduction)
        tensor = parts[comm.rank].clone()
        what = f"all_reduce({reduction.value}) of {name(tensor)}"
        result = comm.all_reduce(tensor, reduction)
        expect(comm, what, result, total(parts, reduction))
        _same(comm, what, result, tensor)


def each_rank_scales_its_own_numbers(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        parts = torch.stack([part * 2.0**rank for rank, part in enumerate(samples(comm, (3, 5), dtype))])
        tensor = sample(comm, (3, 5), dtype)
        comm.start(AllReduce(tensor, scale=2.0**comm.rank)).wait()
        expect(comm, f"all_reduce(sum) of scaled {name(tensor)}", tensor, total(parts, Reduction.SUM))
    whole = sample(comm, (3,), torch.int16)
    refused(comm, "a scale of int16", partial(comm.start, AllReduce(whole, scale=0.5)), ValueError)
    expect(comm, "a tensor with a refused scale", whole, sample(comm, (3,), torch.int16))


def reduce_scatter_gives_each_rank_its_rows(comm: Communicator) -> None:
    for reduction, dtype in _defined():
        for rows in (0, 1, 3):
            parts = _exact(samples(comm, (comm.size * rows, 5), dtype), reduction)
            mine = parts[comm.rank].clone()
            what = f"reduce_scatter({reduction.value}) of {name(mine)}"
            result = comm.reduce_scatter(mine, reduction)
            expect(comm, what, result, total(parts, reduction)[comm.rank * rows : (comm.rank + 1) * rows])
            expect(comm, f"the input of {what}", mine, parts[comm.rank])


def undefined_reductions_are_refused(comm: Communicator) -> None:
    for reduction in Reduction:
        for dtype in DTYPES:
            if not is_defined(reduction, dtype):
                tensor = sample(comm, (comm.size,), dtype)
                for op in (AllReduce(tensor, reduction), ReduceScatter(tensor[:1], tensor, reduction)):
                    refused(comm, f"{reduction.value} of {name(tensor)}", partial(comm.start, op), ValueError)
                expect(comm, f"a refused {reduction.value}", tensor, sample(comm, (comm.size,), dtype))


def broadcast_copies_from_every_source(comm: Communicator) -> None:
    for source in range(comm.size):
        for dtype in DTYPES:
            for shape in ((3, 5), (), (0,), (2, 0)):
                tensor = sample(comm, shape, dtype)
                what = f"broadcast(source={source}) of {name(tensor)}"
                result = comm.broadcast(tensor, source)
                expect(comm, what, result, sample(comm, shape, dtype, source))
                _same(comm, what, result, tensor)


def all_gather_stacks_in_rank_order(comm: Communicator) -> None:
    for dtype in DTYPES:
        for shape in ((3, 5), (), (1,), (0,), (2, 0)):
            tensor = sample(comm, shape, dtype)
            expect(comm, f"all_gather of {name(tensor)}", comm.all_gather(tensor), samples(comm, shape, dtype))
            expect(comm, f"the input of all_gather of {name(tensor)}", tensor, sample(comm, shape, dtype))


def all_gather_takes_uneven_lengths(comm: Communicator) -> None:
    last = comm.size - 1
    lengths: tuple[Callable[[int], int], ...] = (
        lambda r: r,
        lambda r: last - r,
        lambda r: 7 * (r == last),
        lambda _: 0,
    )
    for dtype in _KINDS:
        for rest in ((), (3,), (0,)):
            for length in lengths:
                mine = sample(comm, (length(comm.rank), *rest), dtype)
                parts = comm.all_gather_uneven(mine)
                what = f"all_gather_uneven of {name(mine)}"
                _count(comm, what, parts)
                for rank, part in enumerate(parts):
                    theirs = sample(comm, (length(rank), *rest), dtype, rank)
                    expect(comm, f"{what}, part {rank}", part, theirs)


def all_to_all_delivers_every_part(comm: Communicator) -> None:
    tables: tuple[Callable[[int, int], int], ...] = (
        lambda source, target: 2,
        lambda source, target: (source + 2 * target) % 4,
        lambda source, target: 5 * (source == comm.size - 1),
        lambda source, target: 3 * (source == target),
        lambda source, target: 0,
    )
    for rows, dtype, rest in product(tables, DTYPES, ((), (3,))):

        def message(source: int, target: int) -> Tensor:
            shape = (rows(source, target), *rest)  # noqa: B023 - called in this turn of the loop only
            return sample(comm, shape, dtype, source + 2 * target)  # noqa: B023

        sent = [message(comm.rank, target) for target in range(comm.size)]
        got = comm.all_to_all(sent)
        what = f"all_to_all of {[name(t) for t in sent]}"
        _count(comm, what, got)
        for source, part in enumerate(got):
            expect(comm, f"{what}, part {source}", part, message(source, comm.rank))


def every_size_is_served(comm: Communicator) -> None:
    sizes = [*range(2 * comm.size + 2), 1009, 300_007]
    for shape in ((), (3, 0), *((n,) for n in sizes)):
        for dtype in (torch.float32, torch.bool):
            reduction = Reduction.MAX if dtype is torch.bool else Reduction.SUM
            tensor = sample(comm, shape, dtype)
            what = f"all_reduce({reduction.value}) of {name(tensor)}"
            expect(comm, what, comm.all_reduce(tensor, reduction), total(samples(comm, shape, dtype), reduction))


def inputs_have_any_strides(comm: Communicator) -> None:
    for dtype in _KINDS:
        parts = samples(comm, (comm.size, 6), dtype)
        for label, laid_out in _LAYOUTS.items():
            mine, whole = laid_out(parts[comm.rank])
            before = whole.clone()
            what = f"of {label} {name(mine)}"
            expect(comm, f"all_gather {what}", comm.all_gather(mine), parts)
            exchanged = torch.cat(comm.all_to_all(mine.split(1)))
            expect(comm, f"all_to_all {what}", exchanged, parts[:, comm.rank])
            if dtype is not torch.bool:
                rows = total(parts, Reduction.SUM)[comm.rank : comm.rank + 1]
                expect(comm, f"reduce_scatter {what}", comm.reduce_scatter(mine), rows)
            expect(comm, f"the memory around an input {what}", whole, before)


def results_go_to_any_strides(comm: Communicator) -> None:
    for dtype in _KINDS:
        parts = samples(comm, (comm.size, 6), dtype)
        reduction = Reduction.MAX if dtype is torch.bool else Reduction.SUM
        calls: tuple[tuple[str, Callable[[Tensor], Tensor], Tensor], ...] = (
            ("all_reduce", partial(comm.all_reduce, reduction=reduction), total(parts, reduction)),
            ("broadcast", partial(comm.broadcast, source=comm.size - 1), parts[comm.size - 1]),
        )
        for label, laid_out in _LAYOUTS.items():
            for call, exchange, expected in calls:
                mine, whole = laid_out(parts[comm.rank])
                what = f"{call} of {label} {name(mine)}"
                result = exchange(mine)
                expect(comm, what, mine, expected)
                _same(comm, what, result, mine)
                expect(comm, f"the memory around {what}", whole, laid_out(expected)[1])


def expanded_tensors_are_read_but_not_written(comm: Communicator) -> None:
    row = sample(comm, (1, 3), torch.float32)
    wide = row.expand(4, 3)
    gathered = samples(comm, (1, 3), row.dtype).expand(-1, 4, 3)
    expect(comm, "all_gather of an expanded tensor", comm.all_gather(wide), gathered)
    for label, call in (("all_reduce", comm.all_reduce), ("broadcast", comm.broadcast)):
        refused(comm, f"{label} of an expanded tensor", partial(call, wide), ValueError)
    expect(comm, "a tensor that was not to be written", row, sample(comm, (1, 3), row.dtype))


def lazy_views_are_resolved(comm: Communicator) -> None:
    views: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (("conjugate", torch.conj), ("negative", _negative))
    for label, view in views:
        parts = view(samples(comm, (2, 3), torch.complex64)).resolve_conj().resolve_neg()
        mine = view(sample(comm, (2, 3), torch.complex64))
        refused(comm, f"start with a {label} view", partial(comm.start, AllReduce(mine)), ValueError)
        expect(comm, f"all_gather of a {label} view", comm.all_gather(mine), parts)
        expect(comm, f"all_reduce of a {label} view", comm.all_reduce(mine), parts.sum(0))


def autograd_does_not_look(comm: Communicator) -> None:
    def leaf(*shape: int) -> Tensor:
        return sample(comm, shape, torch.float32).requires_grad_()

    size, ones = comm.size, (1,) * comm.size
    for op in (
        AllReduce(leaf(3)),
        AllReduce(leaf(3), Reduction.MEAN),
        Broadcast(leaf(3), size - 1),
        AllGather(leaf(3 * size), leaf(3)),
        ReduceScatter(leaf(3), leaf(3 * size), Reduction.MEAN),
        AllToAll(leaf(size), leaf(size), ones, ones),
    ):
        comm.start(op).wait()
    mine = leaf(size, 3)
    for label, result in (
        ("all_gather", comm.all_gather(mine)),
        ("reduce_scatter", comm.reduce_scatter(mine)),
        ("all_to_all", comm.all_to_all(mine.split(1))[0]),
    ):
        if result.requires_grad:
            raise AssertionError(f"rank {comm.rank}, {label} of a leaf: the result requires a gradient")
    summed = total(samples(comm, (size, 3), mine.dtype), Reduction.SUM)
    expect(comm, "all_reduce of a leaf", comm.all_reduce(mine), summed)


def all_ranks_get_the_same_bits(comm: Communicator) -> None:
    for count in (1, 7, 1009, 70_001):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for reduction in (Reduction.SUM, Reduction.MEAN, Reduction.PRODUCT):
                generator = torch.Generator().manual_seed(1 + comm.rank)
                tensor = (torch.rand(count, generator=generator) * 3 - 1).to(comm.device, dtype)
                what = f"all_reduce({reduction.value}) of {name(tensor)}"
                result = comm.all_reduce(tensor, reduction)
                for rank, other in enumerate(comm.all_gather(result.view(torch.uint8))):
                    expect(comm, f"{what} here and on rank {rank}", other.view(dtype), result)


PROMISES: tuple[Callable[[Communicator], None], ...] = (
    all_reduce_takes_every_dtype,
    each_rank_scales_its_own_numbers,
    reduce_scatter_gives_each_rank_its_rows,
    undefined_reductions_are_refused,
    broadcast_copies_from_every_source,
    all_gather_stacks_in_rank_order,
    all_gather_takes_uneven_lengths,
    all_to_all_delivers_every_part,
    every_size_is_served,
    inputs_have_any_strides,
    results_go_to_any_strides,
    expanded_tensors_are_read_but_not_written,
    lazy_views_are_resolved,
    autograd_does_not_look,
    all_ranks_get_the_same_bits,
)


def _defined() -> Iterator[tuple[Reduction, torch.dtype]]:
    return ((r, dtype) for r in Reduction for dtype in DTYPES if is_defined(r, dtype))


def _exact(parts: Tensor, reduction: Reduction) -> Tensor:
    """Return numbers whose product fits every dtype (ones and twos), or whose mean is whole."""
    if reduction is Reduction.PRODUCT:
        return parts % 2 + 1
    return parts * len(parts) if reduction is Reduction.MEAN else parts


def _negative(values: Tensor) -> Tensor:
    return torch.conj(values).imag


def _column(values: Tensor) -> tuple[Tensor, Tensor]:
    whole = values.new_ones((len(values), 2 * values.shape[1] + 1))
    part = whole[:, 1::2]
    part.copy_(values)
    return part, whole


def _transposed(values: Tensor) -> tuple[Tensor, Tensor]:
    whole = values.t().contiguous()
    return whole.t(), whole


def _slice(values: Tensor) -> tuple[Tensor, Tensor]:
    whole = values.new_ones((len(values) + 2, values.shape[1]))
    whole[1:-1] = values
    return whole[1:-1], whole


# Each lays values out anew and returns the tensor to exchange and the memory that it is a view of.
_LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "every other column of a wider": _column,
    "a transposed": _transposed,
    "rows in the middle of a longer": _slice,
}


def _same(comm: Communicator, what: str, result: Tensor, tensor: Tensor) -> None:
    if result is not tensor:
        raise AssertionError(f"rank {comm.rank}, {what}: expected the tensor that was given, got another")


def _count(comm: Communicator, what: str, parts: list[Tensor]) -> None:
    if len(parts) != comm.size:
        raise AssertionError(f"rank {comm.rank}, {what}: expected {comm.size} parts, got {len(parts)}")

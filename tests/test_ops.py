"""Requests: what is refused before anything is sent, and how requests describe themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.comm.base import Communicator
from samestep.comm.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Op,
    Recv,
    ReduceScatter,
    Reduction,
    Send,
    check,
    describe,
    detached,
)
from samestep.testing.ranks import run_threads


def _flat(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def _request(kind: Any, *arguments: Any) -> Any:
    """Make a request of things that it should not be made of."""
    return kind(*arguments)


_NO_REQUESTS: dict[str, Callable[[], Any]] = {
    r"expected one of AllReduce, .*, got Tensor": lambda: _flat(3),
    r"expected one of AllReduce, .*, got type": lambda: AllReduce,
    r"all_reduce: expected a tensor as tensor, got list": lambda: _request(AllReduce, [1.0]),
    r"all_gather: expected a tensor as output, got NoneType": lambda: _request(AllGather, None, _flat(3)),
}

_UNFIT: dict[str, Callable[[], Op]] = {
    r"tensor is torch.sparse_coo, only dense": lambda: AllReduce(torch.eye(3).to_sparse()),
    r"float32\[3, 2\]: tensor is not contiguous \(strides \(1, 3\)\)": lambda: AllReduce(torch.zeros(2, 3).t()),
    r"output is not contiguous": lambda: AllGather(torch.zeros(3, 2).t(), _flat(2)),
    r"tensor is a lazy view; use its resolve_conj\(\)": lambda: AllReduce(torch.zeros(2, dtype=torch.complex64).conj()),
    r"broadcast\(source=3\) of float32\[3\]: rank 3 is not among the 3 ranks 0 to 2": lambda: Broadcast(_flat(3), 3),
    r"rank -1 is not among": lambda: Broadcast(_flat(3), -1),
    r"send\(peer=7, tag=0\) of float32\[3\]: rank 7 is not among": lambda: Send(_flat(3), 7),
    r"recv\(peer=7, tag=2\)": lambda: Recv(_flat(3), 7, 2),
    r"send\(peer=1, tag=-1\) .*: expected a tag from 0 to 1073741823": lambda: Send(_flat(3), 1, -1),
    r"expected a tag from 0 to 1073741823": lambda: Recv(_flat(3), 1, 2**30),
    r"all_reduce\(sum\) of bool\[3\]: sum is not defined for bool, only for bfloat16": lambda: AllReduce(
        _flat(3, torch.bool)
    ),
    r"mean is not defined for int32, only for bfloat16, complex128": lambda: AllReduce(
        _flat(3, torch.int32), Reduction.MEAN
    ),
    r"bit_or is not defined for float32, only for bool, int16": lambda: ReduceScatter(
        _flat(1), _flat(3), Reduction.BIT_OR
    ),
    r"max is not defined for complex64": lambda: AllReduce(_flat(3, torch.complex64), Reduction.MAX),
    r"expected 3 x 2 elements of float32 on the long side, got 7 of float32": lambda: ReduceScatter(_flat(2), _flat(7)),
    r"float32 on the long side, got 6 of float64": lambda: ReduceScatter(_flat(2), _flat(6, torch.float64)),
    r"expected 3 x 2 elements of float32 on the long side, got 5 of float32": lambda: AllGather(_flat(5), _flat(2)),
    r"elements of int64 on the long side, got 6 of float32": lambda: AllGather(_flat(6), _flat(2, torch.int64)),
    r"tensor has 3 elements; its splits \[1, 1\] must be 3 lengths": lambda: AllToAll(
        _flat(3), _flat(3), (1, 1, 1), (1, 1)
    ),
    r"output has 3 elements; its splits \[1, 1, 2\]": lambda: AllToAll(_flat(3), _flat(3), (1, 1, 2), (1, 1, 1)),
    r"its splits \[3, 1, -1\] must be": lambda: AllToAll(_flat(3), _flat(3), (1, 1, 1), (3, 1, -1)),
    r"of int8\[3\]: output is float32": lambda: AllToAll(_flat(3), _flat(3, torch.int8), (1, 1, 1), (1, 1, 1)),
    r"expected a flat tensor, got the shape \[3, 1\]": lambda: AllToAll(
        _flat(3), torch.zeros(3, 1), (1, 1, 1), (1, 1, 1)
    ),
}


@pytest.mark.parametrize("said", _NO_REQUESTS)
def test_what_is_no_request(said: str) -> None:
    with pytest.raises(TypeError, match=f"rank 1: .*{said}"):
        check(_NO_REQUESTS[said](), 1, 3)


@pytest.mark.parametrize("said", _UNFIT)
def test_what_no_transport_can_serve(said: str) -> None:
    with pytest.raises(ValueError, match=f"rank 1: .*{said}"):
        check(_UNFIT[said](), 1, 3)


def test_a_message_to_oneself_is_refused() -> None:
    def main(comm: Communicator) -> None:
        for op in (Send(_flat(1), comm.rank), Recv(_flat(1), comm.rank)):
            with pytest.raises(ValueError, match=f"rank {comm.rank}: .* is to itself; copy the tensor instead"):
                comm.start(op)

    run_threads(main, 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.all_reduce([1.0]), "expected a tensor, got list"),
        (lambda c: c.broadcast(3), "expected a tensor, got int"),
        (lambda c: c.all_gather(None), "expected a tensor, got NoneType"),
        (lambda c: c.all_gather_uneven((1,)), "expected a tensor, got tuple"),
        (lambda c: c.reduce_scatter("x"), "expected a tensor, got str"),
        (lambda c: c.all_to_all([_flat(1), 2]), "expected a tensor, got int"),
        (lambda c: c.send([1], 0), "expected a tensor, got list"),
        (lambda c: c.recv({}, 0), "expected a tensor, got dict"),
        (
            lambda c: c.all_reduce(_flat(1), "sum"),
            r"expected a Reduction, such as Reduction\.SUM, as reduction, got 'sum'",
        ),
        (lambda c: c.broadcast(_flat(1), "0"), "broadcast: expected an integer as source, got '0'"),
        (lambda c: c.send(_flat(1), 1.0), r"send: expected an integer as peer, got 1\.0"),
    ],
)
def test_what_is_of_the_wrong_type(call: Callable[[Any], object], said: str) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=f"rank {comm.rank}: .*{said}"):
            call(comm)
        comm.barrier()

    run_threads(main, 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.all_gather_uneven(torch.tensor(1.0)), "all_gather_uneven: expected at least one dimension"),
        (lambda c: c.reduce_scatter(_flat(3)), r"reduce_scatter: .* divisible by 2 ranks, got \[3\]"),
        (lambda c: c.reduce_scatter(torch.tensor(1.0)), r"reduce_scatter: .* divisible by 2 ranks, got \[\]"),
        (lambda c: c.all_to_all([_flat(1)]), r"all_to_all: expected 2 tensors .* got shapes \[\[1\]\]"),
        (lambda c: c.all_to_all([torch.tensor(1.0)] * 2), r"all_to_all: expected 2 tensors of at least one dimension"),
        (lambda c: c.all_to_all([_flat(1), torch.zeros(1, 1)]), r"all_to_all: tensors may differ only in their first"),
        (lambda c: c.all_reduce(_flat(1).expand(2)), r"got an expanded one, .*shape \[2\], strides \(0,\)"),
    ],
)
def test_what_the_methods_refuse(call: Callable[[Communicator], object], said: str) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=f"rank {comm.rank}: .*{said}"):
            call(comm)
        comm.barrier()

    run_threads(main, 2)


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (lambda: AllReduce(torch.zeros(3, 4)), "all_reduce(sum) of float32[3, 4]"),
        (lambda: ReduceScatter(_flat(1), _flat(3), Reduction.MAX), "reduce_scatter(max) of float32[3]"),
        (lambda: Broadcast(_flat(3, torch.bool), 2), "broadcast(source=2) of bool[3]"),
        (lambda: AllGather(_flat(3), _flat(1)), "all_gather of float32[1]"),
        (
            lambda: AllToAll(_flat(3), _flat(2), (1, 2), (2, 0)),
            "all_to_all(sends=[2, 0], receives=[1, 2]) of float32[2]",
        ),
        (lambda: Send(torch.tensor(1), 1, 5), "send(peer=1, tag=5) of int64[]"),
        (lambda: Barrier(), "barrier"),
    ],
)
def test_requests_describe_themselves(op: Callable[[], Op], said: str) -> None:
    assert describe(op()) == said


def test_autograd_loses_sight_of_a_request() -> None:
    plain, followed = torch.zeros(3), torch.zeros(1, requires_grad=True)
    op = ReduceScatter(followed, plain, Reduction.MAX)
    same = detached(op)
    assert isinstance(same, ReduceScatter)
    assert same.reduction is Reduction.MAX
    assert same.tensor is plain
    assert not same.output.requires_grad
    assert same.output.data_ptr() == followed.data_ptr()
    assert detached(same) is same

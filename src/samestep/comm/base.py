"""The seam between those who exchange tensors and those who move them: one verb, `start(op) -> Work`.

A transport implements `_start` and `_split`; everything else here is sugar written once on top of them. A wrapper that
times, checks or breaks things overrides `_start`.
"""

from __future__ import annotations

import operator
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from samestep.comm.memory import contiguous, give_back, writable
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
from samestep.errors import MismatchError

__all__ = ["Communicator", "DoneWork", "Work"]


class Work(ABC):
    """An exchange under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the results are there (on CUDA: for the current stream); may be called again.

        Raises PeerLostError, DeadlineError or CommunicatorError if the exchange failed, MismatchError if ranks asked
        for different things and the transport could tell. The tensors' contents are then undefined.
        """

    @abstractmethod
    def done(self) -> bool:
        """Tell, without blocking, whether `wait` is known to return or raise at once.

        Some transports learn of a message's arrival only in `wait`: then it is False until `wait` has returned.
        """


class DoneWork(Work):
    """An exchange that needed none."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class Communicator(ABC):
    """A group of ranks that exchange tensors. All ranks of the group make the same calls in the same order.

    `rank` counts within the group, from 0; `size` is the number of ranks; `device` is where small control tensors live.
    Methods other than `start` block until their result is there. Any of them raises what `Work.wait` raises.
    """

    rank: int
    size: int
    device: torch.device
    _scales = False  # whether `_start` sees to the `scale` of an all-reduce

    @final
    def start(self, op: Op) -> Work:
        """Begin `op` and return at once where the transport is asynchronous.

        Raises ValueError or TypeError, on this rank alone and with nothing sent, for an op that no transport could
        serve: a rank or a tag out of range, a message to oneself, tensors that are sparse, not contiguous or of the
        wrong length, a reduction that is not defined for the dtype. Autograd does not look.
        """
        check(op, self.rank, self.size)
        if isinstance(op, Send | Recv) and op.peer == self.rank:
            raise ValueError(f"rank {self.rank}: {describe(op)} is to itself; copy the tensor instead")
        op = detached(op)
        if not self._scales and isinstance(op, AllReduce) and op.scale != 1.0:
            op.tensor.mul_(op.scale)
            op = replace(op, scale=1.0)
        return self._start(op)

    @abstractmethod
    def _start(self, op: Op) -> Work: ...

    @abstractmethod
    def _split(self, ranks: tuple[int, ...]) -> Communicator | None: ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a tensor of zeros in the CPU's memory, where this transport reduces it with the fewest copies.

        All ranks call it, with the same arguments. Everything works alike with any other tensor.
        """
        return torch.zeros(tuple(shape), dtype=dtype)

    def close(self) -> None:  # noqa: B027 - most transports hold nothing
        """Give back what the communicator holds. Other ranks notice when they next need this one."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Sugar: exchanges of tensors

    def all_reduce(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Tensor:
        """Reduce `tensor` (any shape and strides, same on all ranks) over the ranks, in place, and return it.

        Sum takes integers, floats and complex numbers, mean floats and complex numbers, product integers and floats;
        min and max integers, floats and bool; bit operations integers and bool.
        """
        self._require_tensors(tensor)
        dense = writable(tensor, self.rank)
        self.start(AllReduce(dense, reduction)).wait()
        return give_back(dense, tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy rank `source`'s `tensor` (any shape, strides, dtype; same on all ranks) into `tensor`; return it."""
        self._require_tensors(tensor)
        dense = writable(tensor, self.rank)
        self.start(Broadcast(dense, source)).wait()
        return give_back(dense, tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors (same shape and dtype on all), stacked: [size, *tensor.shape]."""
        self._require_tensors(tensor)
        output = tensor.new_empty((self.size, *tensor.shape))
        self.start(AllGather(output, contiguous(tensor))).wait()
        return output

    def all_gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """Return the ranks' tensors, in rank order, which may differ in their first dimension.

        `tensor` has at least one dimension; the others and the dtype are the same on all ranks. Lengths are exchanged
        first, and shorter tensors travel padded to the longest.
        """
        self._require_tensors(tensor)
        if tensor.dim() == 0:
            raise ValueError(
                f"rank {self.rank}: all_gather_uneven: expected at least one dimension, got a scalar; use all_gather"
            )
        lengths = self._gather_lengths(tensor)
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor.detach()
        return [part[:length] for part, length in zip(self.all_gather(padded), lengths, strict=True)]

    def reduce_scatter(self, tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Tensor:
        """Reduce `tensor` over the ranks and return this rank's part of the rows.

        The first dimension is a multiple of `size`; rank r gets rows r * n / size up to (r + 1) * n / size.
        """
        self._require_tensors(tensor)
        if tensor.dim() == 0 or len(tensor) % self.size:
            raise ValueError(
                f"rank {self.rank}: reduce_scatter: expected a first dimension divisible by {self.size} ranks, got "
                f"{list(tensor.shape)}"
            )
        output = tensor.new_empty((len(tensor) // self.size, *tensor.shape[1:]))
        self.start(ReduceScatter(output, contiguous(tensor), reduction)).wait()
        return output

    def all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send `tensors[r]` to rank r and return what every rank sent here, in rank order.

        Tensors may differ in their first dimension; the others and the dtype are the same everywhere. Lengths are
        exchanged first.
        """
        self._require_tensors(*tensors)
        if len(tensors) != self.size or any(t.dim() == 0 for t in tensors):
            raise ValueError(
                f"rank {self.rank}: all_to_all: expected {self.size} tensors of at least one dimension, one for each "
                f"rank, got shapes {[list(t.shape) for t in tensors]}"
            )
        if len({(t.dtype, t.shape[1:]) for t in tensors}) != 1:
            raise ValueError(
                f"rank {self.rank}: all_to_all: tensors may differ only in their first dimension, got "
                f"{[(t.dtype, list(t.shape)) for t in tensors]}"
            )
        sends = torch.tensor([len(t) for t in tensors], device=self.device)
        receives = torch.empty_like(sends)
        ones = (1,) * self.size
        self.start(AllToAll(receives, sends, ones, ones)).wait()
        lengths, rest = receives.tolist(), tensors[0].shape[1:]
        outputs = [tensors[0].new_empty((n, *rest)) for n in lengths]
        flat = torch.cat([o.reshape(-1) for o in outputs])
        op = AllToAll(
            flat,
            torch.cat([t.detach().reshape(-1) for t in tensors]),
            tuple(o.numel() for o in outputs),
            tuple(t.numel() for t in tensors),
        )
        self.start(op).wait()
        return [part.view(o.shape) for part, o in zip(flat.split([o.numel() for o in outputs]), outputs, strict=True)]

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send `tensor` to rank `peer`; returns when `tensor` may be changed again."""
        self._require_tensors(tensor)
        self.start(Send(contiguous(tensor), peer, tag)).wait()

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Tensor:
        """Receive into `tensor`, of the shape and dtype sent, what rank `peer` sent with `tag`; return it."""
        self._require_tensors(tensor)
        dense = writable(tensor, self.rank)
        self.start(Recv(dense, peer, tag)).wait()
        return give_back(dense, tensor)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.start(Barrier()).wait()

    # Sugar: exchanges of Python objects. They are pickled: only for ranks of one job, which trust one another.

    def all_gather_object(self, item: object) -> list[Any]:
        """Return every rank's `item` (anything that pickles), in rank order."""
        return [_unpickled(part) for part in self.all_gather_uneven(_pickled(item, self.device))]

    def broadcast_object(self, item: object = None, source: int = 0) -> Any:
        """Return rank `source`'s `item`; what other ranks pass is ignored."""
        payload = _pickled(item if self.rank == source else None, self.device)
        length = self.broadcast(torch.tensor(len(payload), device=self.device), source)
        if self.rank != source:
            payload = payload.new_empty(int(length))
        self.broadcast(payload, source)
        return item if self.rank == source else _unpickled(payload)

    # Groups

    def split(self, ranks: Iterable[int]) -> Communicator | None:
        """Make a group of some of the ranks; every rank of this group calls it, with the same `ranks`.

        Returns the new communicator, in which ranks are numbered in ascending order of the old numbers, or None on
        ranks that are not in it. Raises ValueError for a rank out of range or named twice, TypeError for one that is
        no integer, MismatchError if ranks disagree.
        """
        wanted = tuple(sorted(map(operator.index, ranks)))
        if len(set(wanted)) != len(wanted) or not wanted or wanted[0] < 0 or wanted[-1] >= self.size:
            raise ValueError(
                f"rank {self.rank}: split: expected different ranks from 0 to {self.size - 1}, got {list(wanted)}"
            )
        everyone = self.all_gather_object(wanted)
        if len(set(everyone)) != 1:
            raise MismatchError(
                "split: every rank must name the same ranks, but "
                + ", ".join(f"rank {r} named {list(named)}" for r, named in enumerate(everyone))
            )
        return self._split(wanted)

    def _require_tensors(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"rank {self.rank}: expected a tensor, got {type(tensor).__name__}")

    def _gather_lengths(self, tensor: Tensor) -> list[int]:
        lengths: list[int] = self.all_gather(torch.tensor(len(tensor), device=self.device)).tolist()
        return lengths


def _pickled(item: object, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8).to(device)


def _unpickled(payload: Tensor) -> Any:
    return pickle.loads(payload.cpu().numpy().tobytes())

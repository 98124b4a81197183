"""Equal replicas: the same parameters and buffers on every rank, by name, shape, dtype and value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.errors import MismatchError

__all__ = ["require_same_layout", "send_values"]

_CHUNK_BYTES = 64 << 20  # bounds the memory that sending a large model takes beside it
_SHOWN = 5  # differences named for a rank


def require_same_layout(communicator: Communicator, tensors: Mapping[str, Tensor]) -> None:
    """Raise MismatchError, on every rank, unless all ranks' tensors have the same names, shapes and dtypes, in order.

    Which of them require gradients counts too.

    The message tells, for every rank, how its tensors differ from rank 0's. Costs 8 bytes a rank if all is well.
    """
    layout = {name: _describe(tensor) for name, tensor in tensors.items()}
    digest = hashlib.blake2b(repr(list(layout.items())).encode(), digest_size=8).digest()
    mine = torch.tensor(int.from_bytes(digest, "big", signed=True), device=communicator.device)
    if len(set(communicator.all_gather(mine).tolist())) == 1:
        return
    layouts: list[dict[str, str]] = communicator.all_gather_object(layout)
    lines = "\n".join(f"  rank {rank}: {_difference(layouts[0], other)}" for rank, other in enumerate(layouts))
    raise MismatchError(
        f"rank {communicator.rank}: the module is not the same on all ranks; build it the same way on each before "
        f"wrapping it:\n{lines}"
    )


def send_values(communicator: Communicator, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Copy rank `source`'s values into the same `tensors` (any dtypes, shapes and strides) of all ranks, in place.

    Small ones travel together, as bytes.
    """
    with torch.no_grad():
        for device in _devices(tensors := [t.detach() for t in tensors]):
            # The widest dtypes first, so that every piece begins where its dtype may.
            group = sorted((t for t in tensors if t.device == device), key=lambda t: -t.element_size())
            for chunk in _chunks(group):
                flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in chunk])
                communicator.broadcast(flat, source)
                if communicator.rank != source:
                    pieces = flat.split([t.numel() * t.element_size() for t in chunk])
                    for tensor, piece in zip(chunk, pieces, strict=True):
                        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _describe(tensor: Tensor) -> str:
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{frozen}"


def _devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list(dict.fromkeys(t.device for t in tensors))


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if tensor.numel():
            chunk.append(tensor)
            held += tensor.numel() * tensor.element_size()
        if held >= _CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _difference(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    found = [f"{name} is missing ({what} on rank 0)" for name, what in first.items() if name not in other]
    found += [f"{name} {what} is not on rank 0" for name, what in other.items() if name not in first]
    found += [
        f"{name} is {other[name]} ({what} on rank 0)" for name, what in first.items() if other.get(name, what) != what
    ]
    if not found and list(first) != list(other):
        found = [f"the same, in another order: {list(other)[:_SHOWN]}, on rank 0 {list(first)[:_SHOWN]}"]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join(found[:_SHOWN] + more) or f"{len(other)} parameters and buffers, as on rank 0"

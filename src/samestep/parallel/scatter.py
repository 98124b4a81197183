"""Dealing a batch out over devices and putting outputs together, through nested lists, tuples, dicts and dataclasses.

A batch is cut as torch.nn.DataParallel cuts it, by torch.chunk: all pieces but the last have the same size, and there
may be fewer of them than devices.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.parallel.replicate import share

__all__ = ["gather", "scatter"]


def scatter(value: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """Return `value` once for each piece that its tensors are cut into along `dim`, on that piece's device.

    Pieces are copies, which a module may write to, and lead autograd back. Tensors without dimensions go to every
    device, and so does what is no tensor and no container, as the same object. Without any tensor to cut there is one
    for each device. With a single device tensors are moved there, and neither cut nor copied.

    Raises ValueError if the tensors give different numbers of pieces, TypeError for a PackedSequence, IndexError for a
    tensor without the dimension `dim`.
    """
    if len(devices) == 1:
        (device,) = devices
        return [_mapped(value, lambda found: found.to(device, non_blocking=device.type != "cpu"))]
    cut: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}  # keeps the tensors, so that no other gets an id of theirs

    def pieces_of(found: Any) -> Sequence[Tensor]:
        if isinstance(found, PackedSequence):
            raise TypeError(
                f"a PackedSequence can't be cut into pieces for {len(devices)} devices: give the module the padded "
                "sequences and their lengths, and pack them in its forward"
            )
        if id(found) not in cut:
            cut[id(found)] = found, _pieces(found, devices, dim)
        return cut[id(found)][1]

    def part(number: int) -> Any:
        return _mapped(value, lambda found: pieces_of(found)[number])

    first = part(0)
    counts = {len(pieces): list(tensor.shape) for tensor, pieces in cut.values() if tensor.dim()}
    if len(counts) > 1:
        shown = ", ".join(f"{shape} into {count}" for count, shape in sorted(counts.items()))
        raise ValueError(
            f"the tensors of one call can't be dealt out over {len(devices)} devices together: along dimension {dim} "
            f"they would be cut differently, {shown} pieces; give each the same length there"
        )
    return [first, *(part(number) for number in range(1, next(iter(counts), len(devices))))]


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Return the replicas' `outputs` as one, of their common structure: tensors joined along `dim` on `device`.

    Tensors without dimensions become a vector, with torch's warning, if `dim` is 0. What is no tensor and no container
    has to be the same object in all outputs (None, a shared configuration); numbers are refused, as their sum may be
    meant, or their mean.

    Raises TypeError or ValueError for outputs that can't be joined.
    """
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        return _joined(outputs, device, dim)
    kinds = list(dict.fromkeys(type(output).__name__ for output in outputs))
    if len(kinds) > 1:
        raise TypeError(f"replicas returned different things in one place, which can't be joined: {', '.join(kinds)}")
    if isinstance(first, PackedSequence):
        raise TypeError("PackedSequences can't be joined: unpack them in the module's forward")
    contents = [items for output in outputs if (items := _contents(output)) is not None]
    if contents:
        if any(items.keys() != contents[0].keys() for items in contents):
            raise ValueError(_unlike(first, contents))
        return _like(first, {key: gather([items[key] for items in contents], device, dim) for key in contents[0]})
    if isinstance(first, int | float | complex) or any(output is not first for output in outputs):
        raise TypeError(f"replicas returned {kinds[0]} objects, which can't be joined to one: return tensors")
    return first


def _pieces(tensor: Tensor, devices: Sequence[torch.device], dim: int) -> Sequence[Tensor]:
    if tensor.dim() == 0:
        return share(tensor, devices, aliases=0)
    # Copies, as views of one tensor would keep replicas in different threads from writing to theirs.
    return [
        piece.to(device, non_blocking=device.type != "cpu", copy=True)
        for piece, device in zip(tensor.chunk(len(devices), dim), devices, strict=False)
    ]


def _joined(tensors: Sequence[Tensor], device: torch.device, dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector.",
            stacklevel=2,
        )
        tensors = [tensor.view(1) for tensor in tensors]
    return torch.cat([tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors], dim)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to its tensors; lists, tuples and dicts are copied, unless they are empty.

    Containers of other kinds are copied only if something in them has changed.
    """
    if isinstance(value, Tensor | PackedSequence):
        return change(value)
    items = _contents(value)
    if not items:
        return value
    new = {key: _mapped(item, change) for key, item in items.items()}
    if type(value) not in (list, tuple, dict) and all(new[key] is item for key, item in items.items()):
        return value
    return _like(value, new)


# Containers


def _contents(value: Any) -> dict[Any, Any] | None:
    """Return what is in a container, by key, place or name; None for what is none."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return None


def _like(value: Any, contents: dict[Any, Any]) -> Any:
    """Return a container like `value` with other contents, which are given as `_contents` gives them."""
    if type(value) is dict:
        return contents
    if isinstance(value, MutableMapping):  # may be made in any way (defaultdict), or hold more than its items
        made = copy.copy(value)
        for key, item in contents.items():
            made[key] = item
        return made
    if isinstance(value, Mapping):
        return type(value)(contents)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(*contents.values()) if hasattr(value, "_fields") else type(value)(contents.values())
    return dataclasses.replace(value, **contents)


def _unlike(first: Any, contents: Sequence[dict[Any, Any]]) -> str:
    if isinstance(first, Mapping):
        keys = "; ".join(str(list(items)) for items in contents)
        return f"All dicts must have the same number of keys, and the same keys; the replicas' have {keys}"
    lengths = [len(items) for items in contents]
    return f"replicas returned {type(first).__name__} objects of different lengths, which can't be joined: {lengths}"

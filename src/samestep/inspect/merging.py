"""Ranks' batches put together into the one that a single rank would have had, where samples are not known. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["merged"]


def merged(batches: Sequence[Any]) -> Any:
    """Return one batch with the samples of all, rank after rank: tensors one behind the other in their first dimension.

    Raises ValueError, with the reason, for what is not plainly a batch: its tensors must have as many rows each.
    """
    for batch in batches:
        rows = {one.shape[:1] for one in _tensors(batch)}
        if len(rows) != 1 or () in rows:
            raise ValueError("the tensors of a batch have different numbers of rows")
    return _joined(batches)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _tensors(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _tensors(item)


def _joined(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if len({type(one) for one in batches}) != 1:
        raise ValueError("ranks have batches of different kinds")
    if isinstance(first, Tensor):
        if len({(one.shape[1:], one.dtype) for one in batches}) > 1:
            raise ValueError(f"tensors of different shapes: {[list(one.shape) for one in batches]}")
        return torch.cat(list(batches))
    if type(first) is dict and all(one.keys() == first.keys() for one in batches):
        return {key: _joined([one[key] for one in batches]) for key in first}
    if isinstance(first, list | tuple) and len({len(one) for one in batches}) == 1:
        fields = [_joined(field) for field in zip(*batches, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if isinstance(first, str | int | float | bool | None) and all(one == first for one in batches):
        return first
    raise ValueError(f"a {type(first).__name__} in a batch can't be put together from several ranks")

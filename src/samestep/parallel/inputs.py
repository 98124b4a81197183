"""Tensors within what a module takes and returns: nested lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["tensors_in", "to_device", "to_dtype"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, however deep; what is no container and no tensor is passed over."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with its tensors on `device`; containers are copied, other objects are passed on as they are."""
    return _mapped(value, lambda tensor: tensor.to(device))


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors cast to `dtype`; the rest as `to_device`."""
    return _mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return type(value)((key, _mapped(item, change)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: _mapped(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **moved)
    return value

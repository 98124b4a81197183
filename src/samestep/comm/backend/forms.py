"""The forms in which torch calls a process group's methods."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

__all__ = ["listed", "nested", "options"]


def options(kind: Any, given: Any = None, *more: Any) -> Any:
    """Return options as they were given, or made of what torch's shorter forms take: a root, a reduction, a timeout."""
    if isinstance(given, kind):
        return given
    made = kind()
    for value in (given, *more):
        if isinstance(value, timedelta):
            made.timeout = value
        elif isinstance(value, int):
            made.rootRank = value
        elif value is not None:
            made.reduceOp = value
    return made


def listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def nested(lists: Any, tensors: Any) -> list[list[Tensor]]:
    """Return a list of lists, also if the other argument is a single tensor and this one, therefore, a single list."""
    return [lists] if isinstance(tensors, Tensor) else lists

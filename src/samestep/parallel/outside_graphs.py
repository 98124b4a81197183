"""Keeping torch.compile away from what exchanges tensors or starts threads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["outside_graphs"]

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Make torch.compile end a graph before `function` and begin another after it; with fullgraph=True it fails.

    torch.compiler.disable does that, too, but to import the compiler for it takes seconds: here that is left to those
    who compile.
    """
    left_out: Any = None

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        nonlocal left_out
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if left_out is None:
            left_out = torch.compiler.disable(function)
        return left_out(*args)

    return call  # type: ignore[return-value]

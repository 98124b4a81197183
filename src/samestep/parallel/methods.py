"""Methods of the wrapped module that are called through the wrapper: their results count as forward's do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samestep.parallel.inputs import tensors_in

if TYPE_CHECKING:
    from samestep.parallel.reducer import Reducer

__all__ = ["watched"]


def watched(value: Any, module: nn.Module, reducer: Callable[[], Reducer]) -> Any:
    """Return `value`, an attribute of `module`; in the place of a method of its, one that does the same.

    A backward through what that returns is the reducer's from its beginning, so autograd.grad() is noticed there, too.
    """
    if not (isinstance(value, MethodType) and value.__self__ is module):
        return value

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        reducer().settle()
        output = value(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                reducer().expect(tensor)
        return output

    return call

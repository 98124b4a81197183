"""What the autograd engine is doing: which backward is under way, and whom its gradients are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ReplicaError

__all__ = ["Closing", "alone", "captured", "connected", "goes_everywhere"]


class Closing:
    """What the engine calls at the end of a backward, and drops with one that fails: alive means open.

    `node` is that of the module's output through which the backward came, if it was the first to be seen.
    """

    def __init__(self, run: Callable[[Any], None], node: Any = None) -> None:
        self.run, self.node = run, node

    def __call__(self) -> None:
        node, self.node = self.node, None
        self.run(node)


def captured(parameters: Iterable[Tensor]) -> int | None:
    """Return the number of the first of `parameters` whose gradient the running autograd.grad() is to return.

    None if there is none, as in every `backward()`. To be asked within the backward.
    """
    with torch.enable_grad():
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad and _is_captured(parameter.expand_as(parameter).grad_fn.next_functions[0][0]):  # type: ignore[union-attr]
                return number
    return None


def goes_everywhere(node: Any) -> bool:
    """Tell whether the running backward is one that leaves gradients at the leaves of the graph below `node`.

    That is, a `backward()`, not an autograd.grad(). It looks at the first leaf that it comes to.
    """
    seen, left = set(), [node]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            return not _is_captured(node) and bool(torch._C._will_engine_execute_node(node))
        left.extend(function for function, _ in node.next_functions)
    return False


def _is_captured(leaf: Any) -> bool:
    try:
        torch._C._will_engine_execute_node(leaf)
    except (
        RuntimeError
    ):  # "A leaf node was passed to _will_engine_execute_node but we are currently running [...] grad"
        return True
    return False


def alone(rank: int, name: str) -> ReplicaError:
    """Return the error of an autograd.grad() for the parameter `name`."""
    return ReplicaError(
        f"rank {rank}: autograd.grad() was called for parameter {name}: what it returns is this rank's gradient alone. "
        "Call backward(), whose gradients are averaged; or, where this rank's are wanted, call autograd.grad() within "
        "no_sync()"
    )


def connected(rank: int) -> ReplicaError:
    """Return the error of a synchronised backward that was to make a graph."""
    return ReplicaError(
        f"rank {rank}: backward(create_graph=True) was called, but averaged gradients are not connected to a graph: "
        "what is computed from them could not be differentiated. Take gradients of a penalty with autograd.grad(), or "
        "call backward within no_sync()"
    )

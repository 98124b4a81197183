"""What the autograd engine is doing: which backward is under way, and whom its gradients are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ReplicaError

__all__ = ["Closing", "alone", "captured", "end_graphs", "goes_everywhere"]


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
            above = parameter.expand_as(parameter).grad_fn  # none within a transform of torch.func
            if above is not None and _is_captured(above.next_functions[0][0]):
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
    except RuntimeError:  # "A leaf node was passed [...] but we are currently running autograd.grad()"
        return True
    return False


def alone(rank: int, name: str) -> ReplicaError:
    """Return the error of an autograd.grad() for the parameter `name`."""
    return ReplicaError(
        f"rank {rank}: autograd.grad() was called for parameter {name}: what it returns is this rank's gradient alone. "
        "Call backward(), whose gradients are averaged; or, where this rank's are wanted, call autograd.grad() within "
        "no_sync()"
    )


def end_graphs(parameters: Iterable[Tensor], rank: int) -> None:
    """Make it an error to differentiate the parameters' gradients, averages that a backward with a graph has left.

    They require gradients, as those of backward(create_graph=True) do, and are on the same memory.
    """
    with torch.enable_grad():
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = _End.apply(parameter, parameter.grad, rank)


class _End(torch.autograd.Function):
    """Gives a gradient its parameter's requires_grad, and no derivative."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, grad: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ReplicaError(
            f"rank {ctx.rank}: something was computed from gradients of backward(create_graph=True) and is "
            "differentiated now, but they are averages, which are not connected to a graph. Take gradients of a "
            "penalty with autograd.grad(), or call that backward within no_sync()"
        )

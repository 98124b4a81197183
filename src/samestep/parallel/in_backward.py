"""Optimizers that step in backward: torch's `_apply_optimizer_in_backward` and `_register_fused_optim`.

They step once a synchronised backward is over, when it is known that no rank failed, so all replicas take the same step
or none does. (torch's class steps bucket by bucket, and can't take back what it did when a rank fails later on.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["fused", "take_over"]


def take_over(parameters: Iterable[nn.Parameter]) -> Callable[[], None] | None:
    """Take the hooks of `_apply_optimizer_in_backward` off `parameters`, as they would step before gradients are
    averaged; return what steps these optimizers and drops the gradients. None if there are no such optimizers."""
    chosen: list[Any] = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if not chosen:
        return None
    from torch.distributed.optim import apply_optimizer_in_backward as home

    for parameter in chosen:
        for handle in home.param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()

    def step() -> None:
        for parameter in chosen:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None

    return step


def fused(
    optimizer: type, parameters: Sequence[nn.Parameter], only: Iterable[Tensor] | None, *args: Any, **kwargs: Any
) -> Callable[[], None]:
    """Return what steps `parameters` (those in `only`, if given) with a functional `optimizer(*args, **kwargs)`.

    Raises ValueError for an optimizer that has no functional form.
    """
    from torch.distributed.optim import as_functional_optim

    functional: Any = as_functional_optim(optimizer, *args, **kwargs)
    wanted = None if only is None else {id(p) for p in only}
    chosen = [p for p in parameters if wanted is None or id(p) in wanted]

    def step() -> None:
        with torch.no_grad():
            for parameter in chosen:
                if parameter.grad is not None:
                    functional.step_param(parameter, parameter.grad)

    return step

"""Finds the models that a program has, without its saying so: what the interpreter knows to be alive."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.run.names import bare_names

__all__ = ["Models"]


class Models:
    """The outermost modules that are alive now, and the names of their parameters."""

    def __init__(self) -> None:
        # Not isinstance, which asks objects for their class: proxies may answer with anything.
        found = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        inner = {id(part) for one in found for part in one.modules() if part is not one}
        self._roots = [one for one in found if id(one) not in inner]
        self._names: dict[int, str] = {}
        for root in self._roots:
            bare = bare_names(root)
            for name, parameter in root.named_parameters():
                self._names.setdefault(id(parameter), bare(name))

    def name(self, parameter: Tensor) -> str | None:
        """The parameter's name without wrappers; None if it belongs to no model."""
        return self._names.get(id(parameter))

    def has_gradients_unknown_to(self, optimized: Iterable[Tensor]) -> bool:
        """Whether some model has gradients, and none of its parameters is among those `optimized`."""
        known = {id(parameter) for parameter in optimized}
        return any(
            any(parameter.grad is not None for parameter in root.parameters())
            and not any(id(parameter) in known for parameter in root.parameters())
            for root in self._roots
        )

    def own_norms(self, optimized: Iterable[Tensor]) -> list[str]:
        """Names of BatchNorm layers, in models with parameters among `optimized`, that use their own batch alone."""
        known = {id(parameter) for parameter in optimized}
        found: dict[str, None] = {}
        for root in self._roots:
            if any(id(parameter) in known for parameter in root.parameters()):
                bare = bare_names(root)
                found.update((bare(name), None) for name, part in root.named_modules() if _is_own(part))
        return list(found)


def _is_own(part: nn.Module) -> bool:
    is_norm = isinstance(part, _BatchNorm) and "SyncBatchNorm" not in {kind.__name__ for kind in type(part).__mro__}
    return is_norm and part.training

"""Parameters as they were when their module was wrapped: what is changed about them afterwards is noticed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from samestep.errors import ReplicaError

__all__ = ["Placed"]


class Placed:
    """Where `parameters` of `module`, by their full names, are on rank `rank`, and of what kind."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], rank: int) -> None:
        self._rank, self._warned = rank, False
        self._kinds = [(name, p, p.device, p.dtype) for name, p in parameters.items()]
        self._places: list[tuple[Mapping[str, Tensor | None], str, str, Tensor]] = []
        for name, parameter in parameters.items():
            path, _, last = name.rpartition(".")
            self._places.append((module.get_submodule(path)._parameters, last, name, parameter))

    def require_unmoved(self) -> None:
        """Raise ReplicaError if one of them was moved or cast."""
        for name, parameter, device, dtype in self._kinds:
            if parameter.device != device or parameter.dtype != dtype:
                raise self._moved(name, device, dtype, parameter)

    def require_same(self, now: Mapping[str, Tensor]) -> None:
        """Raise ReplicaError unless they are still those of the module, which has the parameters `now`."""
        for name, parameter, device, dtype in self._kinds:
            if now.get(name) is not parameter:
                raise self._moved(name, device, dtype, now.get(name))

    def require_none_replaced(self) -> None:
        """Raise ReplicaError if another parameter is in the place of one of them, whose gradient nobody would average.

        Any other leaf there, as functional_call() may put one for a while, is warned about, once.
        """
        for own, last, name, parameter in self._places:
            now = own.get(last)
            if now is parameter or now is None or not (now.requires_grad and now.is_leaf):
                continue
            if isinstance(now, nn.Parameter):
                raise ReplicaError(
                    f"rank {self._rank}: in the place of parameter {name} there is another one now, whose gradient "
                    "would stay this rank's alone: change parameters in place, or wrap the module anew"
                )
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"rank {self._rank}: the wrapped module was called with a tensor of its own for {name}, whose "
                    "gradient is this rank's alone; those of the module's parameters, and of what is computed from "
                    "them, are averaged",
                    stacklevel=2,
                )

    def _moved(self, name: str, device: torch.device, dtype: torch.dtype, now: Tensor | None) -> ReplicaError:
        there = "gone" if now is None else f"{now.dtype} on {now.device}"
        return ReplicaError(
            f"rank {self._rank}: parameter {name} was {dtype} on {device} when the module was wrapped and is {there} "
            "now: move and cast the module first, wrap it then"
        )

"""Mixed precision: parameters, inputs and gradients' exchange in fewer bits, weights and optimizer in full precision.

torch's class swaps the data under its parameters before each forward, and back when backward is over. Here the module's
forward runs with parameters that autograd has cast: gradients come back through the cast, in full precision, and
nothing but the forward ever sees the cast ones. The numbers are the same. As the swap belongs to the modules, what
activation checkpointing computes again in backward is computed in the same precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from samestep.parallel.averaging import Averaged, average, mark
from samestep.parallel.hooks import GradBucket

__all__ = ["Casting", "MixedPrecision", "cast_buffers", "read_config", "reduce_in"]


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of mixed precision; None leaves a dtype as it is. Only floating-point tensors are cast.

    param_dtype: of parameters, inputs and thus the computation. reduce_dtype: of the gradients' exchange; param_dtype,
    if not given. buffer_dtype: of buffers, which stay cast. cast_forward_inputs: whether inputs are cast too.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


def read_config(given: object, module: nn.Module) -> MixedPrecision:
    """Return what `given` asks for: ours, torch's `_MixedPrecision`, or a dataclass with some of the same fields.

    Raises TypeError for anything else, ValueError for what can't be honoured with `module`.
    """
    if not dataclasses.is_dataclass(given) or isinstance(given, type):
        raise TypeError(f"expected a MixedPrecision as mixed_precision, got {given!r}")
    asked = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if asked.pop("keep_low_precision_grads", False):
        raise ValueError(
            "mixed_precision: keep_low_precision_grads can't be honoured, as a parameter's grad has its dtype; leave "
            "it out"
        )
    known = {field.name for field in dataclasses.fields(MixedPrecision)}
    if asked.keys() - known:
        raise TypeError(f"mixed_precision: expected some of {sorted(known)}, got {sorted(asked)}")
    config = MixedPrecision(**asked)
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(config, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"mixed_precision: expected a floating-point dtype as {name}, got {dtype!r}")
    if config.param_dtype is not None and any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise ValueError("mixed_precision: the parameters of a ScriptModule can't be cast; wrap the module unscripted")
    return config


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Cast the floating-point buffers of `module`, but for those named in `ignored`, for good."""
    for name, buffer in module.named_buffers():
        if dtype is not None and buffer.is_floating_point() and name not in ignored:
            buffer.data = buffer.to(dtype)


def reduce_in(dtype: torch.dtype) -> Any:
    """Return the hook that adds gradients in `dtype` and divides the sum, as torch's mixed precision does."""

    def reduce_hook(state: object, bucket: GradBucket) -> Averaged:
        return average(state, bucket, None if bucket.buffer().is_complex() else dtype, divide_first=False)

    mark(reduce_hook)
    return reduce_hook


class Casting:
    """Lets every forward of `module` and its parts run with parameters cast to `dtype`.

    The outermost module whose forward begins casts all below it, each parameter once, and puts the parameters back when
    that forward ends, by an exception too. Parameters that DistributedDataParallel ignores are left alone.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._saved: dict[int, list[tuple[dict[str, Any], str, Any]]] = {}
        self._inside: set[int] = set()
        for part in module.modules():
            part.register_forward_pre_hook(self._enter)
            part.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._inside:
            return
        made: dict[int, Tensor] = {}
        saved = self._saved[id(module)] = []
        for part in module.modules():
            self._inside.add(id(part))
            for name, parameter in part._parameters.items():
                if parameter is not None and self._is_cast(parameter):
                    if id(parameter) not in made:
                        made[id(parameter)] = parameter.to(self._dtype)
                    saved.append((part._parameters, name, parameter))
                    part._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
            if isinstance(part, nn.RNNBase):  # it keeps a list of its own
                saved.append((part.__dict__, "_flat_weights", part._flat_weights))
                part.__dict__["_flat_weights"] = [getattr(part, name) for name in part._flat_weights_names]

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        saved = self._saved.pop(id(module), None)
        if saved is None:
            return
        for place, name, value in saved:
            place[name] = value
        self._inside.difference_update(id(part) for part in module.modules())

    def _is_cast(self, parameter: Tensor) -> bool:
        ignored = getattr(parameter, "_ddp_ignored", False)
        return parameter.is_floating_point() and parameter.dtype != self._dtype and not ignored

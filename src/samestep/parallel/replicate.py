"""Replicas of a module within one process: light copies of its parts, and tensors that lead back to its own.

Where a replica's tensors are those of the module, or copies on another device, gradients find the way back through one
autograd function for each parameter, which adds the replicas' gradients in the order of the replicas. So no two of them
ever race to accumulate, and the sum has the same bits in every run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ReplicaError

__all__ = ["FirstBuffers", "Writes", "replicate", "share"]

_REGISTERED = ("_parameters", "_buffers", "_modules")


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return one replica of `module` for each of `devices`, which may name a device more than once.

    A parameter's replicas are on its own device the parameter's memory, on others copies, and not leaves; in a replica
    `parameters()` has them by the parameters' names. A buffer's memory is shared by the first replica alone. Attributes
    are those of the module at this time, the same objects; what a replica sets stays with the replica. Methods, parts
    and parameters of the module that an attribute holds, or a list, tuple or dict of them, become the replica's own.

    Raises TypeError for scripted and for compiled parts, RuntimeError (torch's own) for parameters without a shape yet.
    """
    parts = dict(module.named_modules())
    for name, part in parts.items():
        _require_replicable(part, name or "the module")
    copies = [{id(part): part._replicate_for_data_parallel() for part in parts.values()} for _ in devices]
    tensors: list[tuple[Tensor, Sequence[Tensor]]]
    tensors = [(p, share(p, devices, aliases=len(devices))) for p in module.parameters()]
    tensors += [(b, share(b, devices, aliases=1)) for b in module.buffers()]
    replicas = []
    for number, replica in enumerate(copies):
        known = {**replica, **{id(tensor): shared[number] for tensor, shared in tensors}}
        for part in parts.values():
            _fill(known[id(part)], part, known)
        replicas.append(known[id(module)])
    return replicas


def share(tensor: Tensor, devices: Sequence[torch.device], *, aliases: int) -> Sequence[Tensor]:
    """Return `tensor` on each of `devices`; its gradient is the sum of theirs, in that order.

    Those on its own device are its memory for the first `aliases` of the devices, and copies for the others.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        shared: tuple[Tensor, ...] = _Share.apply(tensor, devices, aliases)
        return shared
    return [
        tensor if number < aliases and tensor.device == device else _copy(tensor, device)
        for number, device in enumerate(devices)
    ]


class FirstBuffers:
    """What the first of `module`'s replicas has as buffers before it runs, to tell what it put in their place."""

    def __init__(self, module: nn.Module, first: nn.Module) -> None:
        self._pairs = [
            (own, replica, dict(replica._buffers))
            for own, replica in zip(module.modules(), first.modules(), strict=True)
        ]

    def keep(self) -> None:
        """Make what it has put there the module's; what it has written into the module's buffers is there already."""
        for own, replica, before in self._pairs:
            for name, buffer in replica._buffers.items():
                if name not in before or buffer is not before[name]:
                    own._buffers[name] = buffer


class Writes:
    """Notices when replicas write to parameters of `module` in place; those on one device would undo one another's."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        shared = len(set(devices)) < len(devices)
        watched = {name: p for name, p in module.named_parameters() if shared and not p.is_inference()}
        self._versions = {name: (p, p._version) for name, p in watched.items()}

    def refuse(self) -> None:
        """Raise ReplicaError if any did."""
        written = [name for name, (parameter, version) in self._versions.items() if parameter._version != version]
        if written:
            raise ReplicaError(
                f"forward changed {', '.join(written)} in place, while several replicas on one device share the memory "
                "of parameters: what is there now depends on their timing. Make it a buffer, of which each replica has "
                "its own (the first one's is kept), or change it outside of forward"
            )


class _Share(torch.autograd.Function):
    """One tensor on several devices; backwards the sum, in their order, of the gradients that there are."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, devices: Sequence[torch.device], aliases: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = tensor.device
        return tuple(
            tensor.detach() if number < aliases and tensor.device == device else _copy(tensor, device)
            for number, device in enumerate(devices)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        total = None
        for gradient in gradients:
            if gradient is not None:
                gradient = gradient.to(ctx.home)
                total = gradient if total is None else _plus(total, gradient)
        return total, None, None


def _plus(a: Tensor, b: Tensor) -> Tensor:
    return b + a if a.is_sparse and not b.is_sparse else a + b  # torch adds a sparse tensor to a dense one only


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=device.type != "cpu", copy=True)  # the CPU would read what isn't there yet


def _fill(replica: nn.Module, original: nn.Module, known: Mapping[int, Any]) -> None:
    """Give `replica` its own tensors and parts; `known` has them by the ids of the originals."""
    state = vars(replica)
    for field in _REGISTERED:
        items = vars(original)[field].items()
        state[field] = {name: None if item is None else known[id(item)] for name, item in items}
    for name, value in list(state.items()):
        if name not in _REGISTERED:
            state[name] = _translated(value, known)
    # Under this name torch's replicas have them, whose parameters() has nothing.
    state["_former_parameters"] = {name: p for name, p in state["_parameters"].items() if p is not None}


def _translated(value: Any, known: Mapping[int, Any]) -> Any:
    """Return what a replica is to have for an attribute; only collections that begin with a part are looked into."""
    if type(value) in (list, tuple) and value and _is_part(value[0], known):
        return type(value)(_own(item, known) for item in value)
    if type(value) is dict and value and _is_part(next(iter(value.values())), known):
        return {key: _own(item, known) for key, item in value.items()}
    return _own(value, known)


def _is_part(value: Any, known: Mapping[int, Any]) -> bool:
    return _own(value, known) is not value


def _own(value: Any, known: Mapping[int, Any]) -> Any:
    if isinstance(value, MethodType) and id(value.__self__) in known:
        return MethodType(value.__func__, known[id(value.__self__)])
    return known.get(id(value), value)


def _require_replicable(part: nn.Module, name: str) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        what, instead = "is scripted, and its parameters can't be replaced from Python", "give the module itself"
    elif _is_compiled(part):
        what, instead = "is compiled, and every replica would run the original", "give the module before torch.compile"
    else:
        return
    raise TypeError(f"{name} ({type(part).__name__}) can't be replicated: it {what}; {instead}")


def _is_compiled(part: nn.Module) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # whatever is compiled has imported it
    wrapped = compiler is not None and isinstance(part, compiler.OptimizedModule)
    return wrapped or vars(part).get("_compiled_call_impl") is not None

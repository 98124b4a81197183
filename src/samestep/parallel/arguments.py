"""What DistributedDataParallel's arguments ask for, checked; and descriptions of the parameters it was given.

Texts of errors that torch's class raises too are torch's own: scripts and tests look for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samestep.parallel.plan import Parameter

__all__ = [
    "buffer_owners",
    "buffers_follow",
    "caps_in_bytes",
    "check_delayed",
    "check_devices",
    "check_trainable",
    "choose_group",
    "describe_parameters",
    "replicas_within",
]

_MIB = 1 << 20
_DEFAULT_CAPS_MIB = (1, 25)  # torch's: a small first bucket, so that the first exchange starts early

Device = int | str | torch.device
R = TypeVar("R", bound=nn.Module)


def choose_group(process_group: Any, device_mesh: Any, module: nn.Module) -> Any:
    """Return the process group that the two arguments name together; None for the default one.

    If the mesh is part of another one, `module`'s DTensor parameters, which are sharded over the rest of that, are put
    into the form in which replicas of them can be averaged: torch's own function does it.
    """
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if _root_of(device_mesh) != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def buffers_follow(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return whether buffers are kept alike in training, and whether they are made so at the start.

    As in torch, forward_sync_buffers=False leaves the start alone, broadcast_buffers=False does not, and warns.
    """
    if broadcast_buffers is not None:
        ignored = "" if forward_sync_buffers is None else "; it is ignored, as forward_sync_buffers is given too"
        warnings.warn(
            "`broadcast_buffers` is deprecated in torch 2.13; use `forward_sync_buffers`, which other than "
            f"broadcast_buffers=False leaves alone that buffers are sent at the start{ignored}",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    return broadcast_buffers is not False, broadcast_buffers is not False


def check_delayed(named: Any, hooked: Any, parameters: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the parameters that are to be exchanged last, from `delay_all_reduce_named_params`.

    Raises ValueError unless it names some of `parameters`, and `hooked` (`param_to_hook_all_reduce`) is one of them, or
    neither is given.
    """
    if (named is None) != (hooked is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    if named is None:
        return frozenset()
    wrong = [name for name, parameter in named if parameters.get(name) is not parameter]
    if wrong:
        raise ValueError(f"delay_all_reduce_named_params: {wrong} are not the module's parameters of these names")
    if not any(hooked is parameter and parameter.requires_grad for parameter in parameters.values()):
        raise ValueError("param_to_hook_all_reduce: expected a parameter of the module that requires a gradient")
    return frozenset(name for name, _ in named)


def replicas_within(module: nn.Module, ours: type[R]) -> list[R]:
    """Return what in `module` is wrapped in `ours` already. Raises ValueError for what is wrapped in torch's class."""
    found = []
    for name, part in module.named_modules():
        if isinstance(part, ours):
            found.append(part)
        elif isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name or 'the module'} is wrapped in torch's DistributedDataParallel, and both would average its "
                "gradients: wrap it once"
            )
    return found


def check_trainable(parameters: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if none of `parameters` requires a gradient, or some have no shape yet."""
    if not any(p.requires_grad for p in parameters.values()):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters.values()):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
            "pass to correctly initialize the modules"
        )


def check_devices(
    parameters: Collection[Tensor], device_ids: Sequence[Device] | None, output_device: Device | None
) -> torch.device | None:
    """Return the device that inputs are to be moved to, None for none.

    Raises ValueError if the arguments do not fit to where the parameters are.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {p.device for p in parameters}
    kinds = {device.type for device in devices}
    if len(kinds) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {kinds}."
        )
    if not device_ids and output_device is None:
        return None
    if kinds == {"cpu"} or len(devices) > 1 or not device_ids:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
            f"{device_ids}, output_device {output_device}, and module parameters {devices}."
        )
    asked, (there,) = _device(device_ids[0], next(iter(kinds))), devices
    if asked != there:
        raise ValueError(f"device_ids names {asked}, but the module is on {there}: move the module there first")
    return asked


def caps_in_bytes(cap_mib: float | None, caps_mib: Sequence[float] | None) -> tuple[int, ...]:
    """Return the caps of the first, second, ... bucket in bytes, from the two arguments in MiB."""
    if cap_mib is not None and caps_mib is not None:
        raise ValueError("bucket_cap_mb and bucket_cap_mb_list both say how large buckets are; give one of them")
    chosen: Sequence[float] = _DEFAULT_CAPS_MIB
    if cap_mib is not None:
        chosen = (cap_mib,)
    elif caps_mib is not None:
        chosen = caps_mib
    if not chosen or min(chosen) < 0:
        raise ValueError(f"expected bucket caps of at least 0 MiB, at least one, got {list(chosen)}")
    return tuple(int(cap * _MIB) for cap in chosen)


def buffer_owners(module: nn.Module, ignored: Collection[str]) -> list[tuple[nn.Module, str]]:
    """Return where the buffers of `module` are that its replicas share: the tensors themselves may be replaced."""
    places = [(name.rpartition("."), name) for name, _ in module.named_buffers()]
    return [(module.get_submodule(path), last) for (path, _, last), name in places if name not in ignored]


def describe_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> list[Parameter]:
    """Describe `parameters`, in order; those of embeddings made with sparse=True get sparse gradients."""
    sparse = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }
    return [
        Parameter(i, name, tuple(p.shape), str(p.dtype), str(p.device), p.element_size(), id(p) in sparse)
        for i, (name, p) in enumerate(parameters.items())
    ]


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # until torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def _device(device: Device, kind: str) -> torch.device:
    if isinstance(device, int):
        return torch.device(kind, device)
    named = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(named) == "cuda" else named

"""What DistributedDataParallel's arguments ask for, checked; and descriptions of the parameters it was given.

Texts of errors that torch's class raises too are torch's own: scripts and tests look for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.parallel.plan import Parameter

__all__ = [
    "buffer_owners",
    "caps_in_bytes",
    "check_devices",
    "check_trainable",
    "choose_group",
    "describe_parameters",
    "refuse",
]

_MIB = 1 << 20
_DEFAULT_CAPS_MIB = (1, 25)  # torch's: a small first bucket, so that the first exchange starts early

Device = int | str | torch.device


def refuse(**arguments: Any) -> None:
    """Raise ValueError for any argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"samestep's DistributedDataParallel does not support {name}; leave it out (got {value!r})"
            )


def choose_group(process_group: Any, device_mesh: Any) -> Any:
    """Return the process group that the two arguments name together; None for the default one."""
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


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


def _device(device: Device, kind: str) -> torch.device:
    if isinstance(device, int):
        return torch.device(kind, device)
    named = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(named) == "cuda" else named

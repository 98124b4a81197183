"""DataParallel: one process, several devices; each runs a replica of the module on its part of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from samestep.parallel.names import accept_both_forms
from samestep.parallel.outside_graphs import outside_graphs
from samestep.parallel.replica_threads import Draws, bound_to_this_thread, run_in_turn, run_together
from samestep.parallel.replicate import FirstBuffers, Writes, replicate
from samestep.parallel.scatter import gather, scatter

__all__ = ["DataParallel"]

Device = int | str | torch.device

_SHOWN = 3  # tensors named in an error


class DataParallel(nn.Module):
    """Wrap `module` so that a batch is split over several devices of this process, which work at the same time.

    Takes the arguments of torch.nn.DataParallel by their names and does what that class does: tensors in the inputs are
    cut along `dim`, each device's replica runs in a thread on its piece, outputs are joined on `output_device`, and in
    backward the replicas' gradients are summed into the one set of parameters. Beyond that class:

    - Devices may be CPUs: `device_ids=["cpu", "cpu"]` is two threads on cores.
    - Gradients are added in the order of the devices: the same bits in every run, equal to those of the pieces one
      after the other. A parameter that no replica used keeps None.
    - Pieces and whole inputs go together: a batch smaller than the number of devices with other inputs that are no
      tensors is no error, and tensors that would be cut into different numbers of pieces are one.
    - A replica has `parameters()`; methods and parts that an attribute holds are the replica's own.
    - Buffers that the first replica sets anew are kept, as those are that it writes to.
    - Dataclasses are containers too. Attributes that the wrapper does not have are the module's. `load_state_dict`
      takes names with and without "module.".

    Replicas take turns, in order and in this thread, where running at the same time could give other numbers: in the
    first forward in training and the first in evaluation; and ever after if that drew random numbers from a generator
    which replicas share (the CPU's, or that of a device named twice). So dropout differs from replica to replica and
    repeats with the seed. A forward that draws for the first time later is run again, in turn. They also take turns
    under what holds in one thread alone: torch.set_default_device, saved-tensor hooks, other function and dispatch
    modes. Python's and numpy's generators are not looked after.

    Arguments:
        module: the model; its parameters and buffers are on the first device. With a single device, it is moved there.
        device_ids: CUDA devices by number, or any devices by name or as torch.device, in any number; None is all CUDA
            devices. Without any, or with [], the module runs as it is.
        output_device: where outputs go; the first device by default.
        dim: the dimension along which tensors are cut and joined.

    Raises ValueError for devices that are not there or neither CUDA nor CPU. Forward raises RuntimeError for parameters
    and buffers elsewhere than on the first device, TypeError for scripted and compiled modules, ReplicaError if
    replicas of one device write to their parameters; and the first failed replica's error, of its own type where one
    can be made of a text, naming replica and device.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a torch.nn.Module to wrap, got {type(module).__name__}")
        if device_ids is None:
            device_ids = list(range(torch.cuda.device_count()))
        devices = [_device(device, "device_ids") for device in device_ids]
        self.module, self.dim = module, dim
        self.device_ids = [_id(device) for device in devices]
        self._draws: dict[bool, bool] = {}  # what is known, for training and for evaluation
        if devices:
            self.src_device_obj = devices[0]
            target = devices[0] if output_device is None else _device(output_device, "output_device")
            self.output_device = _id(target)
        if len(devices) == 1:
            module.to(devices[0])
        self.register_load_state_dict_pre_hook(accept_both_forms)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call replicas of the module on pieces of the inputs and return their outputs, joined."""
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        return self._forward(inputs, kwargs)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Device]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """Return the positional and the keyword inputs of each replica; of a single one if there are no inputs."""
        if not inputs and not kwargs:
            return ((),), ({},)
        pieces = scatter((inputs, kwargs or {}), [_device(device, "device_ids") for device in device_ids], self.dim)
        return tuple(piece[0] for piece in pieces), tuple(piece[1] for piece in pieces)

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> list[nn.Module]:
        """Return a replica of `module` for each of the devices."""
        return replicate(module, [_device(device, "device_ids") for device in device_ids])

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        """Return what the replicas return for their inputs, run at the same time or in turn."""
        devices = [_device(device, "device_ids") for device in self.device_ids[: len(replicas)]]
        calls = list(zip(replicas, inputs, kwargs, devices, strict=True))
        mode, draws = self.module.training, Draws(devices)
        if len(calls) == 1 or self._draws.get(mode, True) or bound_to_this_thread():
            outputs = run_in_turn(calls)
            if len(calls) > 1:
                self._draws[mode] = self._draws.get(mode, False) or draws.happened()
            return outputs
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        outputs = run_together(calls)
        if draws.happened():
            self._draws[mode] = True
            draws.undo()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            raise _DrewError
        return outputs

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Return the replicas' outputs as one, on `output_device`."""
        return gather(outputs, _device(output_device, "output_device"), self.dim)

    @outside_graphs
    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._require_at_home()
        try:
            return self._run(inputs, kwargs)
        except _DrewError:
            pass
        return self._run(inputs, kwargs)  # not within the except clause, where all of the first attempt is still held

    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts, keywords = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.device_ids) == 1:
            output, target = self.module(*parts[0], **keywords[0]), _device(self.output_device, "output_device")
            return output if target == self.src_device_obj else scatter(output, [target])[0]
        used = self.device_ids[: len(parts)]
        replicas = self.replicate(self.module, used)
        first = FirstBuffers(self.module, replicas[0])
        writes = Writes(self.module, [_device(device, "device_ids") for device in used])
        outputs = self.parallel_apply(replicas, parts, keywords)
        writes.refuse()
        first.keep()
        return self.gather(outputs, self.output_device)

    def _require_at_home(self) -> None:
        home = self.src_device_obj
        tensors = chain(self.module.named_parameters(), self.module.named_buffers())
        elsewhere = [(name, tensor.device) for name, tensor in tensors if tensor.device != home]
        if elsewhere:
            named = ", ".join(f"{name} on {device}" for name, device in elsewhere[:_SHOWN])
            more = f" and {len(elsewhere) - _SHOWN} more" if len(elsewhere) > _SHOWN else ""
            raise RuntimeError(
                f"module must have its parameters and buffers on device {home} (device_ids[0]) but found one of them "
                f"on device: {elsewhere[0][1]} ({named}{more}); move it with module.to({str(home)!r})"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self.module, name)


class _DrewError(Exception):
    """Replicas that ran at the same time drew random numbers, in an order that depends on their timing."""


def _device(device: Device, argument: str) -> torch.device:
    """Return the device that is meant, with its number if it is a CUDA device."""
    if isinstance(device, int):
        named = torch.device("cpu") if device == -1 and argument == "output_device" else torch.device("cuda", device)
    else:
        named = torch.device(device)
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type != "cuda":
        raise ValueError(f"{argument}: expected CUDA devices or the CPU, got {named}")
    count = torch.cuda.device_count()
    number = torch.cuda.current_device() if count and named.index is None else named.index or 0
    if number >= count:
        raise ValueError(
            f"{argument} names {device!r}, but there are {count} CUDA devices; leave it out for all there are (without "
            'any, the module runs as it is), or give "cpu" once for each thread'
        )
    return torch.device("cuda", number)


def _id(device: torch.device) -> Device:
    """Return a device as torch.nn.DataParallel names it: a CUDA device by its number."""
    return device.index if device.type == "cuda" else device

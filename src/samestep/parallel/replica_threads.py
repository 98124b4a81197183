"""Running the replicas of a module: all at once, each in a thread, or in turn."""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Draws", "bound_to_this_thread", "run_in_turn", "run_together"]

Call = tuple[nn.Module, Sequence[Any], Mapping[str, Any], torch.device]
"""A replica, its positional and keyword inputs, and its device."""


def run_in_turn(calls: Sequence[Call]) -> list[Any]:
    """Return what the replicas return, run one after the other in this thread; see `run_together` for errors."""
    outputs: list[Any] = []
    for number, (replica, inputs, kwargs, device) in enumerate(calls):
        try:
            with _on(_stream(device)):
                outputs.append(replica(*inputs, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again, with its place
            failure = _placed(error, number, device)
        else:
            continue
        raise failure
    return outputs


def run_together(calls: Sequence[Call]) -> list[Any]:
    """Return what the replicas return, run at the same time: the first in this thread, the others in their own.

    Grad mode, inference mode, autocast, context variables and CUDA streams of this thread hold in the others.

    Returns or raises when all have ended. If some raised, the error of the first of them is raised, of the same type if
    that can be made of a text, else a RuntimeError; its text names the replica and the device and has the traceback.
    """
    outputs: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}
    modes = _modes({device.type for *_, device in calls})
    streams = [_stream(device) for *_, device in calls]

    def run(number: int) -> None:
        replica, inputs, kwargs, _ = calls[number]
        try:
            with modes(), _on(streams[number]):
                outputs[number] = replica(*inputs, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors[number] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, number), name=f"samestep replica {number}")
        for number in range(1, len(calls))
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        run(0)
    finally:
        for thread in started:
            thread.join()
    if errors:
        failure = _placed(errors[min(errors)], min(errors), calls[min(errors)][-1])
        errors.clear()  # their tracebacks hold all that the replicas had in their hands
        raise failure
    return outputs


def bound_to_this_thread() -> bool:
    """Tell whether something is in force that holds in this thread alone and can't be handed to another.

    Function and dispatch modes are such (torch.set_default_device is one), and hooks on tensors saved for backward.
    """
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(False)
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return hooks is not None or modes > 0


class Draws:
    """Notices when random numbers are drawn from a generator that replicas on `devices` share.

    That is the CPU's, whatever the devices are, and that of a CUDA device which is named twice.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        twice = {d.index for d in devices if d.type == "cuda" and list(devices).count(d) > 1}
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in sorted(twice))]
        self._before: list[Tensor] = [generator.get_state() for generator in self._generators]

    def happened(self) -> bool:
        pairs = zip(self._generators, self._before, strict=True)
        return any(not torch.equal(generator.get_state(), before) for generator, before in pairs)

    def undo(self) -> None:
        for generator, before in zip(self._generators, self._before, strict=True):
            generator.set_state(before)


def _modes(kinds: set[str]) -> Callable[[], ExitStack]:
    """Return what makes, in another thread, the modes that are in force in this one, for devices of these kinds."""
    grad, inference, cached = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
    )
    casts = {kind: torch.get_autocast_dtype(kind) for kind in {"cpu", *kinds} if torch.is_autocast_enabled(kind)}

    def enter() -> ExitStack:
        stack = ExitStack()
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in casts.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
        return stack

    return enter


def _stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _on(stream: Any) -> AbstractContextManager[Any]:
    """Make the current device and stream those of `stream`."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class _Verbatim(str):
    """A text that KeyError shows as it is, where it would show the quoted form of any other."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _placed(error: BaseException, number: int, device: torch.device) -> BaseException:
    """Return an error like `error` that says, in the words of torch's class, where; an interrupt stays what it is."""
    if not isinstance(error, Exception):
        return error
    place = device.index if device.type == "cuda" else device
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = _Verbatim(f"Caught {type(error).__name__} in replica {number} on device {place}.\nOriginal {told}")
    try:
        again = type(error)(text)
    except Exception:  # noqa: BLE001 - it wants other arguments than a text, whatever it says about that
        return RuntimeError(text)
    for name, value in vars(error).items():
        vars(again).setdefault(name, value)
    return again

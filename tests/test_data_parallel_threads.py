"""DataParallel: what holds in the threads of its replicas, when they take turns, and what becomes of errors."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.parallel.data_parallel import DataParallel


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


class Probe(nn.Module):
    """Notes what `look` finds where each replica runs, and in which thread; draws nothing."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.look, self.seen, self.threads = nn.Linear(2, 2), look, list[Any](), set[str]()

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        self.seen.append((self.look(), output.dtype, output.requires_grad))
        self.threads.add(threading.current_thread().name)  # an identifier serves again when its thread has ended
        return output


_variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def look() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        _variable.get(),
    )


@pytest.mark.parametrize(
    "mode",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    ],
)
def test_the_callers_modes_hold_in_the_threads(mode: Callable[[], Any]) -> None:
    probe = Probe(look)
    model = DataParallel(probe, cpus(3))
    model(torch.ones(3, 2))
    probe.seen.clear()
    probe.threads.clear()
    token = _variable.set(5)
    with mode():
        plain = probe.layer(torch.ones(3, 2))
        expected = look(), plain.dtype, plain.requires_grad
        model(torch.ones(3, 2))
    _variable.reset(token)
    assert probe.seen == [expected] * 3
    assert len(probe.threads) == 3


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_holds_in_one_thread_alone_makes_replicas_take_turns_there() -> None:
    probe = Probe(lambda: torch.empty(1).dtype)
    model = DataParallel(probe, cpus(2))
    packed: list[Tensor] = []
    contexts: list[Any] = [
        torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t),
        torch.device("cpu"),
        Passing(),
    ]
    for _ in range(2):
        model(torch.ones(2, 2))
    assert len(probe.threads) == 2
    for context in contexts:
        probe.threads.clear()
        with context:
            model(torch.ones(2, 2)).sum().backward()
        assert probe.threads == {threading.current_thread().name}
    assert packed


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.errors: dict[int, Callable[[], BaseException]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if int(x[0, 0]) in self.errors:
            raise self.errors[int(x[0, 0])]()
        return self.layer(x)


class CodedError(RuntimeError):
    code = 0


class TwoPartError(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left, right)


def coded() -> CodedError:
    error = CodedError("coded")
    error.code = 7
    return error


@pytest.mark.parametrize("taught", [False, True])
def test_errors_keep_their_type_and_name_the_replica(taught: bool) -> None:
    module = Failing()
    model = DataParallel(module, cpus(3))
    batch = torch.tensor([[0.0], [1.0], [2.0]])
    if taught:
        model(batch)
    cases: list[tuple[Callable[[], BaseException], type[BaseException], str]] = [
        (lambda: ValueError("a reason"), ValueError, "Caught ValueError"),
        (lambda: torch.OutOfMemoryError("no room"), torch.OutOfMemoryError, "Caught OutOfMemoryError"),
        (lambda: KeyError("key"), KeyError, "Caught KeyError"),
        (coded, CodedError, "Caught CodedError"),
        (lambda: TwoPartError(1, 2), RuntimeError, "Caught TwoPartError"),
    ]
    for make, kind, words in cases:
        module.errors = {1: make, 2: lambda: ArithmeticError("a later one")}
        with pytest.raises(kind) as caught:
            model(batch)
        text = str(caught.value)
        assert text.startswith(f"{words} in replica 1 on device cpu.\nOriginal Traceback (most recent call last):\n")
        assert "in forward" in text
        assert text.rstrip().endswith("".join(str(make())))
        assert getattr(caught.value, "code", 7) == 7
    module.errors = {2: SystemExit}
    with pytest.raises(SystemExit):
        model(batch)
    module.errors = {}
    assert len(model(batch)) == 3

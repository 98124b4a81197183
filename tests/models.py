"""Models and worlds that several test files use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import Op, describe
from samestep.parallel.distributed import DistributedDataParallel

__all__ = ["Choosing", "Recorder", "equal", "grads", "linear", "mlp", "samples", "wrap"]


def linear(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """A layer of 4 x 2 weights that depend on the seed alone, whatever other threads draw."""
    layer = nn.Linear(4, 2, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def samples(count: int, seed: int = 0, width: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64).to(
        dtype
    )


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def wrap(module: nn.Module, communicator: Communicator, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=communicator, **options)


def equal(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


class Recorder(Communicator):
    """Passes everything on to `inner` and notes what was started; `before` is called with each op first."""

    def __init__(self, inner: Communicator, before: Callable[[Op], None] = lambda op: None) -> None:
        self.inner, self.before, self.log = inner, before, list[str]()
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def _start(self, op: Op) -> Work:
        self.before(op)
        self.log.append(describe(op))
        return self.inner.start(op)

    def _split(self, ranks: Sequence[int]) -> Communicator | None:
        return self.inner.split(ranks)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.other = linear(0), linear(1)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        result: Tensor = self.always(x) + (self.other(x) if both else 0)
        return result

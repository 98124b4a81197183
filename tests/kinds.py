"""Kinds of models, each with its own way from its input to a loss: `loss(call, x)`, where `call` is the model, wrapped.

`rank` is set where ranks are to differ. `rounding` is how far single precision may be from the mean by hand.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from models import linear, mlp, samples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["KINDS"]


@dataclasses.dataclass
class Output:
    loss: Tensor
    name: str = "loss"
    rest: Any = None


class Named(NamedTuple):
    left: Tensor
    right: Any


Old = namedtuple("Old", ["a", "b"])


class Model(nn.Module):
    rank, rounding = 0, 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()


class Nested(Model):
    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return {"a": [Output(y, rest=(y + 1, None)), "text"], "b": {3: Named(y * 2, Old(1, y * 3))}, "n": 7}

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        out = call(x)
        total: Tensor = out["a"][0].loss.square().sum() + out["a"][0].rest[0].sum() + out["b"][3].left.sum()
        return total + out["b"][3].right.b.sum()


class Opaque(Model):
    """Returns what nobody can look into: the parameters' own hooks have to do."""

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        y = self.body(x)
        return lambda: y

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(x)().square().sum()


class NoTensors(Model):
    """Keeps its output to itself and returns a number."""

    def forward(self, x: Tensor) -> int:
        self.kept = self.body(x).square().sum()
        return len(x)

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(x) * self.kept


class SeveralForwards(Model):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return (call(x) * call(x + 1)).sum() + sum(call(x * n).square().mean() for n in range(2, 2 + self.rank))


class Checkpointed(Model):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.body, nn.Identity()):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(x.clone().requires_grad_()).square().sum()


class Reentrant(Checkpointed):
    reentrant = True


class AroundTheWrapper(Model):
    """A checkpoint whose function calls the wrapped module: forward runs once more within backward."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        y: Tensor = checkpoint(call, x.clone().requires_grad_(), use_reentrant=False)
        return y.square().sum()


class AroundTheWrapperReentrant(AroundTheWrapper):
    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        y: Tensor = checkpoint(call, x.clone().requires_grad_(), use_reentrant=True)
        return y.square().sum()


class Autocast(Model):
    rounding = 0.02  # of bfloat16; the bits are compared with torch's below

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(x.float())
        assert y.dtype is torch.bfloat16
        return y.float().square().mean()


class Complex(Model):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
        self.small = nn.Parameter(torch.tensor([0.5 + 1j], dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.turn * self.small).abs()

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(x).square().sum()


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(samples(9, 3), freeze=False, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(self.table(torch.tensor([1, 1, 4 + self.rank, self.rank])))
        return y

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(x).square().sum()


class Strides(Model):
    """Parameters in every kind of order."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 2, 1, dtype=torch.float64).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(samples(3, 5).t())
        self.every_other = nn.Parameter(samples(6, 6)[::2])
        self.none = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.one = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        with torch.no_grad():
            for parameter in self.image.parameters():
                parameter.fill_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).t().reshape(1, 2, -1, 1).to(memory_format=torch.channels_last)
        z: Tensor = self.image(y).sum() * self.turned.square().sum() * self.one
        return z + (self.every_other[:, :2] * x[0, 0]).sum() + self.none.sum()

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(x) * 1


class InPlace(Model):
    """Its output is changed in place by who called it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        y: Tensor = call(x)
        y *= 2
        return y.square().sum()


class ByMethod(Model):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("never called")

    def twice(self, x: Tensor) -> Tensor:
        y: Tensor = 2 * self.body(x)
        return y

    def loss(self, call: Any, x: Tensor) -> Tensor:
        return call.twice(x).square().sum()


class ByMethodReentrant(ByMethod):
    def twice(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=True)
        z: Tensor = checkpoint(lambda y: self.body(torch.cat([y, y], 1)), y, use_reentrant=True)
        return z

    def loss(self, call: Any, x: Tensor) -> Tensor:
        return call.twice(x.clone().requires_grad_()).square().sum()


class Shared(Model):
    """One layer in two places, and one used by two ranks of three only."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = self.body
        self.some = linear(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) + self.tied(x * 2)
        return y if self.rank == 1 else y + self.some(x)

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        return call(x).square().sum()


KINDS = [
    Nested,
    Opaque,
    NoTensors,
    SeveralForwards,
    Checkpointed,
    Reentrant,
    AroundTheWrapper,
    AroundTheWrapperReentrant,
    Autocast,
    Complex,
    Sparse,
    Strides,
    InPlace,
    ByMethod,
    ByMethodReentrant,
    Shared,
]

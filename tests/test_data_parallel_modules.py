"""DataParallel: modules of many kinds, what their replicas have, and which can't be replicated."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import equal, grads, linear, wrap
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.parallel.data_parallel import DataParallel
from samestep.parallel.replicate import replicate
from samestep.testing.ranks import run_threads

CPU = torch.device("cpu")


def batch(count: int = 6, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(5))


# Modules of many kinds: outputs and gradients as those of the module itself


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in [*self.weights, self.named["a"]]:
            x = x * weight
        return x + self.named.b


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        assert self.again is self.first
        assert self.second.weight is self.first.weight
        return self.again(self.second(self.first(x).tanh()))


class Attributes(nn.Module):
    """Holds parts of itself in ways that no registration shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both, self.chosen = [self.a, self.b], {"b": self.b}
        self.pair, self.function = (self.a.weight, "text"), self.twice
        self.b.__dict__["parent"] = self
        self.shared: list[int] = []

    def twice(self, x: Tensor) -> Tensor:
        assert self.both[0] is self.a
        assert self.chosen["b"] is self.b
        assert self.b.parent is self
        assert self.pair[0] is self.a.weight
        self.shared.append(1)
        return self.both[0](x) + self.chosen["b"](x) * self.pair[0].sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        return self.lstm(x.view(-1, 2, 2))[0]


class Embedded(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.abs() * 3).long() % 5)


def patched() -> nn.Module:
    model = nn.Linear(4, 4)
    forward = model.forward
    model.forward = types.MethodType(lambda self, x: forward.__func__(self, x).tanh(), model)  # type: ignore[attr-defined,method-assign]
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "parameter lists": Lists,
    "tied": Tied,
    "attributes": Attributes,
    "recurrent": Lstm,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "embedding": lambda: Embedded(sparse=False),
    "sparse embedding": lambda: Embedded(sparse=True),
    "weight norm, old": lambda: weight_norm(nn.Linear(4, 4)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "traced graph": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))),
    "patched forward": patched,
    "frozen": frozen,
    "complex": lambda: nn.Linear(4, 4, dtype=torch.complex64),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_outputs_are_the_modules_own(kind: str) -> None:
    plain, module = (made(KINDS[kind]) for _ in range(2))
    model = DataParallel(module, ["cpu"] * 3)
    inputs = batch().to(next(plain.parameters()).dtype) if "embedding" not in kind else batch()
    if kind == "attention":
        inputs = batch(6, 8).view(6, 2, 4)
    expected = plain(inputs)
    expected.abs().square().sum().backward()
    for _ in range(3):
        model.zero_grad()
        output = model(inputs)
        torch.testing.assert_close(output, expected)
        output.abs().square().sum().backward()
        for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert p.grad.layout == q.grad.layout
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), rtol=1e-4, atol=1e-5)
    if kind == "attributes":
        assert len(model.module.shared) == 9


def test_old_spectral_norm_keeps_the_first_replicas_vectors() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        plain = spectral_norm(nn.Linear(4, 4))
    model = DataParallel(copy.deepcopy(plain), ["cpu"] * 3)
    for _ in range(3):
        torch.testing.assert_close(model(batch()), plain(batch()))
        assert torch.equal(model.module.weight_u, plain.weight_u)


# What a replica has


def test_replicas_have_parameters_but_are_not_the_module() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    replicas = replicate(module, [CPU, CPU])
    for replica in replicas:
        assert [name for name, _ in replica.named_parameters()] == [name for name, _ in module.named_parameters()]
        for mine, own in zip(replica.parameters(), module.parameters(), strict=True):
            assert mine is not own
            assert not mine.is_leaf
            assert mine.data_ptr() == own.data_ptr()
        assert replica[0]._former_parameters.keys() == {"weight", "bias"}
    own = [buffer.data_ptr() for buffer in module.buffers()]
    assert [b.data_ptr() for b in replicas[0].buffers()] == own
    assert not {b.data_ptr() for b in replicas[1].buffers()} & set(own)
    with torch.no_grad():
        for replica in replicate(module, [CPU, CPU]):
            assert all(mine is p for mine, p in zip(replica.parameters(), module.parameters(), strict=True))


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.counter = nn.Linear(4, 4), 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("latest", None)
        self.register_buffer("summed", torch.zeros(4))
        self.latest: Tensor | None
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        self.seen += len(x)
        self.latest = x.detach()
        self.summed = self.summed + x.detach().sum(0)
        self.register_buffer("late", x.detach()[0], persistent=False)
        return self.layer(x) + self.summed


def test_buffers_are_what_the_first_replica_leaves() -> None:
    model, plain = DataParallel(Stateful(), ["cpu"] * 2), Stateful()
    for _ in range(3):
        model(batch())
        plain(batch()[:3])
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.module.get_buffer(name), buffer), name
    assert {name for name, _ in model.module.named_buffers()} == {"seen", "latest", "summed", "late"}
    assert model.module.counter == 0


def test_a_buffer_with_a_gradient_gets_the_sum() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(4, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.shift

    model = DataParallel(Shifted(), ["cpu"] * 2)
    model(batch()).sum().backward()
    torch.testing.assert_close(model.module.shift.grad, batch().sum(0))


def test_hooks_of_the_module_run_in_every_replica_and_the_wrappers_once() -> None:
    model, calls = DataParallel(nn.Linear(4, 4), ["cpu"] * 3), list[str]()
    model.module.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.module.register_forward_hook(lambda *_: calls.append("after"))
    model.module.register_full_backward_hook(lambda *_: calls.append("back"))
    model.register_forward_hook(lambda *_: calls.append("wrapper"))
    for _ in range(2):
        calls.clear()
        model(batch().requires_grad_()).sum().backward()
        assert sorted(calls) == ["after"] * 3 + ["back"] * 3 + ["before"] * 3 + ["wrapper"]


def test_it_may_be_a_replica_of_distributed_data_parallel() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(DataParallel(linear(), ["cpu"] * 2), comm)
        for _ in range(2):
            model.zero_grad()
            model(batch().double()[comm.rank :]).sum().backward()
        return grads(model)

    plain = linear()
    (sum(plain(batch().double()[rank:]).sum() for rank in range(2)) / 2).backward()
    first, second = run_threads(rank, 2)
    assert equal(first, second)
    for found, expected in zip(first, grads(plain), strict=True):
        torch.testing.assert_close(found, expected)


# What can't be replicated


class Rewriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


def test_parameters_written_in_forward_are_refused() -> None:
    model = DataParallel(nn.Sequential(Rewriting()), ["cpu"] * 2)
    for _ in range(2):
        with pytest.raises(ReplicaError, match=r"^forward changed 0\.weight in place"):
            model(batch())
    assert len(DataParallel(Rewriting(), ["cpu"])(batch())) == 6


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    model = DataParallel(nn.Sequential(torch.jit.trace(nn.Linear(4, 4), batch())), ["cpu"] * 2)
    with pytest.raises(TypeError, match=r"^0 \(TopLevelTracedModule\) can't be replicated: it is scripted"):
        model(batch())


def test_compiled_modules_are_refused() -> None:
    inside = nn.Linear(4, 4)
    inside.compile(backend="eager")
    for module in (torch.compile(nn.Linear(4, 4), backend="eager"), inside):
        model: Any = DataParallel(nn.Sequential(module), ["cpu"] * 2)
        with pytest.raises(TypeError, match=r"^0 .* can't be replicated: it is compiled, .* before torch.compile"):
            model(batch())
    whole = torch.compile(DataParallel(nn.Linear(4, 4), ["cpu"] * 2), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(whole(batch()), whole.module(batch()))


def test_modules_without_shapes_are_refused_in_torchs_words() -> None:
    with pytest.raises(RuntimeError, match="Modules with uninitialized parameters can't be used with `DataParallel`"):
        DataParallel(nn.LazyLinear(4), ["cpu"] * 2)(batch())

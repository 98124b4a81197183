"""Mixed precision: what computes and travels in fewer bits, and what stays as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from samestep.comm.base import Communicator
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.precision import MixedPrecision
from samestep.testing.ranks import run_threads

HALF = torch.bfloat16


def small(seed: int = 0) -> nn.Sequential:
    return mlp(seed, torch.float32)


def inputs(rank: int) -> Tensor:
    return samples(3, rank, dtype=torch.float32)


def low(module: nn.Module, x: Tensor, dtype: torch.dtype = HALF) -> list[Tensor]:
    """Return the gradients of all of `module`, computed in `dtype`."""
    twin = copy.deepcopy(module).to(dtype)
    twin(x.to(dtype)).sum().backward()
    return [p.grad for p in twin.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [MixedPrecision, _MixedPrecision])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_those_of_the_low_precision_and_weights_stay(
    kind: Callable[..., Any], reduce_dtype: torch.dtype | None, set_to_none: bool
) -> None:
    added_in = reduce_dtype or HALF

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(small(), comm, mixed_precision=kind(param_dtype=HALF, reduce_dtype=reduce_dtype))
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            output = model(inputs(comm.rank))
            assert output.dtype == HALF
            assert {p.dtype for p in model.parameters()} == {torch.float32}, "outside forward, also before backward"
            output.sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        return grads(model)

    first, second = run_threads(rank, 2)
    locals_ = [low(small(), inputs(r)) for r in range(2)]
    expected = [((a.to(added_in) + b.to(added_in)) * 0.5).float() for a, b in zip(*locals_, strict=True)]
    assert equal(first, expected)
    assert equal(second, expected)


class Odd(nn.Module):
    """Tied weights used by another module's forward, a frozen parameter, a recurrent layer, buffers of two kinds."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.cell, self.how = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), how
        self.twin = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.twin.weight = self.first.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.twin(self.first(x).tanh()) + self.frozen + self.shift
        return result

    def forward(self, x: Tensor) -> Tensor:
        seen = {p.dtype for p in self.parameters()}
        assert len(seen) == 1
        if self.how == "plain":
            x = self.body(x)
        else:
            x = checkpoint(self.first, x, use_reentrant=self.how == "reentrant")
        x = nn.functional.linear(x, self.twin.weight)
        result: Tensor = self.cell(x[None])[0]
        return result


@pytest.mark.parametrize("how", ["plain", "non-reentrant", "reentrant"])
def test_every_kind_of_parameter_is_cast_and_recomputed_so(how: str) -> None:
    def rank(comm: Communicator) -> None:
        module = Odd(how)
        expected = low(module, inputs(comm.rank).requires_grad_())
        model = wrap(module, comm, mixed_precision=MixedPrecision(HALF, buffer_dtype=HALF))
        assert (module.shift.dtype, module.count.dtype) == (HALF, torch.int64)
        for _ in range(2):
            model.zero_grad()
            model(inputs(comm.rank).requires_grad_()).sum().backward()
            got = [g for g in grads(module) if g is not None]
            assert equal(got, [g.float() for g in expected])
        assert module.cell._flat_weights[0] is module.cell.weight_ih_l0
        assert module.twin.weight is module.first.weight

    run_threads(rank, 1)


def test_after_an_exception_in_forward_parameters_are_themselves() -> None:
    def rank(comm: Communicator) -> None:
        module = small()
        model = wrap(module, comm, mixed_precision=MixedPrecision(HALF))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 5))
        assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in module.parameters())
        assert module(inputs(0).to(HALF)).dtype == HALF, "the module by itself is cast, too"
        with torch.no_grad():
            assert model.eval()(inputs(0)).dtype == HALF

    run_threads(rank, 1)


def test_what_is_ignored_is_left_alone_and_copies_are_cast() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(0, torch.float32), nn.Parameter(torch.ones(2))
            self.register_buffer("shift", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            assert self.b.dtype == self.shift.dtype == torch.float32
            return self.a(x) * self.b + self.shift

    def rank(comm: Communicator) -> None:
        module = Two()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["b", "shift"])
        model = wrap(module, comm, mixed_precision=MixedPrecision(HALF, buffer_dtype=HALF))
        other = copy.deepcopy(model)
        for each in (model, other):
            assert each(inputs(comm.rank)).dtype == torch.float32
            each(inputs(comm.rank)).sum().backward()
        assert equal(grads(model.module.a), grads(other.module.a))
        with pytest.raises(RuntimeError, match="can only be called once"):
            other.register_comm_hook(comm, lambda state, bucket: bucket)

    run_threads(rank, 2)


def test_inputs_are_cast_unless_told_not_to() -> None:
    def rank(comm: Communicator) -> None:
        class Echo(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.p = nn.Parameter(torch.ones(1))

            def forward(self, x: Any, *, more: Any) -> Any:
                return x, more

        x = {"a": [torch.ones(1), torch.ones(1, dtype=torch.int64)]}
        for cast, dtype in ((True, HALF), (False, torch.float32)):
            model = wrap(Echo(), comm, mixed_precision=MixedPrecision(HALF, cast_forward_inputs=cast))
            (nested, more) = model(x, more=torch.ones(1))
            assert [t.dtype for t in nested["a"]] == [dtype, torch.int64]
            assert more.dtype == dtype

    run_threads(rank, 1)


def test_weights_are_exact_and_the_exchange_alone_may_be_in_half() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(small(), comm, mixed_precision=MixedPrecision(reduce_dtype=HALF))
        x = inputs(comm.rank)[: 1 + comm.rank]
        output = model(x)
        assert output.dtype == torch.float32
        model.backward(output.square().mean(), weight=len(x))
        return grads(model)

    reference = small()
    reference(torch.cat([inputs(0)[:1], inputs(1)[:2]])).square().mean().backward()
    for result in run_threads(rank, 2):
        for got, parameter in zip(result, reference.parameters(), strict=True):
            assert torch.allclose(got, parameter.grad, rtol=0.03, atol=0.03)  # type: ignore[arg-type]


@dataclasses.dataclass
class Other:
    param_dtype: torch.dtype = HALF
    keep_low_precision_grads: bool = False
    surprise: int = 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (HALF, TypeError, "expected a MixedPrecision as mixed_precision, got torch.bfloat16"),
        (MixedPrecision, TypeError, "expected a MixedPrecision"),
        (MixedPrecision(torch.int8), ValueError, "expected a floating-point dtype as param_dtype, got torch.int8"),
        (Other(), TypeError, r"expected some of .*, got \['param_dtype', 'surprise'\]"),
        (Other(keep_low_precision_grads=True), ValueError, "keep_low_precision_grads can't be honoured"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given: Any, error: type[Exception], message: str) -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(error, match=message):
            wrap(linear(), comm, mixed_precision=given)

    run_threads(rank, 1)

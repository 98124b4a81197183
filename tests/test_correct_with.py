"""Correct with what else people combine: beside the mean of the ranks' gradients by hand, with and without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import KINDS
from models import Recorder, equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.comm.base import Communicator
from samestep.parallel import reducer
from samestep.testing.ranks import run_processes, run_threads

SIZE = 3


@pytest.mark.parametrize("cap", [None, 0.0], ids=["one bucket", "many"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_gradients_are_the_mean_whatever_the_model_does(
    kind: type[Any], weighted: bool, micro_batches: int, cap: float | None
) -> None:
    def make(rank: int) -> Any:
        model = kind()
        model.rank = rank
        return model

    def batch(rank: int, micro: int) -> Tensor:
        return samples(3, rank + 10 * micro)

    def weight(rank: int, micro: int) -> int | None:
        return 1 + rank + micro if weighted else None

    def rank(comm: Communicator) -> list[Tensor | None]:
        inner = make(comm.rank)
        model = wrap(inner, comm, bucket_cap_mb=cap)
        for _ in range(3):
            model.zero_grad()
            for micro in range(micro_batches):
                loss = inner.loss(model, batch(comm.rank, micro))
                if micro < micro_batches - 1:
                    with model.no_sync():
                        model.backward(loss, weight=weight(comm.rank, micro))
                else:
                    model.backward(loss, weight=weight(comm.rank, micro))
        return grads(inner)

    results = run_threads(rank, SIZE)
    total = sum((weight(r, m) or 0) for r in range(SIZE) for m in range(micro_batches)) or SIZE
    expected = make(0)
    for r in range(SIZE):
        expected.rank = r
        for micro in range(micro_batches):
            (expected.loss(expected, batch(r, micro)) * ((weight(r, micro) or 1) / total)).backward()
    for result in results:
        assert equal(dense(result), dense(results[0]))
        assert close(result, grads(expected), expected.rounding)
        for got, parameter in zip(result, expected.parameters(), strict=True):
            assert got is None or got.is_sparse or got.stride() == parameter.stride() or not parameter.is_contiguous()


def dense(gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]


def close(a: list[Tensor | None], b: list[Tensor | None], rounding: float = 1e-5) -> bool:
    """Compare within 1e-12, or `rounding` where that is single precision."""
    for x, y in zip(dense(a), dense(b), strict=True):
        if x is None or y is None:
            if x is not y:
                return False
        else:
            most = rounding if x.dtype in (torch.float32, torch.complex64) else 1e-12
            if not torch.allclose(x, y, rtol=most, atol=most):
                return False
    return True


def test_two_wrapped_modules_in_one_model() -> None:
    """As in an encoder and a decoder that are wrapped each by itself, with different groups of ranks waiting."""

    class Both(nn.Module):
        def __init__(self, comm: Communicator | None) -> None:
            super().__init__()
            parts = linear(1), mlp(2), linear(3)
            self.first, self.second, self.alone = (
                parts if comm is None else (wrap(parts[0], comm), wrap(parts[1], comm), parts[2])
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.second(torch.cat([y, self.alone(x)], 1)) + self.first(x * 2)

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = Both(comm)
        for _ in range(3):
            model.zero_grad()
            model(samples(3, comm.rank)).square().sum().backward()
        return grads(model)[:-2]

    results = run_threads(rank, 2)
    local = Both(None)
    for r in range(2):
        (local(samples(3, r)).square().sum() / 2).backward()
    assert equal(*results)
    assert close(results[0], grads(local)[:-2])


@pytest.mark.parametrize("whole_bytes", [reducer.WHOLE_BYTES, 1])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_wrapped_module_within_a_wrapped_one(
    weighted: bool, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets that left early would take gradients away from one another. Averages of averages are averages."""
    monkeypatch.setattr(reducer, "WHOLE_BYTES", whole_bytes)
    weights = [1.0, 3.0] if weighted else [1.0, 1.0]

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x, x], 1)

    def wide(comm: Communicator | None) -> nn.Module:
        last = mlp(2)[2]
        return nn.Sequential(linear(1), Wide(), last if comm is None else wrap(last, comm, bucket_cap_mb=0.0))

    def train(comm: Communicator) -> list[Tensor | None]:
        model = wrap(wide(comm), comm, bucket_cap_mb=0.0)
        for _ in range(3):
            model.zero_grad()
            loss = model(samples(3, comm.rank)).square().sum()
            model.backward(loss, weight=weights[comm.rank] if weighted else None)
        return grads(model)

    results = run_threads(train, 2)
    local = wide(None)
    for r, weight in enumerate(weights):
        (local(samples(3, r)).square().sum() * weight / sum(weights)).backward()
    assert equal(*results)
    assert close(results[0], grads(local))


def test_torchs_class_within_is_refused() -> None:
    class DistributedDataParallel(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="1 is wrapped in torch's DistributedDataParallel, and both would average"):
            wrap(nn.Sequential(linear(1), DistributedDataParallel(linear(2))), comm)

    run_threads(rank, 1)


def test_lazily_initialised_modules_are_refused_until_they_have_been_run() -> None:
    def rank(comm: Communicator) -> None:
        lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
        with pytest.raises(RuntimeError, match="Run a dummy forward pass to correctly initialize the modules"):
            wrap(lazy, comm)
        lazy(torch.ones(1, 4))
        wrap(lazy, comm)(torch.ones(1, 4)).sum().backward()

    run_threads(rank, 2)


def test_parameters_frozen_and_unfrozen_after_wrapping() -> None:
    def rank(comm: Communicator) -> list[list[Tensor | None]]:
        recorder = Recorder(comm)
        module = mlp()
        model = wrap(module, recorder)
        seen = []
        for frozen in (None, 0, 2, None, 0):
            module.requires_grad_(True)
            if frozen is not None:
                module[frozen].requires_grad_(False)
            for micro in range(2):
                model.zero_grad()
                model.backward(model(samples(2, comm.rank + micro)).square().sum(), weight=1 + comm.rank)
            seen.append(grads(model))
        return seen

    first, second = run_threads(rank, 2)
    for a, b, missing in zip(first, second, ([], [0, 1], [2, 3], [], [0, 1]), strict=True):
        assert equal(a, b)
        assert [i for i, g in enumerate(a) if g is None] == missing


def test_as_torchs_class_with_autocast_a_scaler_and_checkpoints() -> None:
    assert run_processes(beside_torchs, 2) == [[], []]


def beside_torchs(comm: Communicator) -> list[str]:
    """Train with both classes in each combination; return those in which a bit differs. Two ranks: sums are ordered."""
    from samestep.parallel.distributed import DistributedDataParallel

    torch.set_num_threads(1)
    wrong = []
    for reentrant in (None, False, True):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for scale in (1.0, 1024.0):
                ours, theirs = (
                    scaled_training(comm.rank, make, reentrant, dtype, scale)
                    for make in (DistributedDataParallel, nn.parallel.DistributedDataParallel)
                )
                if not all(map(torch.equal, ours, theirs)):
                    wrong.append(f"{reentrant} {dtype} {scale}")
    return wrong


class Blocks(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def scaled_training(
    rank: int, make: Callable[..., Any], reentrant: bool | None, dtype: torch.dtype, scale: float
) -> list[Tensor]:
    torch.manual_seed(5)
    net = Blocks(reentrant)
    model = make(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    generator = torch.Generator().manual_seed(rank)
    for number in range(4):
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=generator, requires_grad=True)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = model(x).float().square().mean()
        if number == 2 and rank == 1:
            loss = loss * torch.inf  # on one rank; all skip, as all see it in the average
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [*(p.detach().clone() for p in net.parameters()), torch.tensor(scaler.get_scale())]

"""Correct with what autograd can do beside backward(): never silently this rank's gradients alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Recorder, equal, grads, mlp, samples, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_threads

Loss = Callable[[Any, Tensor], Tensor]


def averaged(loss: Loss, size: int, make: Callable[[], nn.Module] = mlp, steps: int = 1) -> list[Tensor | None]:
    """The mean of the ranks' gradients, by hand."""
    total: list[Any] = []
    for rank in range(size):
        local = make()
        for _ in range(steps):
            local.zero_grad()
            loss(local, samples(3, rank)).backward()
        total.append(grads(local))
    return [None if column[0] is None else sum(g / size for g in column) for column in zip(*total, strict=True)]


def close(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(
        x is y if x is None or y is None else torch.allclose(x, y, rtol=1e-12) for x, y in zip(a, b, strict=True)
    )


def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = model(x).sum()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    return output + slope.square().sum()


def two_penalties(model: Any, x: Tensor) -> Tensor:
    return gradient_penalty(model, x) + 2 * gradient_penalty(model, x + 1)


def of_a_checkpoint(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output: Tensor = checkpoint(model, x, use_reentrant=False).sum()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    return output + slope.square().sum()


def hessian_of_the_input(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return second.square().sum()


@pytest.mark.parametrize("loss", [gradient_penalty, two_penalties, of_a_checkpoint, hessian_of_the_input])
@pytest.mark.parametrize("cap", [None, 0.0])
def test_gradient_penalties(loss: Loss, cap: float | None) -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        recorder = Recorder(comm)
        model = wrap(mlp(), recorder, bucket_cap_mb=cap)
        for _ in range(2):
            model.zero_grad()
            recorder.log.clear()
            result = loss(model, samples(3, comm.rank))
            assert recorder.log == [], "gradients of inputs are nobody else's business"
            result.backward()
        return grads(model)

    results = run_threads(rank, 3)
    assert all(equal(result, results[0]) for result in results)
    assert close(results[0], averaged(loss, 3))


ASKED: dict[str, Callable[[DistributedDataParallel, Tensor], object]] = {
    "all": lambda model, x: torch.autograd.grad(model(x).sum(), list(model.parameters())),
    "one": lambda model, x: torch.autograd.grad(model(x).sum(), model.module[2].bias),
    "and the input": lambda model, x: torch.autograd.grad(model(x.requires_grad_()).sum(), [x, model.module[0].weight]),
    "for a second": lambda model, x: torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True),
    "through a method": lambda model, x: torch.autograd.grad(model.twice(x).sum(), list(model.parameters())),
    "within a checkpoint": lambda model, x: torch.autograd.grad(
        checkpoint(model, x, use_reentrant=False).sum(), list(model.parameters())
    ),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_autograd_grad_of_parameters_is_refused(ask: Callable[[DistributedDataParallel, Tensor], object]) -> None:
    class Net(nn.Sequential):
        def twice(self, x: Tensor) -> Tensor:
            return 2 * self(x)

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Net(*mlp()), comm)
        with pytest.raises(ReplicaError, match=rf"rank {comm.rank}: autograd.grad\(\) was called for parameter [02]\."):
            ask(model, samples(3, comm.rank))
        model(samples(3, comm.rank)).sum().backward()
        return grads(model)

    results = run_threads(rank, 2)
    assert equal(*results)
    assert close(results[0], averaged(lambda model, x: model(x).sum(), 2))


def test_ones_own_gradients_are_had_within_no_sync_or_from_the_module() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model, local = wrap(mlp(), recorder), mlp()
        recorder.log.clear()
        x = samples(3, comm.rank)
        expected = torch.autograd.grad(local(x).sum(), list(local.parameters()))
        with model.no_sync():
            assert equal(list(torch.autograd.grad(model(x).sum(), list(model.parameters()))), list(expected))
        assert equal(list(torch.autograd.grad(model.module(x).sum(), list(model.parameters()))), list(expected))
        assert recorder.log == []

    run_threads(rank, 2)


def test_meta_learning_averages_the_outer_gradient() -> None:
    """The inner step is each rank's own, so its gradients are taken within no_sync()."""

    def loss(model: Any, x: Tensor) -> Tensor:
        names, parameters = zip(*model.named_parameters(), strict=True)
        with model.no_sync() if isinstance(model, DistributedDataParallel) else torch.enable_grad():
            inner = torch.autograd.grad(model(x).square().sum(), parameters, create_graph=True)
        moved = {name: p - 0.1 * g for name, p, g in zip(names, parameters, inner, strict=True)}
        result: Tensor = torch.func.functional_call(model, moved, (x + 1,)).square().sum()
        return result

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        for _ in range(2):
            model.zero_grad()
            loss(model, samples(3, comm.rank)).backward()
        return grads(model)

    results = run_threads(rank, 2)
    assert equal(*results)
    assert close(results[0], averaged(loss, 2))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("weight", [None, 2])
@pytest.mark.parametrize("learned", [False, True])
def test_averaged_gradients_have_no_derivative(weight: int | None, learned: bool) -> None:
    """After backward(create_graph=True) they are the same as ever; who differentiates them is told."""

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        if learned:
            model(samples(2)).sum().backward()
        for _ in range(2):
            model.zero_grad()
            model.backward(model(samples(3, comm.rank)).square().sum(), weight=weight, create_graph=True)
            norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
            with pytest.raises(ReplicaError, match=rf"rank {comm.rank}: something was computed from gradients"):
                torch.autograd.grad(norm, model.module[0].weight, retain_graph=True)
            with pytest.raises(ReplicaError, match=rf"rank {comm.rank}: something was computed from gradients"):
                (norm + model(samples(2)).sum()).backward()
            model(samples(2))  # tells the others of that
            torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)
            model.zero_grad()
        model(samples(3, comm.rank)).square().sum().backward(create_graph=True)
        averaged_once = grads(model)
        model(samples(3, comm.rank)).square().sum().backward()
        assert close([g * 2 for g in averaged_once if g is not None], grads(model)), "accumulates on top"
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
        return averaged_once

    results = run_threads(rank, 2)
    assert equal(*results)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_ones_own_graph_is_had_within_no_sync() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        with model.no_sync():
            model(samples(2)).square().sum().backward(create_graph=True)
        norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        with model.no_sync():
            hessian = torch.autograd.grad(norm, list(model.parameters()))
        return [*hessian]

    local = mlp()
    local(samples(2)).square().sum().backward(create_graph=True)
    norm = sum(p.grad.square().sum() for p in local.parameters() if p.grad is not None)
    expected = [*torch.autograd.grad(norm, list(local.parameters()))]  # type: ignore[arg-type]
    assert all(close(result, expected) for result in run_threads(rank, 2))
    for parameter in local.parameters():  # it and its gradient hold each other
        parameter.grad = None


def test_backward_for_some_inputs_averages_those() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        for _ in range(2):
            model.zero_grad()
            model(samples(3, comm.rank)).sum().backward(inputs=[model.module[0].weight])
        return grads(model)

    first, second = run_threads(rank, 2)
    assert equal(first, second)
    assert [g is None for g in first] == [False, True, True, True]
    assert close(first[:1], averaged(lambda model, x: model(x).sum(), 2)[:1])


class Passing(nn.Module):
    """Passes its input on, with or without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(samples(4, 7))
            self.layer.bias.zero_()

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.layer(x) if use else x * 1


def test_a_rank_whose_backward_reaches_none_of_the_parameters_takes_part() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Passing(), comm)
        for _ in range(3):
            model.zero_grad()
            model(samples(3, comm.rank).requires_grad_(), comm.rank == 1).sum().backward()
        return grads(model)

    results = run_threads(rank, 3)
    local = Passing()
    (local(samples(3, 1), True).sum() / 3).backward()
    assert all(close(result, grads(local)) for result in results)


def test_a_frozen_critic_exchanges_nothing_while_the_generator_trains() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        generator, critic = wrap(Passing(), comm), wrap(mlp(), recorder)
        critic.module.requires_grad_(False)
        recorder.log.clear()
        critic(generator(samples(3, comm.rank), True)).sum().backward()
        assert recorder.log == []
        assert all(g is not None for g in grads(generator))
        critic.module.requires_grad_(True)
        critic(generator(samples(3, comm.rank), True).detach()).sum().backward()
        assert any(line.startswith("all_reduce") for line in recorder.log)

    run_threads(rank, 2)


def test_parameters_that_are_replaced_are_refused() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm)
        others = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        said = "rank 0: in the place of parameter 0.weight there is another one now"
        with pytest.raises(ReplicaError, match=said):
            torch.func.functional_call(model, others, (samples(2),))
        with torch.no_grad():
            torch.func.functional_call(model, others, (samples(2),))
        model.module[0].weight = others["module.0.weight"]
        with pytest.raises(ReplicaError, match=said):
            model(samples(2))

    run_threads(rank, 1)


@pytest.mark.parametrize("transformed", [False, True])
def test_other_tensors_in_the_parameters_places_are_warned_about(transformed: bool) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm)
        others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for _ in range(2):
            if transformed:
                torch.func.grad(lambda p: torch.func.functional_call(model, p, (samples(2),)).sum())(others)
            else:
                torch.func.functional_call(model, others, (samples(2),)).sum().backward()
        torch.func.functional_call(model, {name: p.detach() for name, p in others.items()}, (samples(2),))
        model(samples(2)).sum().backward()

    with pytest.warns(
        UserWarning, match=r"called with a tensor of its own for 0\.weight, .* is this rank's alone"
    ) as said:
        run_threads(rank, 1)
    assert len(said) == 1


def test_functional_call_with_the_modules_own_parameters_is_averaged() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (x,)).sum()
        return result

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        loss(model, samples(3, comm.rank)).backward()
        return grads(model)

    results = run_threads(rank, 2)
    assert equal(*results)
    assert close(results[0], averaged(loss, 2))

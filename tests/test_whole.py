"""Large gradients, which are exchanged where autograd put them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from samestep.comm.base import Communicator, Work
from samestep.parallel import reducer
from samestep.parallel.arguments import describe_parameters
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.reduction import plain_sum
from samestep.parallel.whole import WholeBucket
from samestep.testing.ranks import run_threads


@pytest.fixture(autouse=True)
def every_gradient_counts_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "WHOLE_BYTES", 1)


class Sum(nn.Module):
    """Two parameters whose gradients autograd lets share one memory, and a third that reads the same numbers later."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.full((6,), 0.5))
        self.first, self.second = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.before * x).view(-1)
        return (self.first.view(-1) + self.second.view(-1) + hidden).square()


class Transposed(nn.Module):
    """A parameter whose gradient autograd gives in other strides than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.t() * x.view(6, 1)).square()


def _channels_last() -> nn.Module:
    net = nn.Sequential(nn.Unflatten(-1, (6, 1, 1)), nn.Conv2d(6, 4, 1), nn.Flatten())
    return net.to(memory_format=torch.channels_last)


def _expanded() -> nn.Module:
    """The gradient of a sum is one number, expanded."""
    net = nn.Linear(6, 3)
    net.register_forward_hook(lambda module, _, out: out.sum() + module.weight.sum() + module.bias.sum())
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sum": Sum,
    "transposed": Transposed,
    "channels last": _channels_last,
    "expanded": _expanded,
    "linear": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
}


# Made once: ranks that are threads would draw their weights from one generator.
_MADE = {name: make() for name, make in MODELS.items()}


def _made(name: str) -> nn.Module:
    return copy.deepcopy(_MADE[name])


def _input(rank: int, step: int) -> Tensor:
    return torch.arange(1.0, 7.0) * (rank + 1) + step


def _local(name: str, size: int, step: int, weights: list[float]) -> list[Tensor]:
    """The gradients of the weighted mean over ranks, computed by one."""
    net, totals = _made(name), []
    for rank in range(size):
        net.zero_grad()
        net(_input(rank, step)).sum().backward()
        totals.append([p.grad.clone() * weights[rank] for p in net.parameters() if p.grad is not None])
    return [torch.stack(parts).sum(0) / sum(weights) for parts in zip(*totals, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_share_memory_or_have_other_strides_are_averaged(name: str) -> None:
    def main(comm: Communicator) -> None:
        model = DistributedDataParallel(_made(name), process_group=comm)
        assert all(isinstance(bucket, WholeBucket) for bucket in model._reducer._buckets)
        for step in range(4):
            model.zero_grad(set_to_none=step != 2)
            model(_input(comm.rank, step)).sum().backward()
            for parameter, expected in zip(model.parameters(), _local(name, 2, step, [1, 1]), strict=True):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, expected), (name, step)

    run_threads(main, 2)


def test_the_gradient_stays_where_it_is() -> None:
    def main(comm: Communicator) -> None:
        model = DistributedDataParallel(_made("linear"), process_group=comm)
        places: dict[nn.Parameter, int] = {}
        for parameter in model.parameters():
            parameter.register_hook(lambda grad, parameter=parameter: places.update({parameter: grad.data_ptr()}))
        for step in range(3):
            model.zero_grad()
            model(_input(comm.rank, step)).sum().backward()
            assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] == [
                places[p] for p in model.parameters()
            ]

    run_threads(main, 2)


def test_weights_and_accumulation() -> None:
    def main(comm: Communicator) -> None:
        model = DistributedDataParallel(_made("linear"), process_group=comm)
        counts = [3.0, 0.0, 5.0]
        for step in range(3):
            model.zero_grad()
            loss = model(_input(comm.rank, step)).sum() if comm.rank != 1 else None
            model.backward(loss, weight=counts[comm.rank])
            for parameter, expected in zip(model.parameters(), _local("linear", 3, step, counts), strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad, expected)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with model.no_sync():
            model(_input(comm.rank, 2)).sum().backward()
        model(_input(comm.rank, 2)).sum().backward()
        twice = _local("linear", 3, 2, [2, 2, 2])
        for parameter, earlier, one in zip(model.parameters(), before, twice, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, earlier + 2 * one)

    run_threads(main, 3)


def test_another_policy_gets_every_gradient() -> None:
    def main(comm: Communicator) -> None:
        model, sizes = _made("linear"), list[int]()
        parameters = dict(model.named_parameters())

        def noted(communicator: Communicator, flat: Tensor) -> Work:
            sizes.append(flat.numel())
            return plain_sum(communicator, flat)

        specs = describe_parameters(model, parameters)
        engine = reducer.Reducer(list(parameters.values()), specs, comm, (2**20,), exchange=noted)
        model(_input(comm.rank, 0)).sum().backward()
        assert sum(sizes) >= sum(p.numel() for p in parameters.values())
        for parameter, expected in zip(parameters.values(), _local("linear", 2, 0, [1, 1]), strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, expected)
        engine.detach()

    run_threads(main, 2)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_graph_of_the_gradient_is_left_whole() -> None:
    """With create_graph, autograd has the gradient's numbers in its hands: they are averaged in a copy."""

    def main(comm: Communicator) -> None:
        model = DistributedDataParallel(_made("linear"), process_group=comm)
        seen: list[Tensor] = []
        model.module.get_parameter("0.weight").register_hook(lambda grad: seen.append(grad))
        model(_input(comm.rank, 0)).sum().backward(create_graph=True)
        alone = _made("linear")
        alone(_input(comm.rank, 0)).sum().backward()
        assert torch.equal(seen[0], alone.get_parameter("0.weight").grad)  # type: ignore[arg-type]

    run_threads(main, 2)

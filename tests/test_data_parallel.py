"""DataParallel on CPUs: the numbers, compared with the pieces computed one after the other."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from samestep.parallel.data_parallel import DataParallel
from samestep.parallel.replicate import share

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_core_for_each_replica() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cpus(count: int) -> list[str]:
    return ["cpu"] * count


class Net(nn.Module):
    """Has buffers that forward updates, a weight that is used twice, and one that is not used."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.mix = nn.Linear(4, 4)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(4, 3)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.mix(self.drop(self.mix(x)).tanh()))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def data(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 6, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels)


class ByHand:
    """What DataParallel does: one piece after the other, through a copy of the module, gradients added in order."""

    def __init__(self, module: nn.Module, devices: int) -> None:
        self.module, self.devices = module, devices

    def step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [piece.detach().requires_grad_() for piece in images.chunk(self.devices)]
        modules = [self.module, *(copy.deepcopy(self.module) for _ in pieces[1:])]
        outputs = [module(piece) for module, piece in zip(modules, pieces, strict=True)]
        joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(joined, labels), joined)
        for module, output, along in zip(modules, outputs, gradient.split([len(o) for o in outputs]), strict=True):
            before = [p.grad for p in module.parameters()]
            module.zero_grad()
            output.backward(along)
            if module is self.module:
                assert before == [None] * len(before)
                continue
            for own, other in zip(self.module.parameters(), module.parameters(), strict=True):
                if own.grad is not None:
                    own.grad = own.grad + other.grad
        return joined.detach(), torch.cat([piece.grad for piece in pieces if piece.grad is not None])


def steps(model: DataParallel, other: ByHand, batch: int, count: int = 3) -> None:
    """Train both alike, and require the same bits everywhere."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model.module, other.module)]
    for step in range(count):
        images, labels = data(batch, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        state = torch.get_rng_state()
        along = images.clone().requires_grad_()
        output = model(along)
        loss_of(output, labels).backward()
        drawn = torch.get_rng_state()
        torch.set_rng_state(state)
        expected, expected_along = other.step(images, labels)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert torch.equal(output, expected)
        assert along.grad is not None
        assert torch.equal(along.grad, expected_along)
        same(model.module, other.module)
        for optimizer in optimizers:
            optimizer.step()


def same(module: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad), name
    for (name, value), expected in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


# The numbers


def test_the_published_gradients() -> None:
    """The example of scripts/gradients.py: a sample's gradient is the sample, in the row that its label picks."""
    images = torch.tensor([[0.4362, 0.4574], [0.2052, 0.2362]])
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    model = DataParallel(nn.Linear(2, 3), device_ids=["cpu", "cpu"])
    for _ in range(2):
        model.zero_grad()
        (model(images) * labels).sum().backward()
        weight, bias = (parameter.grad for parameter in model.parameters())
        assert torch.equal(weight, torch.cat([images, torch.zeros(1, 2)]))
        assert torch.equal(bias, torch.tensor([1.0, 1.0, 0.0]))


@pytest.mark.parametrize("batch", [2, 5, 16])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_the_same_bits_as_the_pieces_one_after_the_other(devices: int, batch: int) -> None:
    model = DataParallel(net(), device_ids=cpus(devices))
    steps(model, ByHand(net(), devices), batch)
    assert model.module.unused.weight.grad is None


def test_a_batch_of_one() -> None:
    model = DataParallel(net().eval(), device_ids=cpus(3))
    steps(model, ByHand(net().eval(), 3), 1)


@pytest.mark.parametrize("device_ids", [None, [], ["cpu"]])
def test_one_device_or_none_is_the_plain_module(device_ids: list[str] | None) -> None:
    model, plain = DataParallel(net(dropout=0.5), device_ids=device_ids), net(dropout=0.5)
    for step in range(2):
        images, labels = data(4, seed=step)
        outputs = []
        for module in (model, plain):
            torch.manual_seed(step)
            outputs.append(module(images))
            loss_of(outputs[-1], labels).backward()
        assert torch.equal(*outputs)
    same(model.module, plain)


def test_the_order_in_which_replicas_end_changes_nothing() -> None:
    ended = [threading.Event() for _ in range(3)]
    rounds = 0

    class Late(Net):
        def forward(self, x: Tensor) -> Tensor:
            """Replica r ends after r + 1; the first forward, in which they take turns, waits for nobody."""
            number = int(x[0, 0, 0, 0])
            output = super().forward(x)
            if rounds and number < 2:
                assert ended[number + 1].wait(20)
            ended[number].set()
            return output

    torch.manual_seed(0)
    model, other = DataParallel(Late(), device_ids=cpus(3)), net()
    images, labels = data(6)
    images[:, 0, 0, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    for rounds in range(3):  # noqa: B007 - forward reads it
        for event in ended:
            event.clear()
        model.zero_grad()
        other.zero_grad()
        loss_of(model(images), labels).backward()
        ByHand(other, 3).step(images, labels)
        same(model.module, other)


def test_accumulation_hooks_and_a_second_backward() -> None:
    model, calls = DataParallel(net().eval(), device_ids=cpus(2)), []
    model.module.mix.weight.register_post_accumulate_grad_hook(calls.append)
    images, labels = data(4)
    loss = loss_of(model(images), labels)
    loss.backward(retain_graph=True)
    once = model.module.mix.weight.grad.clone()
    loss.backward()
    assert torch.equal(model.module.mix.weight.grad, once + once)
    assert calls == [model.module.mix.weight] * 2


def test_gradients_can_be_differentiated() -> None:
    images = torch.randn(6, 4, dtype=torch.float64)

    def penalty(module: Any) -> list[Tensor]:
        along = images.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(along).square().sum(), along, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), list(module.parameters()), allow_unused=True))

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for found, expected in zip(penalty(DataParallel(plain, cpus(3))), penalty(plain), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected)


def test_what_is_shared_over_devices_gets_the_sum_in_their_order() -> None:
    """Copies, as other devices would have them."""
    one = torch.tensor(1.0, requires_grad=True)
    for aliases in (0, 2, 3):
        shared = share(one, [CPU] * 3, aliases=aliases)
        assert [t.data_ptr() == one.data_ptr() for t in shared] == [number < aliases for number in range(3)]
        (gradient,) = torch.autograd.grad(shared[2] * 1e8 - shared[0] * 1e8 + shared[1], one)
        assert gradient == (torch.tensor(-1e8) + 1.0) + 1e8
        (gradient,) = torch.autograd.grad(share(one, [CPU] * 3, aliases=aliases)[1] * 2, one)
        assert gradient == 2
        with torch.no_grad():
            assert [t is one for t in share(one, [CPU] * 3, aliases=aliases)] == [n < aliases for n in range(3)]


# Random numbers


@pytest.mark.parametrize("devices", [2, 3])
def test_dropout_differs_between_replicas_and_repeats_with_the_seed(devices: int) -> None:
    steps(DataParallel(net(dropout=0.5), cpus(devices)), ByHand(net(dropout=0.5), devices), 6)
    model = DataParallel(nn.Dropout(0.5), cpus(2))
    for _ in range(2):
        first, second = model(torch.ones(2, 50))
        assert not torch.equal(first, second)


def test_a_forward_that_draws_for_the_first_time_is_run_again_in_turn() -> None:
    """Nothing of the first attempt is left: gradients, buffers and the generator are as in turn."""
    models = net(), net()
    model, other = DataParallel(models[0], cpus(3)), ByHand(models[1], 3)
    steps(model, other, 6)
    for module in models:
        module.drop.p = 0.5
    steps(model, other, 6)


def test_dropout_within_checkpoints_is_the_same_when_it_is_computed_again() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def at_rest(module: Net) -> Net:
        module.norm.eval()
        return module

    torch.manual_seed(0)
    steps(DataParallel(at_rest(Checkpointed(0.5)), cpus(2)), ByHand(at_rest(net(dropout=0.5)), 2), 4)

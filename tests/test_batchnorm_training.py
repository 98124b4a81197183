"""Training with SyncBatchNorm on several ranks is training on one with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from samestep.comm.base import Communicator
from samestep.comm.c10d import C10dCommunicator
from samestep.errors import MismatchError, PeerLostError
from samestep.parallel.batchnorm import convert_sync_batchnorm
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes, run_threads

_STEPS = 3
_OUT_OF_STEP = (MismatchError, PeerLostError)  # the second where the other rank has met the first, and gone
Wrap = Callable[[nn.Module], Any]


class Net(nn.Module):
    """Has a layer that takes its input without a gradient, one that is used twice, and one of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.BatchNorm2d(2)
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)
        self.again = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.last, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(self.start(x))).tanh()
        x = self.norm(self.again(x)).tanh()
        return self.head(self.last(x.mean((2, 3))))


def net() -> Net:
    generator = torch.Generator().manual_seed(3)
    made = Net().double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return made


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 2, 5, 5, generator=generator, dtype=torch.float64) + 2
    return images, torch.randint(3, (8,), generator=generator)


def train(model: Any, mine: slice, *, weighted: bool) -> list[Tensor]:
    """Return the weights and buffers after some steps, and the last step's gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(_STEPS):
        images, labels = (tensor[mine] for tensor in data(step))
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        if weighted:
            model.backward(loss, weight=len(images))
        else:
            loss.backward()
        optimizer.step()
    return [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters())]


def as_one_process(results: list[list[Tensor]]) -> None:
    expected = train(net(), slice(None), weighted=False)
    for result in results:
        assert len(result) == len(expected)
        for found, first, value in zip(result, results[0], expected, strict=True):
            assert torch.equal(found, first), "ranks differ"
            torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-12)


def share(comm: Communicator, ends: tuple[int, ...]) -> slice:
    return slice(ends[comm.rank], ends[comm.rank + 1])


@pytest.mark.parametrize("ends", [(0, 4, 8), (0, 1, 8), (0, 3, 4, 8)])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0])
def test_uneven_shares_over_threads(bucket_cap_mb: int, ends: tuple[int, ...]) -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        model = convert_sync_batchnorm(net(), comm)
        wrapped = DistributedDataParallel(model, process_group=comm, bucket_cap_mb=bucket_cap_mb)
        return train(wrapped, share(comm, ends), weighted=True)

    as_one_process(run_threads(rank, len(ends) - 1))


def test_a_rank_without_samples_takes_part_with_a_sum() -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        model = DistributedDataParallel(convert_sync_batchnorm(net(), comm), process_group=comm)
        images, labels = (tensor[share(comm, (0, 8, 8))] for tensor in data(0))
        functional.cross_entropy(model(images), labels, reduction="sum").backward()
        return [parameter.grad * 2 for parameter in model.parameters()]

    one = net()
    images, labels = data(0)
    functional.cross_entropy(one(images), labels, reduction="sum").backward()
    for result in run_threads(rank, 2):
        for found, parameter in zip(result, one.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-11, atol=1e-12)


class Partly(nn.Module):
    """Its last layer, whose bucket is the first to leave, takes part on rank 0 only."""

    def __init__(self, group: Communicator) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(2, 4), nn.BatchNorm1d(4)
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        convert_sync_batchnorm(self, group)

    def forward(self, x: Tensor, part: bool) -> Tensor:
        x = self.always(self.norm(self.first(x)))
        return self.sometimes(x) if part else x


@pytest.mark.parametrize("own_group", [True, False])
def test_parameters_that_some_ranks_leave_out_need_a_group_of_its_own(own_group: bool) -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        own = comm.split(range(comm.size))
        assert own is not None
        module = Partly(own if own_group else comm)
        model = DistributedDataParallel(module, process_group=comm, bucket_cap_mb=0)
        images = data(0)[0].mean((2, 3))[share(comm, (0, 3, 8))]
        for step in range(3):
            model.zero_grad()
            loss = model(images, step == 0 or comm.rank == 0).square().sum()
            if step == 0 or own_group:
                loss.backward()
            else:
                with pytest.raises(_OUT_OF_STEP):
                    loss.backward()
                break
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    first, second = run_threads(rank, 2)
    if own_group:
        assert len(first) == 8
        assert all(map(torch.equal, first, second))


def test_a_rank_that_leaves_its_backward_out_is_told() -> None:
    def rank(comm: Communicator) -> None:
        model = DistributedDataParallel(convert_sync_batchnorm(net(), comm), process_group=comm)
        images, labels = (tensor[share(comm, (0, 8, 8))] for tensor in data(0))
        loss = functional.cross_entropy(model(images), labels, reduction="sum")
        with pytest.raises(_OUT_OF_STEP):
            model.backward(loss if comm.rank == 0 else None, weight=len(images))

    run_threads(rank, 2)


def test_autocast_ends_near_what_one_process_gets() -> None:
    images = data(0)[0].float()

    def gradients(model: nn.Module, mine: slice) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.float()(images[mine]).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(net(), slice(None))
    first, second = run_threads(lambda comm: gradients(convert_sync_batchnorm(net(), comm), share(comm, (0, 3, 8))), 2)
    for one, other, whole in zip(first, second, expected, strict=True):
        assert (one + other - whole).norm() < 0.05 * (one.norm() + other.norm())


def test_case_30_sync_batch_norm_works_on_the_cpu() -> None:
    """In our class and in torch's, over shared memory and over Gloo; torch's layer refuses."""
    rows = run_processes(trained_everywhere, 2, timeout_s=100)
    for name in rows[0]:
        as_one_process([[torch.from_numpy(array) for array in row[name]] for row in rows])


def trained_everywhere(comm: Communicator) -> dict[str, list[Any]]:
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        torchs(data(0)[0])
    refuse_outsiders(comm)
    compare_compiled(comm)
    mine = share(comm, (0, 4, 8))
    gloo = C10dCommunicator(dist.new_group())
    setups: dict[str, tuple[Any, Wrap]] = {
        "ours": (None, DistributedDataParallel),
        "ours, over Gloo": (gloo, lambda module: DistributedDataParallel(module, process_group=gloo)),
        "torch's": (None, TorchDDP),
        "torch's, over one group": (gloo, lambda module: TorchDDP(module, process_group=gloo.group)),
    }
    results = {}
    for name, (group, wrap) in setups.items():
        tensors = train(wrap(convert_sync_batchnorm(net(), group)), mine, weighted=False)
        results[name] = [tensor.detach().numpy() for tensor in tensors]
    return results


def refuse_outsiders(comm: Communicator) -> None:
    group = dist.new_group([0])
    bn = convert_sync_batchnorm(nn.BatchNorm1d(4), group)
    if comm.rank == 0:
        bn(torch.randn(2, 4))
    else:
        with pytest.raises(ValueError, match="not in the process group"):
            bn(torch.randn(2, 4))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh()).double()


def compare_compiled(comm: Communicator) -> None:
    """A compiler leaves the exchange out of its graphs; it fails where there may be only one graph."""
    images = data(0)[0].mean((2, 3))[share(comm, (0, 3, 8))]
    plain, compiled = (convert_sync_batchnorm(small()) for _ in range(2))
    outputs = [model(images) for model in (plain, torch.compile(compiled, backend="eager"))]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for name, value in plain.state_dict().items():
        assert torch.equal(compiled.state_dict()[name], value)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(compiled, backend="eager", fullgraph=True)(images)

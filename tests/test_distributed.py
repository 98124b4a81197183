"""DistributedDataParallel: equal replicas and averaged gradients, over ranks that are threads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from models import Recorder, equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.errors import MismatchError, ReplicaError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_threads

SIZES = [1, 2, 3, 5]


# The start


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_start_with_rank_0s_parameters_and_buffers(size: int) -> None:
    def rank(comm: Communicator) -> dict[str, Tensor]:
        model = nn.Sequential(linear(comm.rank), nn.BatchNorm1d(2, dtype=torch.float64))
        model.register_buffer("flags", torch.tensor([comm.rank == 0, True]))
        model.register_buffer("nothing", torch.empty(0))
        model.register_buffer("strided", torch.full((3, 2), float(comm.rank)).t())
        return dict(wrap(model, comm).module.state_dict())

    first, *others = run_threads(rank, size)
    assert first["0.weight"].equal(linear(0).weight)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def half_frozen() -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.weight.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: nn.Linear(4, 3), r"weight is float32\[3, 4\] \(float32\[2, 4\] on rank 0\); bias is float32\[3\]"),
        (lambda: nn.Linear(4, 2).double(), r"weight is float64\[2, 4\] \(float32\[2, 4\] on rank 0\)"),
        (lambda: nn.Linear(4, 2, bias=False), r"bias is missing \(float32\[2\] on rank 0\)"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), r"weight is missing .*0.weight float32\[2, 4\] is not on rank 0"),
        (half_frozen, r"weight is float32\[2, 4\], frozen \(float32\[2, 4\] on rank 0\)"),
    ],
)
def test_different_modules_are_an_error_that_lists_every_rank(other: Callable[[], nn.Module], difference: str) -> None:
    def rank(comm: Communicator) -> None:
        module = other() if comm.rank == 1 else nn.Linear(4, 2)
        alike = r"2 parameters and buffers, as on rank 0"
        with pytest.raises(MismatchError, match=rf"rank 0: {alike}\n  rank 1: {difference}.*\n  rank 2: {alike}"):
            wrap(module, comm)

    run_threads(rank, 3)


def test_without_init_sync_ranks_keep_what_they_have() -> None:
    def rank(comm: Communicator) -> Tensor:
        return wrap(linear(comm.rank), comm, init_sync=False).module.weight

    for number, weight in enumerate(run_threads(rank, 2)):
        assert torch.equal(weight, linear(number).weight)


# Averaging


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_the_mean_over_ranks(size: int) -> None:
    def rank(comm: Communicator) -> tuple[list[Tensor | None], list[Tensor | None]]:
        model = wrap(mlp(), comm)
        local = mlp()
        for module in (local, model):
            module(samples(3, comm.rank)).square().sum().backward()
        return grads(model), grads(local)

    results = run_threads(rank, size)
    for position, mean in enumerate(results[0][0]):
        expected = sum(local[position] / size for _, local in results)  # type: ignore[operator]
        assert torch.allclose(mean, expected, rtol=1e-13, atol=0)  # type: ignore[arg-type]
    assert all(equal(averaged, results[0][0]) for averaged, _ in results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_the_buckets_and_stay_there(set_to_none: bool) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm)
        storages = []
        for _ in range(3):
            model.zero_grad(set_to_none=set_to_none)
            model(samples(2, comm.rank)).sum().backward()
            storages.append({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None})
        assert len(storages[-1]) == 1, "four small gradients share one bucket"
        assert storages[1] == storages[2]

    run_threads(rank, 2)


def test_strides_of_parameters_are_those_of_their_gradients() -> None:
    def rank(comm: Communicator) -> None:
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        module.odd = nn.Parameter(torch.ones(6, 4)[::2])
        model = wrap(module, comm)
        (model(torch.ones(1, 3, 5, 5)).sum() * model.module.odd.sum()).backward()
        assert module.weight.grad is not None
        assert module.weight.grad.stride() == module.weight.stride()
        assert module.odd.grad is not None
        assert module.odd.grad.shape == (3, 4)

    run_threads(rank, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes_beside_float32(dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Parameter(torch.ones(3))
            self.special = nn.Parameter(torch.full((2,), 2.0, dtype=dtype))

        def forward(self, x: float) -> Tensor:
            return (self.plain * x).sum() + (self.special * x).sum().abs().float()

    def rank(comm: Communicator) -> None:
        model = wrap(Mixed(), comm)
        for _ in range(2):  # the first backward orders the buckets anew
            model.zero_grad()
            model.backward(model(1.0 + comm.rank), weight=1 + comm.rank)
        assert model.plain.grad is not None
        assert torch.allclose(model.plain.grad, torch.full((3,), 5 / 3))
        assert model.special.grad is not None
        assert model.special.grad.dtype == dtype
        assert torch.allclose(model.special.grad.real.float(), torch.full((2,), 5 / 3), rtol=1e-2)

    run_threads(rank, 2)


def test_sparse_gradients_are_averaged_like_dense_ones() -> None:
    def rank(comm: Communicator) -> None:
        torch_tables = [nn.Embedding(10, 3, sparse=sparse) for sparse in (True, False)]
        with torch.no_grad():
            torch_tables[1].weight.copy_(torch_tables[0].weight)
        models = [wrap(table, comm) for table in torch_tables]
        # Rank 2 uses no row at all; rows repeat within a rank and over ranks.
        rows = torch.tensor([[1, 1, 4], [4, 9, 0], []][comm.rank], dtype=torch.int64)
        for _ in range(2):
            for model in models:
                model.zero_grad()
                (model(rows) * (comm.rank + 1)).sum().backward()
            sparse, dense = (model.module.weight.grad for model in models)
            assert sparse is not None
            assert dense is not None
            assert sparse.is_sparse
            assert torch.allclose(sparse.to_dense(), dense)

    run_threads(rank, 3)


def test_exchanges_start_while_backward_is_running() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        module = mlp()
        model = wrap(module, recorder, bucket_cap_mb=0.0)
        model(samples(2)).sum().backward()
        recorder.log.clear()
        first_layer_done: list[int] = []
        module[0].weight.register_post_accumulate_grad_hook(lambda _: first_layer_done.append(len(recorder.log)))
        model(samples(2)).sum().backward()
        assert len(recorder.log) == 4, "a bucket for each parameter"
        assert first_layer_done == [3], "all but the last had left before the first layer's gradient was there"

    run_threads(rank, 2)


# Accumulation and unused parameters


def test_no_sync_counts_where_backward_is_called() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        recorder.log.clear()
        loss = model(samples(2, comm.rank)).sum()
        with model.no_sync():
            loss.backward()
        assert recorder.log == [], "forward outside, backward inside"
        with model.no_sync():
            loss = model(samples(2, comm.rank)).sum()
        loss.backward()
        assert recorder.log, "forward inside, backward outside"
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        assert model.require_backward_grad_sync

    run_threads(rank, 2)


class Choosing(nn.Module):
    """Uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = linear(0)
        self.branches = nn.ModuleList([linear(1), linear(2)])

    def forward(self, x: Tensor, *which: int) -> Tensor:
        return self.always(x) + sum((self.branches[i](x) for i in which), torch.zeros(2, dtype=x.dtype))


@pytest.mark.parametrize("size", [2, 3])
def test_unused_parameters_need_no_flag(size: int) -> None:
    def rank(comm: Communicator) -> list[list[Tensor | None]]:
        model = wrap(Choosing(), comm)
        model(samples(2), 0, 1).sum().backward()  # all used
        history = [grads(model)]
        model.zero_grad()
        model(samples(2, comm.rank), *([0] if comm.rank == 0 else [])).sum().backward()  # 0 on one rank, 1 on none
        history.append(grads(model))
        model(samples(2, comm.rank)).sum().backward()  # neither, with gradients there
        history.append(grads(model))
        return history

    results = run_threads(rank, size)
    assert all(equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))
    _, some, none = results[0]
    local = Choosing()
    local(samples(2, 0), 0).sum().backward()
    used = local.branches[0].weight.grad
    assert used is not None
    assert torch.allclose(some[2], used / size, rtol=1e-14)  # type: ignore[arg-type]
    assert some[4:] == [None, None]
    assert torch.equal(some[2], none[2]), "a gradient that no rank has stays, to the bit"  # type: ignore[arg-type]
    assert none[4:] == [None, None]


def test_a_gradient_from_no_sync_counts_though_the_next_backward_does_not_touch_it() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Choosing(), comm)
        with model.no_sync():
            model(samples(2), *([0] if comm.rank == 1 else [])).sum().backward()
        model(samples(2)).sum().backward()
        return grads(model)

    first, second = run_threads(rank, 2)
    assert equal(first, second)
    assert first[2] is not None
    assert bool(first[2].any())


# Parameters and modules that change


def test_a_module_that_is_moved_or_cast_after_wrapping_is_refused() -> None:
    def rank(comm: Communicator) -> None:
        advice = "move and cast the module first, wrap it then"
        with pytest.raises(ReplicaError, match=rf"rank 0: parameter weight was torch.float64 on cpu .*{advice}"):
            wrap(linear(), comm).float()
        with pytest.raises(ReplicaError, match=r"is torch\.float64 on meta now"):
            wrap(linear(), comm).to("meta")
        model = wrap(linear(), comm)
        model.double()
        model.module.float()
        with pytest.raises(ReplicaError, match=r"is torch\.float32 on cpu now"):
            model(samples(2))

    run_threads(rank, 1)


def test_parameters_unfrozen_after_wrapping_are_averaged() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        module = mlp()
        module[0].requires_grad_(False)
        model = wrap(module, comm)
        model(samples(2, comm.rank)).sum().backward()
        assert module[0].weight.grad is None
        module[0].requires_grad_(True)
        module[2].bias.requires_grad_(False)
        for _ in range(2):
            model.zero_grad()
            model(samples(2, comm.rank)).sum().backward()
        return grads(model)

    first, second = run_threads(rank, 2)
    assert equal(first, second)
    assert [g is None for g in first] == [False, False, False, True]


def test_parameters_are_not_unfrozen_within_an_accumulation() -> None:
    def rank(comm: Communicator) -> None:
        module = mlp()
        module[0].requires_grad_(False)
        model = wrap(module, comm)
        with model.no_sync():
            model(samples(2)).sum().backward()
        module[0].requires_grad_(True)
        with pytest.raises(ReplicaError, match="unfrozen while gradients accumulate"):
            model(samples(2))

    run_threads(rank, 1)


def test_a_dropped_wrapper_takes_its_hooks_along() -> None:
    def rank(comm: Communicator) -> None:
        module, recorder = linear(), Recorder(comm)
        model = wrap(module, recorder)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        recorder.log.clear()
        module(samples(2)).sum().backward()
        assert recorder.log == []
        wrap(module, recorder)(samples(2)).sum().backward()
        assert sum(line.startswith("all_reduce") for line in recorder.log) == 1

    run_threads(rank, 1)


def test_ignored_parameters_are_left_alone() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        module = linear(comm.rank)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
        model = wrap(module, comm)
        (model(samples(2)) * (1 + comm.rank)).sum().backward()
        return [module.weight.detach(), module.bias.detach(), *grads(model)]

    first, second = run_threads(rank, 2)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True, False]  # type: ignore[arg-type]

"""Communication hooks over ranks that are threads: what a hook sees, what becomes of what it returns, and failures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from user_hooks import done, mean

from samestep.comm.base import Communicator
from samestep.parallel.averaging import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from samestep.parallel.hooks import GradBucket, Traits, traits_of
from samestep.testing.ranks import run_threads

Hook = Callable[[Any, Any], Any]


def same(results: list[list[Tensor | None]]) -> bool:
    return all(equal(result, results[0]) for result in results)


# What a hook sees


def test_a_hook_sees_this_ranks_gradients_undivided_bucket_by_bucket() -> None:
    def rank(comm: Communicator) -> None:
        model, seen = wrap(mlp(), comm, bucket_cap_mb=0.0), list[GradBucket]()
        local = mlp()

        def hook(state: str, bucket: GradBucket) -> Any:
            assert state == "state"
            assert [t.shape for t in bucket.gradients()] == [p.shape for p in bucket.parameters()]
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                expected[id(parameter)] = gradient.clone()
            seen.append(bucket)
            return mean(comm, bucket)

        model.register_comm_hook("state", hook)
        for _ in range(2):
            expected: dict[int, Tensor] = {}
            seen.clear()
            for module in (model, local):
                module.zero_grad()
                module(samples(3, comm.rank)).square().sum().backward()
            assert [b.index() for b in seen] == list(range(4))
            assert [b.is_last() for b in seen] == [False, False, False, True]
            for parameter, twin in zip(model.parameters(), local.parameters(), strict=True):
                assert torch.equal(expected[id(parameter)], twin.grad)  # type: ignore[arg-type]

    run_threads(rank, 2)


def test_gradients_of_a_bucket_are_views_of_the_buffer_that_was_set() -> None:
    def rank(comm: Communicator) -> None:
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

        def hook(_: None, bucket: GradBucket) -> Any:
            weight = next(i for i, p in enumerate(bucket.parameters()) if p is module.weight)
            before = bucket.gradients()[weight].clone()
            room = torch.zeros(bucket.buffer().numel() + 5, dtype=torch.float64)
            bucket.set_buffer(room[5:].copy_(bucket.buffer()))
            after = bucket.gradients()[weight]
            assert torch.equal(before.double(), after)
            assert after.stride() == module.weight.stride()
            after.fill_(7.0)
            return done(bucket.buffer())

        model = wrap(module, comm)
        model.register_comm_hook(None, hook)
        model(torch.ones(1, 3, 5, 5)).sum().backward()
        assert module.weight.grad is not None
        assert bool((module.weight.grad == 7.0).all())

    run_threads(rank, 1)


@pytest.mark.parametrize(
    "give",
    [
        lambda buffer: done(torch.full_like(buffer, 3.0)),
        lambda buffer: done([torch.full_like(buffer, 3.0)]),
        lambda buffer: done(torch.full((2, buffer.numel() // 2), 3.0, dtype=torch.float16)),
        lambda buffer: done(buffer.fill_(3.0)),
        lambda buffer: done(torch.full((buffer.numel() * 2,), 3.0)[::2].requires_grad_()),
    ],
)
def test_what_a_hook_returns_is_the_average(give: Callable[[Tensor], Any]) -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(linear(), comm)
        model.register_comm_hook(None, lambda _, bucket: give(bucket.buffer()))
        for _ in range(2):
            model.zero_grad()
            model(samples(2, comm.rank)).sum().backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
        return grads(model)

    for result in run_threads(rank, 2):
        assert all(g is not None and bool((g == 3.0).all()) for g in result)


# Hooks of ours


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(6, 4, sparse=True, dtype=torch.float64), linear()
        with torch.no_grad():
            self.table.weight.copy_(samples(6))

    def forward(self, rank: int) -> Tensor:
        result: Tensor = self.layer(self.table(torch.tensor([rank, 5])))
        return result


@pytest.mark.parametrize("size", [1, 2, 3])
def test_averaging_by_a_hook_of_ours_changes_no_bit(size: int) -> None:
    def rank(comm: Communicator) -> None:
        for cap in (None, 0.0):
            plain, hooked, builtin = (wrap(Table(), comm, bucket_cap_mb=cap) for _ in range(3))
            hooked.register_comm_hook(comm, allreduce_hook)
            builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
            for _ in range(2):
                for model in (plain, hooked, builtin):
                    model.zero_grad()
                    model(comm.rank).square().sum().backward()
                for model in (hooked, builtin):
                    assert equal(dense(model), dense(plain))
                    assert hooked.module.table.weight.grad.is_sparse

    run_threads(rank, size)


def test_rows_of_sparse_gradients_travel_in_half_precision_and_are_added_in_full() -> None:
    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        model, local = wrap(Table(), comm), Table()
        model.register_comm_hook(comm, fp16_compress_hook)
        for module in (model, local):
            module(comm.rank).square().sum().backward()
        halved = (local.table.weight.grad.to_dense() * 0.5).half().double()
        return halved, model.module.table.weight.grad.to_dense()

    (first, got), (second, same_got) = run_threads(rank, 2)
    assert torch.equal(got, first + second)
    assert torch.equal(got, same_got)


def test_buckets_leave_while_backward_is_running() -> None:
    def rank(comm: Communicator) -> None:
        calls: list[int] = []

        def hook(_: None, bucket: GradBucket) -> Any:
            calls.append(bucket.index())
            return allreduce_hook(comm, bucket)

        module = mlp()
        model = wrap(module, comm, bucket_cap_mb=0.0)
        model.register_comm_hook(None, hook)
        model(samples(2)).sum().backward()
        calls.clear()
        at_the_first_layer: list[int] = []
        module[0].weight.register_post_accumulate_grad_hook(lambda _: at_the_first_layer.extend(calls))
        model(samples(2)).sum().backward()
        assert at_the_first_layer == [0, 1, 2]

    run_threads(rank, 2)


def dense(model: nn.Module) -> list[Tensor | None]:
    return [g if g is None else g.to_dense() for g in grads(model)]


@pytest.mark.parametrize(("hook", "dtype"), [(fp16_compress_hook, torch.float16), (bf16_compress_hook, torch.bfloat16)])
def test_compressed_averages_are_rounded_before_and_after(hook: Hook, dtype: torch.dtype) -> None:
    def rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor | None]]:
        model, local = wrap(mlp(), comm), mlp()
        model.register_comm_hook(comm, hook)
        for module in (model, local):
            module(samples(3, comm.rank)).square().mean().backward()
        return [(p.grad.to(dtype) * 0.5) for p in local.parameters() if p.grad is not None], grads(model)

    (first, got), (second, same_got) = run_threads(rank, 2)
    assert equal(got, same_got)
    assert equal(got, [(a.float() + b.float()).to(dtype).double() for a, b in zip(first, second, strict=True)])


def test_complex_gradients_are_not_squeezed_into_half_precision() -> None:
    def rank(comm: Communicator) -> None:
        module = nn.Module()
        module.p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        model = wrap(module, comm)
        model.register_comm_hook(comm, fp16_compress_hook)
        with pytest.raises(TypeError, match=r"rank 0: complex gradients can't be averaged in torch.float16"):
            model.p.abs().sum().backward()

    run_threads(rank, 1)


# Together with the rest


@pytest.mark.parametrize("counts", [(1, 4), (5, 0, 2)])
@pytest.mark.parametrize("hook", [mean, allreduce_hook])
def test_weights_are_exact_with_hooks_that_average(counts: tuple[int, ...], hook: Hook) -> None:
    whole = samples(sum(counts))
    reference = mlp()
    reference(whole).square().mean().backward()

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(mlp(), comm)
        model.register_comm_hook(comm, hook, averages=True if hook is mean else None)
        start = sum(counts[: comm.rank])
        mine = whole[start : start + counts[comm.rank]]
        for _ in range(2):
            model.zero_grad()
            for part, context in ((mine[:1], model.no_sync()), (mine[1:], None)):
                loss = model(part).square().mean() if len(part) else None
                if context is None:
                    model.backward(loss, weight=len(part))
                else:
                    with context:
                        model.backward(loss, weight=len(part))
        return grads(model)

    results = run_threads(rank, len(counts))
    assert same(results)
    for got, parameter in zip(results[0], reference.parameters(), strict=True):
        assert torch.allclose(got, parameter.grad, rtol=1e-12, atol=1e-15)  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", [mean, debugging_hooks.noop_hook, powerSGD_hook.powerSGD_hook])
def test_weights_are_refused_with_hooks_that_may_not_average(hook: Hook) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        model.register_comm_hook(comm, hook)
        with pytest.raises(ValueError, match=rf"rank {comm.rank}: .*of {hook.__qualname__} that is not known"):
            model.backward(model(samples(2)).sum(), weight=2)

    run_threads(rank, 2)


def test_weights_are_refused_where_a_hook_averages_over_some_ranks_only() -> None:
    def rank(comm: Communicator) -> None:
        part = [comm.split([number]) for number in range(comm.size)][comm.rank]
        model = wrap(linear(), comm)
        model.register_comm_hook(part, allreduce_hook)
        with pytest.raises(ValueError, match="that is not known"):
            model.backward(model(samples(2)).sum(), weight=2)

    run_threads(rank, 2)


def test_what_is_known_of_hooks() -> None:
    plain, nothing = Traits(averages=True, at_once=True), Traits()
    wrapped = default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    for hook in (allreduce_hook, default_hooks.fp16_compress_hook, functools.partial(fp16_compress_hook), wrapped):
        assert traits_of(hook) == plain
    for hook in (mean, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), debugging_hooks.noop_hook):
        assert traits_of(hook) == nothing


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.some, self.never = linear(0), linear(1), linear(2)

    def forward(self, x: Tensor, some: bool) -> Tensor:
        result: Tensor = self.always(x) + (self.some(x) if some else 0)
        return result


def test_accumulation_and_unused_parameters_are_as_without_a_hook() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        plain, hooked = wrap(Branches(), comm), wrap(Branches(), comm)
        calls: list[int] = []

        def hook(_: None, bucket: GradBucket) -> Any:
            calls.append(bucket.index())
            return allreduce_hook(comm, bucket)

        hooked.register_comm_hook(None, hook)
        for step in range(3):
            for model in (plain, hooked):
                model.zero_grad(set_to_none=step != 1)
                with model.no_sync():
                    model(samples(2, comm.rank), step == 1).sum().backward()
                assert len(calls) == step, "no_sync exchanges nothing"
                model(samples(3, comm.rank), comm.rank == 0).square().sum().backward()
            assert equal(grads(plain), grads(hooked))
            assert hooked.module.never.weight.grad is None
        return grads(hooked)

    assert same(run_threads(rank, 2))


def test_a_hook_may_be_registered_between_steps_and_outlives_unfreezing() -> None:
    def rank(comm: Communicator) -> None:
        module = mlp()
        module[0].requires_grad_(False)
        model, calls = wrap(module, comm), list[int]()

        def hook(_: None, bucket: GradBucket) -> Any:
            calls.append(bucket.index())
            return allreduce_hook(comm, bucket)

        for step in range(5):
            if step == 2:
                model.register_comm_hook(None, hook)
            if step == 4:
                module[0].requires_grad_(True)
            model.zero_grad()
            model(samples(2, comm.rank)).sum().backward()
        assert len(calls) == 3
        twin = wrap(mlp(), comm)
        twin(samples(2, comm.rank)).sum().backward()
        assert equal(grads(model), grads(twin))

    run_threads(rank, 2)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_bucket_waits_for_a_hook_that_may_exchange_again_in_its_future(at_once: bool) -> None:
    def rank(comm: Communicator) -> list[str]:
        order: list[str] = []

        class Later:
            def __init__(self, bucket: GradBucket) -> None:
                self.bucket = bucket

            def wait(self) -> Tensor:
                order.append(f"wait {self.bucket.index()}")
                return comm.all_reduce(self.bucket.buffer()) / comm.size

        def hook(_: None, bucket: GradBucket) -> Any:
            order.append(f"call {bucket.index()}")
            return Later(bucket)

        hook.traits = Traits(at_once=at_once)  # type: ignore[attr-defined]
        model = wrap(linear(), comm, bucket_cap_mb=0.0)
        model.register_comm_hook(None, hook)
        model(samples(2, comm.rank)).sum().backward()
        return order

    in_turns = ["call 0", "wait 0", "call 1", "wait 1"]
    expected = ["call 0", "call 1", "wait 0", "wait 1"] if at_once else in_turns
    assert run_threads(rank, 2) == [expected, expected]

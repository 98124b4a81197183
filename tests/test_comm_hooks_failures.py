"""Communication hooks that fail, and what can be no hook, over ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import equal, grads, linear, mlp, samples, wrap
from torch import Tensor
from torch.futures import Future
from user_hooks import done, mean

from samestep.comm.base import Communicator
from samestep.errors import PeerLostError, ReplicaError
from samestep.parallel.averaging import allreduce_hook
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.hooks import GradBucket
from samestep.testing.ranks import run_threads

Hook = Callable[[Any, Any], Any]


class BoomError(Exception):
    pass


def failing(comm: Communicator, where: str, ranks: set[int], armed: list[bool]) -> Hook:
    """A hook that fails on `ranks` as long as it is armed, at bucket 1, where it is called or waited for."""

    def hook(_: None, bucket: GradBucket) -> Any:
        fails = armed[0] and comm.rank in ranks and bucket.index() == 1 and bool(bucket.buffer().any())
        if fails and where == "call":
            raise BoomError
        promise = allreduce_hook(comm, bucket)
        if not fails:
            return promise
        promise.wait()
        if where == "future":
            future: Future[Tensor] = Future()
            future.set_exception(BoomError())  # type: ignore[no-untyped-call]
            return future
        return done(torch.zeros(3)) if where == "length" else "nothing to wait for"

    return hook


@pytest.mark.parametrize("ranks", [{1}, {0, 1}])
@pytest.mark.parametrize(("where", "kind"), [("call", BoomError), ("future", BoomError), ("length", ValueError)])
@pytest.mark.parametrize("learned", [False, True])
def test_an_exception_in_a_hook_is_every_ranks(
    where: str, kind: type[Exception], ranks: set[int], learned: bool
) -> None:
    def rank(comm: Communicator) -> None:
        armed = [not learned]
        model = wrap(mlp(), comm, bucket_cap_mb=0.0)
        model.register_comm_hook(None, failing(comm, where, ranks, armed))
        if learned:
            model(samples(2)).sum().backward()
            armed[0] = True
        model.zero_grad()
        loss = model(samples(2, comm.rank)).sum()
        if comm.rank in ranks:
            with pytest.raises(kind):
                loss.backward()
        else:
            with pytest.raises(ReplicaError, match=r"rank 0: rank\(s\) \[1\] left backward with an exception"):
                loss.backward()
        armed[0] = False
        twin = wrap(mlp(), comm)
        for module in (model, twin):
            module.zero_grad()
            module(samples(2, comm.rank)).sum().backward()
        assert equal(grads(model), grads(twin))

    run_threads(rank, 2)


class Stumble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise BoomError


def test_a_rank_that_left_backward_takes_part_in_the_hooks_exchanges() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm, bucket_cap_mb=0.0)
        model.register_comm_hook(comm, mean)
        model(samples(2)).sum().backward()
        x = samples(2, comm.rank)
        if comm.rank == 1:
            with pytest.raises(BoomError):  # the last layer's gradients are there by then
                model.module[2](Stumble.apply(model.module[:2](x))).sum().backward()
        else:
            with pytest.raises(ReplicaError, match=r"rank\(s\) \[1\]"):
                model(x).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        assert all(g is not None for g in grads(model))

    run_threads(rank, 2)


class StubbornError(Exception):
    pass


def stubborn(comm: Communicator, ranks: set[int], armed: list[bool]) -> Hook:
    """A hook that fails on `ranks`, with zeros too, as long as it is armed."""

    def hook(_: None, bucket: GradBucket) -> Any:
        if armed[0] and comm.rank in ranks:
            raise StubbornError
        return mean(comm, bucket)

    return hook


def test_a_hook_that_fails_on_all_ranks_can_be_mended_and_the_next_step_is_right() -> None:
    def rank(comm: Communicator) -> None:
        armed = [True]
        model = wrap(mlp(), comm, bucket_cap_mb=0.0)
        model.register_comm_hook(None, stubborn(comm, {0, 1}, armed))
        with pytest.raises(StubbornError):
            model(samples(2)).sum().backward()
        with pytest.raises(StubbornError):  # it makes good for that backward, and fails again
            model(samples(2))
        armed[0] = False
        twin = wrap(mlp(), comm)
        for module in (model, twin):
            module.zero_grad()
            module(samples(2, comm.rank)).sum().backward()
        assert equal(grads(model), grads(twin))

    run_threads(rank, 2)


def test_a_hook_that_cannot_exchange_on_one_rank_is_an_error_on_the_others() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm)
        model.register_comm_hook(None, stubborn(comm, {1}, [True]))
        kind = StubbornError if comm.rank == 1 else PeerLostError
        with pytest.raises(kind):
            model(samples(2)).sum().backward()

    run_threads(rank, 2)


# What is refused


def wrong_bucket(state: object, bucket: int) -> Future[Tensor]: ...  # type: ignore[empty-body]


def wrong_return(state: object, bucket: GradBucket) -> int: ...  # type: ignore[empty-body]


class Calls:
    def __call__(self, state: object, bucket: dist.GradBucket) -> Any:
        return done(bucket.buffer())


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (3, TypeError, "Communication hook must be callable."),
        (lambda bucket: bucket, TypeError, r"must be callable as hook\(state, bucket\): too many positional"),
        (wrong_bucket, ValueError, "Communication hook: bucket annotation should be dist.GradBucket."),
        (wrong_return, ValueError, r"return annotation should be torch.futures.Future\[torch.Tensor\]."),
    ],
)
def test_what_can_be_no_hook_is_refused_and_noted(hook: Any, error: type[Exception], message: str) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        with pytest.raises(error, match=message):
            model.register_comm_hook(None, hook)
        data = model._get_ddp_logging_data()
        assert data["has_error"] == 1
        assert "Communication hook" in data["error"]
        model.register_comm_hook(None, Calls())
        assert model._get_ddp_logging_data()["comm_hook"] == "Calls"

    run_threads(rank, 1)


def test_a_second_hook_is_torchs_own_error() -> None:
    def rank(comm: Communicator) -> None:
        for first in (lambda m: m.register_comm_hook(comm, mean), lambda m: m._register_builtin_comm_hook(builtin)):
            model = wrap(linear(), comm)
            first(model)
            for again in (
                lambda m: m.register_comm_hook(comm, mean),
                lambda m: m._register_builtin_comm_hook(builtin),
            ):
                with pytest.raises(RuntimeError, match=r"register_\w+ or register_\w+ can only be called once"):
                    again(model)
        with pytest.raises(TypeError, match=r"expected one of .*ALLREDUCE.*, got 'mean'"):
            wrap(linear(), comm)._register_builtin_comm_hook("mean")

    builtin = dist.BuiltinCommHookType.FP16_COMPRESS
    run_threads(rank, 1)


def test_a_hook_is_not_registered_during_a_backward() -> None:
    def rank(comm: Communicator) -> None:
        module = linear()
        model = wrap(module, comm)
        module.weight.register_post_accumulate_grad_hook(lambda _: model.register_comm_hook(comm, mean))
        with pytest.raises(ReplicaError, match=r"rank 0: a communication hook was registered while a backward was"):
            model(samples(2)).sum().backward()

    run_threads(rank, 1)


def test_a_hook_that_returns_nothing_to_wait_for_is_told_so() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object, but got Tensor from"):
            model(samples(2)).sum().backward()

    run_threads(rank, 1)


def test_copies_come_without_the_hook() -> None:
    def rank(comm: Communicator) -> None:
        import copy

        model = wrap(linear(), comm)
        model.register_comm_hook(comm, mean)
        other: DistributedDataParallel = copy.deepcopy(model)
        assert "comm_hook" not in other._get_ddp_logging_data()
        other.register_comm_hook(comm, mean)

    run_threads(rank, 1)

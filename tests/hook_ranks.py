"""What the ranks of the hook tests do that need torch.distributed; light to import, as every process imports it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from models import equal, grads
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)

from samestep.comm.base import Communicator
from samestep.errors import PeerLostError, ReplicaError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.samples import refused

TorchsClass = nn.parallel.DistributedDataParallel
Register = Callable[[Any], None]

__all__ = [
    "compare_fused",
    "compare_hooks",
    "compare_weights",
    "compare_zero",
    "fail_before_stepping",
    "lose_a_rank_in_a_hook",
]


def _power(matrix: int, start: int, *, feedback: bool = True) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix, start, 0.5, feedback, feedback)


def _hook(hook: Any, state: Callable[[], object] = lambda: None) -> Register:
    return lambda model: model.register_comm_hook(state(), hook)


def _local_sgd(model: Any) -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def _named(kind: DDPCommHookType, state: object = None) -> Register:
    return lambda model: register_ddp_comm_hook(kind, model, state)


def _registrations() -> dict[str, Register]:
    """Return everything of torch's that registers a hook and runs on CPUs there."""
    default, builtin = default_hooks, dist.BuiltinCommHookType
    found = {
        "allreduce": _hook(default.allreduce_hook),
        "allreduce over a group": _hook(default.allreduce_hook, lambda: dist.group.WORLD),
        "fp16": _hook(default.fp16_compress_hook),
        "fp16 around": _hook(default.fp16_compress_wrapper(default.allreduce_hook)),
        "PowerSGD": _hook(powerSGD_hook.powerSGD_hook, lambda: _power(1, 2)),
        "PowerSGD, rank 2": _hook(powerSGD_hook.powerSGD_hook, lambda: _power(2, 2, feedback=False)),
        "fp16 around PowerSGD": _hook(
            default.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), lambda: _power(1, 20)
        ),
        "batched PowerSGD": _hook(powerSGD_hook.batched_powerSGD_hook, lambda: _power(1, 2)),
        "post-local SGD": _local_sgd,
        "quantised": _hook(quantization_hooks.quantization_pertensor_hook),
        "quantised by channel": _hook(quantization_hooks.quantization_perchannel_hook),
        "nothing": _hook(debugging_hooks.noop_hook),
        "built-in allreduce": lambda model: model._register_builtin_comm_hook(builtin.ALLREDUCE),
        "built-in fp16": lambda model: model._register_builtin_comm_hook(builtin.FP16_COMPRESS),
    }
    kinds = {f"named {kind.name}": _named(kind) for kind in DDPCommHookType if kind.name != "BF16_COMPRESS"}
    for name in [name for name in kinds if "POWER_SGD" in name]:
        del kinds[name]
    return found | kinds


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).tanh()) * self.scale
        return result


def _train(kind: Any, register: Register, rank: int, cap: float | None, accumulate: bool) -> list[Tensor | None]:
    torch.manual_seed(3)
    model = kind(Net(), bucket_cap_mb=cap)
    register(model)
    data = torch.Generator().manual_seed(50 + rank)
    seen: list[Tensor | None] = []
    for _ in range(4):
        model.zero_grad()
        for last in (False, True) if accumulate else (True,):
            with nullcontext() if last else model.no_sync():
                model(torch.randn(5, 6, generator=data)).square().mean().backward()
        seen += grads(model)
    return seen


class _AsOverNccl:
    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, outputs: list[Tensor], tensor: Tensor, **kwargs: Any) -> Any:
        future = dist.all_gather(outputs, tensor, **kwargs).get_future()
        return SimpleNamespace(get_future=lambda: future.then(lambda _: [torch.stack(outputs)]))


def compare_hooks(comm: Communicator) -> dict[str, str]:
    """Train with each of torch's hooks in torch's class and in ours; return how they differ, by name."""
    differ: dict[str, str] = {}
    # These hooks expect the futures of all_gather in the form of NCCL: all in one tensor.
    quantization_hooks.dist = _AsOverNccl()
    batched = powerSGD_hook._orthogonalize
    # torch 2.13's batched hook gives one matrix to a function that has come to want several.
    powerSGD_hook._orthogonalize = lambda m, epsilon=0: batched(m.view(-1, *m.shape[-2:]), epsilon)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.ao.quantization: it will move
        for name, register in _registrations().items():
            for accumulate in (False, True):
                ours = _train(DistributedDataParallel, register, comm.rank, None, accumulate)
                theirs = _train(TorchsClass, register, comm.rank, None, accumulate)
                if not equal(ours, theirs):
                    gaps = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]  # type: ignore[operator]
                    differ[f"{name}, accumulate={accumulate}"] = str(max(gaps))
        # Several buckets, each of whose hooks makes one exchange after the other.
        power = _hook(powerSGD_hook.powerSGD_hook, lambda: _power(1, 2))
        several = _train(DistributedDataParallel, power, comm.rank, 0.0, False)
        everywhere = comm.all_gather_object(several)
        if not equal(everywhere[0], everywhere[-1]):
            differ["PowerSGD in several buckets"] = "ranks have different gradients"
    return differ


def compare_weights(comm: Communicator) -> list[float]:
    """Train uneven shares with weights and each of torch's hooks that averages; return the gaps to one process."""
    torch.manual_seed(3)
    whole, counts = torch.randn(5, 6), [1, 4]
    reference = Net()
    reference(whole).square().mean().backward()
    mine = whole[sum(counts[: comm.rank]) :][: counts[comm.rank]]
    gaps = []
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        twin = Net()
        twin.load_state_dict(reference.state_dict())
        model = DistributedDataParallel(twin)
        model.register_comm_hook(None, hook)
        model.backward(model(mine).square().mean(), weight=len(mine))
        pairs = zip(twin.parameters(), reference.parameters(), strict=True)
        gaps.append(max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs))  # type: ignore[union-attr, operator]
    return gaps


def compare_fused(comm: Communicator) -> dict[str, bool]:
    """Train with optimizers that step in backward, and with ones that step after it; return which are equal."""
    return {
        "fused, torch's class after backward": _stepped(comm, TorchsClass, "after") == _stepped(comm, None, "fused"),
        "some fused": _stepped(comm, None, "some fused") == _stepped(comm, TorchsClass, "some after"),
        "in backward": _stepped(comm, None, "in backward") == _stepped(comm, TorchsClass, "after"),
        "in backward, applied before": _stepped(comm, None, "before") == _stepped(comm, TorchsClass, "after"),
    }


def _stepped(comm: Communicator, kind: Any, how: str) -> list[list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which it uses
        from torch.distributed.optim import _apply_optimizer_in_backward
    torch.manual_seed(3)
    net = Net()
    settings = {"lr": 0.1, "momentum": 0.9}
    if how == "before":
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), settings)
    model = (kind or DistributedDataParallel)(net)
    chosen = list(net.parameters())[:2] if how.startswith("some") else list(net.parameters())
    optimizer = torch.optim.SGD(chosen, **settings)
    if how == "fused":
        model._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
    if how == "some fused":
        model._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9, optim_params=chosen)
    if how == "in backward":
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), settings)
    data = torch.Generator().manual_seed(50 + comm.rank)
    for _ in range(3):
        model.zero_grad()
        with model.no_sync():
            model(torch.randn(5, 6, generator=data)).square().mean().backward()
        model(torch.randn(5, 6, generator=data)).square().mean().backward()
        if "after" in how:
            optimizer.step()
        if how in ("in backward", "before"):
            assert all(p.grad is None for p in net.parameters())
    return [p.detach().flatten().tolist() for p in net.parameters()]


def compare_zero(comm: Communicator) -> dict[str, bool]:
    """Train with ZeroRedundancyOptimizer's steps within communication hooks; return where both classes end alike.

    Not over a group that is called "gloo", which these hooks refuse. In torch's class with one bucket: the interleaved
    hook broadcasts when a bucket is there, which may be before the next bucket's exchange on one rank and after it on
    the other.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which it uses
        from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def trained(kind: Any, around: Any) -> list[Tensor]:
        torch.manual_seed(3)
        net = Net()
        model = kind(net, bucket_cap_mb=None if kind is TorchsClass else 0.0)
        zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9)
        model.register_comm_hook(None, around(default_hooks.allreduce_hook, model, zero))
        data = torch.Generator().manual_seed(50 + comm.rank)
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(5, 6, generator=data)).square().mean().backward()
        return [p.detach() for p in net.parameters()]

    hooks = ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved
    return {h.__name__: equal(trained(DistributedDataParallel, h), trained(TorchsClass, h)) for h in hooks}


class _Stumble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError


def fail_before_stepping(comm: Communicator) -> list[list[float]]:
    """Rank 1 leaves a backward with an exception, so no rank's optimizer steps in it; then all step alike."""
    torch.manual_seed(3)
    net = Net()
    model = DistributedDataParallel(net)
    other = partial(model._register_fused_optim, torch.optim.LBFGS)
    said = refused(comm, "an optimizer without a functional form", other, ValueError)
    assert "does not have a functional counterpart" in said, said
    model._register_fused_optim(torch.optim.SGD, 0.5)
    before = [p.detach().clone() for p in net.parameters()]
    x = torch.ones(5, 6)
    loss = (net.last(_Stumble.apply(net.first(x))) if comm.rank == 1 else model(x)).sum()
    refused(comm, "a backward that failed", loss.backward, ArithmeticError if comm.rank == 1 else ReplicaError)
    assert equal(list(net.parameters()), before)
    model.zero_grad()
    model(x * comm.rank).sum().backward()
    assert not equal(list(net.parameters()), before)
    return [p.detach().flatten().tolist() for p in net.parameters()]


def lose_a_rank_in_a_hook(comm: Communicator) -> None:
    """Rank 1 ends within a hook, before its exchange; see what rank 0 is told."""
    model = DistributedDataParallel(Net())

    def hook(_: None, bucket: Any) -> Any:
        if comm.rank == 1:
            os._exit(7)
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, hook)
    try:
        model(torch.randn(5, 6)).sum().backward()
    except PeerLostError:
        return
    raise AssertionError("a rank was lost, and nothing was said")

"""SyncBatchNorm: what one process computes on all ranks' batches together, over ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import Recorder
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.comm.base import Communicator
from samestep.errors import MismatchError, ReplicaError
from samestep.parallel.batchnorm import SyncBatchNorm
from samestep.testing.ranks import run_threads

CHANNELS = 3
SHARES = [(4, 4), (7, 1), (3, 0, 5), (0, 8), (1, 1, 5, 1)]
SHAPES = [(8, 3), (8, 3, 5), (8, 3, 4, 5), (8, 3, 2, 3, 4)]

# How far apart two ways to add the same numbers may end, relative to the largest of them.
_ULPS = 16


class Result(NamedTuple):
    output: Tensor
    along: Tensor
    weight: Tensor
    bias: Tensor
    state: dict[str, Tensor]


class Whole(_BatchNorm):
    """torch's, for any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 3 + 5).to(dtype)


def layer(kind: Callable[..., Any], dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    made = kind(CHANNELS, dtype=dtype, **options)
    for parameter in made.parameters():
        parameter.data = batch((CHANNELS,), dtype, seed=len(parameter))
    return made


def passes(bn: Any, values: Tensor, cotangent: Tensor, steps: int = 1) -> Result:
    """Go forward and back, `steps` times with other values each; the results are of the last."""
    for step in range(steps):
        along = (values + step).requires_grad_()
        bn.zero_grad()
        output = bn(along)
        (output * cotangent).sum().backward()
    assert along.grad is not None
    found = [torch.empty(0) if p is None or p.grad is None else p.grad for p in (bn.weight, bn.bias)]
    return Result(output.detach(), along.grad, found[0], found[1], bn.state_dict())


def together(make: Callable[[Communicator], Any], shares: tuple[int, ...], *tensors: Tensor, steps: int = 1) -> Result:
    """Give every rank its share of the tensors, and put together what they have."""
    ends = [sum(shares[: rank + 1]) for rank in range(len(shares))]

    def rank(comm: Communicator) -> Result:
        mine = slice(ends[comm.rank] - shares[comm.rank], ends[comm.rank])
        values, cotangent = (t[mine] for t in tensors)
        return passes(make(comm), values, cotangent, steps)

    results = run_threads(rank, len(shares))
    for result in results:
        for name, value in results[0].state.items():
            assert name in ("weight", "bias") or torch.equal(result.state[name], value), name
    output, along = (torch.cat([result[field] for result in results]) for field in (0, 1))
    weight, bias = (torch.stack([result[field] for result in results]).sum(0) for field in (2, 3))
    return Result(output, along, weight, bias, results[0].state)


def near(found: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Compare to within rounding of the largest number, or of sums whose terms add up to `scale` in magnitude."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if not expected.numel():
        return True
    error = (found.double() - expected.double()).abs().max()
    return bool(error <= _ULPS * torch.finfo(expected.dtype).eps * max(float(expected.double().abs().max()), scale))


def agree(found: Result, expected: Result, cotangent: Tensor) -> None:
    terms = float(cotangent.transpose(0, 1).flatten(1).abs().sum(1).max())
    assert near(found.output, expected.output)
    assert near(found.along, expected.along)
    assert near(found.weight, expected.weight, terms)
    assert near(found.bias, expected.bias, terms)
    assert found.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        assert (
            torch.equal(found.state[name], value) if not value.is_floating_point() else near(found.state[name], value)
        ), name


# The same numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_compute_what_one_process_computes(
    shape: tuple[int, ...], shares: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = batch(shape, dtype), batch(shape, dtype, seed=1)
    found = together(lambda comm: layer(SyncBatchNorm, dtype, process_group=comm), shares, *tensors)
    agree(found, passes(layer(Whole, dtype), *tensors), tensors[1])


@pytest.mark.parametrize("shares", [(5, 3), (0, 6, 2)])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.3, 1.0, None])
def test_every_setting_means_the_same_over_several_steps(
    momentum: float | None, affine: bool, track: bool, shares: tuple[int, ...]
) -> None:
    settings = {"eps": 0.1, "momentum": momentum, "affine": affine, "track_running_stats": track}
    tensors = batch((8, 3, 4)), batch((8, 3, 4), seed=1)
    expected = passes(layer(Whole, **settings), *tensors, steps=3)
    found = together(lambda comm: layer(SyncBatchNorm, process_group=comm, **settings), shares, *tensors, steps=3)
    agree(found, expected, tensors[1])
    assert not track or found.state["num_batches_tracked"] == 3


def test_a_layer_may_have_no_bias() -> None:
    def biasless(make: Any, **options: Any) -> Any:
        made = layer(make, **options)
        made.bias = None
        return made

    tensors = batch((8, 3)), batch((8, 3), seed=1)
    found = together(lambda comm: layer(SyncBatchNorm, bias=False, process_group=comm), (3, 5), *tensors)
    agree(found, passes(biasless(Whole), *tensors), tensors[1])
    assert "bias" not in found.state


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.channels_last_3d])
def test_strides_stay(memory_format: torch.memory_format) -> None:
    shape = (8, 3, 4, 5) if memory_format is torch.channels_last else (8, 3, 2, 4, 5)
    tensors = tuple(batch(shape, seed=seed).contiguous(memory_format=memory_format) for seed in (0, 1))

    def make(comm: Communicator) -> Any:
        bn = layer(SyncBatchNorm, process_group=comm)
        bn.register_forward_hook(lambda _, inputs, output: seen.append(output))
        return bn

    seen: list[Tensor] = []
    agree(together(make, (6, 2), *tensors), passes(layer(Whole), *tensors), tensors[1])
    assert all(output.is_contiguous(memory_format=memory_format) for output in seen)


@pytest.mark.parametrize("parameters", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_counted_in_float32(dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    """As near as the half type allows to what float64 gives on the same values."""
    values, cotangent = batch((8, 3, 40), dtype), batch((8, 3, 40), dtype, seed=1)
    kept = parameters or dtype
    reference = layer(Whole, kept).double()
    expected = passes(reference, values.double(), cotangent.double())
    found = together(lambda comm: layer(SyncBatchNorm, kept, process_group=comm), (3, 0, 5), values, cotangent)
    assert (found.output.dtype, found.along.dtype, found.weight.dtype) == (dtype, dtype, kept)
    assert near(found.output, expected.output.to(dtype))
    assert near(found.along, expected.along.to(dtype))
    for name in ("running_mean", "running_var"):
        assert near(found.state[name], expected.state[name].to(kept))


def test_a_mean_far_from_zero_does_not_drown_the_variance() -> None:
    """Means near 1e4 are rounded to 0.0005, their squares to 4, which would be more than the variance."""
    values = batch((64, 3), torch.float32) + 1e4
    exact = values.double().var(0) * 0.1 + 0.9
    found = together(lambda comm: layer(SyncBatchNorm, torch.float32, process_group=comm), (50, 14), values, values)
    assert near(found.state["running_mean"], values.double().mean(0).float() * 0.1)
    assert ((found.state["running_var"] - exact).abs() < 1e-3).all()


def test_statistics_are_taken_without_gradients_too() -> None:
    def rank(comm: Communicator) -> dict[str, Tensor]:
        bn = layer(SyncBatchNorm, process_group=comm)
        with torch.no_grad():
            bn(batch((8, 3))[4 * comm.rank :][:4])
        return dict(bn.state_dict())

    whole = layer(Whole)
    whole(batch((8, 3)))
    for state in run_threads(rank, 2):
        assert near(state["running_mean"], whole.running_mean)
        assert near(state["running_var"], whole.running_var)


def test_an_exponential_average_goes_on_from_a_checkpoint_of_torchs_layer() -> None:
    trained = layer(nn.BatchNorm1d)
    trained(batch((8, 3)))
    state = copy.deepcopy(trained.state_dict())

    def make(comm: Communicator) -> Any:
        bn = SyncBatchNorm(CHANNELS, dtype=torch.float64, process_group=comm)
        bn.load_state_dict(state)
        return bn

    tensors = batch((8, 3), seed=2), batch((8, 3), seed=3)
    found = together(make, (2, 6), *tensors)
    agree(found, passes(trained, *tensors), tensors[1])
    layer(nn.BatchNorm1d).load_state_dict(found.state)


# What is exchanged


def test_one_exchange_forward_and_one_back() -> None:
    def rank(comm: Communicator) -> list[int]:
        recorder = Recorder(comm)
        bn, counts = layer(SyncBatchNorm, process_group=recorder), []
        for along in (batch((4, 3)).requires_grad_(), batch((4, 3))):
            output = bn(along)
            counts.append(len(recorder.log))
            output.sum().backward()
            counts.append(len(recorder.log))
        return counts

    assert run_threads(rank, 2) == [[1, 2, 3, 3]] * 2


def test_evaluation_exchanges_nothing_and_is_torchs() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        for track in (True, False):
            bn = layer(SyncBatchNorm, process_group=recorder, track_running_stats=track).eval()
            expected = passes(layer(Whole, track_running_stats=track).eval(), batch((4, 3)), batch((4, 3), seed=1))
            if comm.rank == 0:
                found = passes(bn, batch((4, 3)), batch((4, 3), seed=1))
                assert torch.equal(found.output, expected.output)
                assert torch.equal(found.along, expected.along)
        assert recorder.log == []

    run_threads(rank, 2)


@pytest.mark.parametrize("grouped", [True, False])
def test_one_rank_alone_is_torchs_layer(grouped: bool) -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        bn = layer(SyncBatchNorm, process_group=recorder if grouped else None)
        found, expected = (passes(x, batch((4, 3)), batch((4, 3), seed=1), steps=2) for x in (bn, layer(Whole)))
        for name in ("output", "along", "weight", "bias"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        assert all(torch.equal(value, expected.state[name]) for name, value in found.state.items())
        assert recorder.log == []

    run_threads(rank, 1)


# What is refused


@pytest.mark.parametrize("shares", [(1, 0), (0, 0, 1)])
def test_one_value_a_channel_in_all_is_refused_on_every_rank(shares: tuple[int, ...]) -> None:
    def rank(comm: Communicator) -> None:
        bn = layer(SyncBatchNorm, process_group=comm)
        with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel when training, got input size"):
            bn(batch((shares[comm.rank], 3)))
        comm.barrier()

    run_threads(rank, len(shares))


def test_no_value_at_all_is_torchs_business() -> None:
    def rank(comm: Communicator) -> None:
        tensors = torch.empty(0, 3, dtype=torch.float64), torch.empty(0, 3, dtype=torch.float64)
        found, expected = (passes(x, *tensors) for x in (layer(SyncBatchNorm, process_group=comm), layer(Whole)))
        assert found.output.shape == expected.output.shape
        for name, value in expected.state.items():
            assert torch.equal(found.state[name], value)

    run_threads(rank, 2)


def test_inputs_that_do_not_fit_are_refused_before_anything_is_exchanged() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        bn = layer(SyncBatchNorm, process_group=recorder)
        with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
            bn(batch((4,)))
        with pytest.raises(ValueError, match="number of input channels should be non-zero"):
            bn(batch((4, 0)))
        with pytest.raises(ValueError, match=rf"rank {comm.rank}: expected 3 channels, got .* shape \[4, 2\]"):
            bn(batch((4, 2)))
        assert recorder.log == []

    run_threads(rank, 2)


def test_ranks_that_do_not_come_alike_are_told() -> None:
    def rank(comm: Communicator) -> None:
        bn = layer(SyncBatchNorm, process_group=comm)
        with pytest.raises(MismatchError, match=r"rank 0: all_gather .*\n  rank 1: all_reduce"):
            bn(batch((4, 3))) if comm.rank == 0 else comm.all_reduce(torch.ones(3))

    run_threads(rank, 2)


def test_backward_is_not_differentiated_twice() -> None:
    def rank(comm: Communicator) -> None:
        along = batch((4, 3)).requires_grad_()
        output = layer(SyncBatchNorm, process_group=comm)(along)
        (gradient,) = torch.autograd.grad(output.square().sum(), along, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()

    run_threads(rank, 2)


def test_a_replica_in_a_thread_does_not_exchange() -> None:
    def rank(comm: Communicator) -> None:
        replica = layer(SyncBatchNorm, process_group=comm)._replicate_for_data_parallel()
        with pytest.raises(ReplicaError, match=f"rank {comm.rank}: SyncBatchNorm can't exchange from within a replica"):
            replica(batch((4, 3)))

    run_threads(rank, 2)

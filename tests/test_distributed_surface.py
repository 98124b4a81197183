"""DistributedDataParallel: what goes in and out, names, buffers, arguments, and what happens after exceptions."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from models import Recorder, equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.inputs import tensors_in, to_device
from samestep.testing.ranks import run_processes, run_threads

# Inputs and outputs


@dataclasses.dataclass
class Output:
    logits: Tensor
    name: str = "logits"


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda x: x, lambda out: out),
        (lambda x: {"a": [x, "text"], "b": None}, lambda out: out["a"][0]),
        (lambda x: Output(x), lambda out: out.logits),
        (lambda x: Pair(3, (x, 4)), lambda out: out.right[0]),
        (lambda x: object.__new__(Opaque).hold(x), lambda out: out.held),
    ],
)
def test_forward_keeps_what_the_module_returns(make: Any, read: Any) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.returned = linear(), None

        def forward(self, x: Tensor, *, factor: float) -> Any:
            self.returned = make(self.layer(x) * factor)
            return self.returned

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Returning(), comm)
        output = model(samples(2, comm.rank), factor=2.0)
        assert output is model.module.returned
        read(output).sum().backward()
        return grads(model)

    first, second = run_threads(rank, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[arg-type]


class Opaque:
    held: Tensor

    def hold(self, x: Tensor) -> Opaque:
        self.held = x
        return self


def test_tensors_are_found_and_moved_in_nested_values() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    value = OrderedDict(x=[a, Pair(b, 1)], y=Output(c), z={"text"})
    assert [t.numel() for t in tensors_in(value)] == [1, 2, 3]
    moved = to_device(value, torch.device("meta"))
    assert [t.device.type for t in tensors_in(moved)] == ["meta"] * 3
    assert type(moved) is OrderedDict
    assert isinstance(moved["x"][1], Pair)
    assert moved["y"].name == "logits"
    assert moved["z"] == {"text"}
    assert a.device.type == "cpu"


def test_attributes_and_methods_of_the_module_are_there_and_still_averaged() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.temperature = linear(), 3

        def loss(self, x: Tensor) -> Tensor:
            return self.layer(x).sum()

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Custom(), comm)
        assert model.temperature == 3
        assert model.layer is model.module.layer
        with pytest.raises(AttributeError, match="'Custom' object has no attribute 'nothing'"):
            _ = model.nothing
        model.loss(samples(2, comm.rank)).backward()
        return grads(model)

    first, second = run_threads(rank, 2)
    assert torch.equal(first[0], second[0])  # type: ignore[arg-type]


def test_several_forwards_before_a_backward_and_several_backwards_of_one_forward() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(linear(), comm)
        (model(samples(2, comm.rank)).sum() + model(samples(1, comm.rank + 5)).sum()).backward()
        output = model(samples(2, comm.rank))
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        local = linear()
        for other in range(comm.size):
            x = samples(2, other)
            total = local(x).sum() * 2 + local(samples(1, other + 5)).sum() + local(x).square().sum()
            (total / comm.size).backward()
        assert all(torch.allclose(a, b) for a, b in zip(grads(model), grads(local), strict=True))  # type: ignore[arg-type]
        return grads(model)

    first, second = run_threads(rank, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[arg-type]


def test_autograd_grad_exchanges_nothing_and_disturbs_nothing() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        recorder.log.clear()
        x = samples(2).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        assert recorder.log == []
        model(x).sum().backward()
        assert any(line.startswith("all_reduce") for line in recorder.log)

    run_threads(rank, 1)


# Names


def test_checkpoints_load_with_and_without_the_wrappers_name() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.other = linear(1), linear(2)

    def rank(comm: Communicator) -> None:
        for make in (lambda: linear(3), Inner):
            source = make()
            bare = source.state_dict()
            wrapped = {f"module.{name}": value for name, value in bare.items()}
            for form in (bare, wrapped):
                model = wrap(make(), comm)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                before = list(form)
                assert model.load_state_dict(form).missing_keys == []
                assert list(form) == before, "the caller's dict is left alone"
                assert list(model.state_dict()) == list(wrapped), "torch's names"
                assert all(torch.equal(v, wrapped[k]) for k, v in model.state_dict().items())

    run_threads(rank, 1)


def test_a_wrapped_part_of_a_larger_module_loads_both_forms_too() -> None:
    def rank(comm: Communicator) -> None:
        whole = nn.ModuleDict({"body": wrap(linear(1), comm), "head": linear(2)})
        for names in (["body.weight", "body.bias"], ["body.module.weight", "body.module.bias"]):
            state = dict(zip([*names, "head.weight", "head.bias"], linear(7).state_dict().values(), strict=False))
            state |= {f"head.{k}": v for k, v in linear(8).state_dict().items()}
            whole.load_state_dict(state)
            assert torch.equal(whole["body"].module.weight, linear(7).weight)

    run_threads(rank, 1)


def test_a_foreign_checkpoint_is_torchs_own_error() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"module.weight\""):
            wrap(linear(), comm).load_state_dict({"bias": torch.zeros(2), "strange": torch.zeros(1)})

    run_threads(rank, 1)


# Buffers


@pytest.mark.parametrize("options", [{}, {"forward_sync_buffers": True}, {"forward_sync_buffers": False}])
def test_buffers_follow_rank_0_after_every_step(options: dict[str, bool]) -> None:
    def rank(comm: Communicator) -> tuple[Tensor, list[str]]:
        recorder = Recorder(comm)
        model = wrap(nn.Sequential(linear(), nn.BatchNorm1d(2, dtype=torch.float64)), recorder, **options)
        for step in range(2):
            with model.no_sync():
                model(samples(3, comm.rank + 10 * step)).sum().backward()
            model(samples(3, comm.rank)).sum().backward()
        recorder.log.clear()
        model.eval()
        with torch.no_grad():
            for _ in range(comm.rank):  # a different number on each rank
                model(samples(2))
        return model.module[1].running_mean.clone(), recorder.log

    (first, log), (second, other_log) = run_threads(rank, 2)
    assert torch.equal(first, second) == options.get("forward_sync_buffers", True)
    assert log == other_log == [], "evaluation exchanges nothing"


def test_a_buffer_that_the_module_replaces_is_sent_too() -> None:
    class Counting(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.layer, self.rank = linear(), rank
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + self.rank + 1
            return self.layer(x)

    def rank(comm: Communicator) -> float:
        model = wrap(Counting(comm.rank), comm)
        for _ in range(3):
            model(samples(2)).sum().backward()
        return model.count.item()

    assert run_threads(rank, 2) == [3.0, 3.0]


# Copies


def test_a_deep_copy_trains_apart_over_the_same_group() -> None:
    def rank(comm: Communicator) -> tuple[list[Tensor | None], list[Tensor | None]]:
        model = wrap(mlp(), comm)
        model(samples(2, comm.rank)).sum().backward()
        other = copy.deepcopy(model)
        model.zero_grad()
        other(samples(3, comm.rank)).square().sum().backward()
        assert all(g is None for g in grads(model))
        model(samples(3, comm.rank)).square().sum().backward()
        other.load_state_dict(model.state_dict())
        return grads(model), grads(other)

    (first, copied), (second, copied_too) = run_threads(rank, 2)
    assert equal(first, second)
    assert equal(copied, copied_too)


def test_a_pickled_wrapper_comes_back_over_the_default_group() -> None:
    assert run_processes(pickled, 2) == [True, True]


def pickled(comm: Communicator) -> bool:
    model = DistributedDataParallel(mlp())
    other = pickle.loads(pickle.dumps(model))
    other(samples(2, comm.rank)).sum().backward()
    model(samples(2, comm.rank)).sum().backward()
    return equal(grads(model), grads(other))


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_ids": [0]}, ValueError, r"only work with .* got device_ids \[0\], output_device None"),
        ({"output_device": 0}, ValueError, "only work with"),
        ({"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element"),
        ({"bucket_cap_mb": -1}, ValueError, r"at least 0 MiB, at least one, got \[-1\]"),
        ({"bucket_cap_mb_list": []}, ValueError, "at least one, got"),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, ValueError, "give one of them"),
        ({"mixed_precision": "half"}, TypeError, "expected a MixedPrecision as mixed_precision, got 'half'"),
        ({"delay_all_reduce_named_params": []}, ValueError, "need to be set at the same time"),
        ({"param_to_hook_all_reduce": 1}, ValueError, "need to be set at the same time"),
        ({"device_mesh": 1}, RuntimeError, "Cannot specify both process_group and device_mesh"),
        ({"process_group": 3}, TypeError, "expected a torch.distributed process group or a Communicator, got int"),
        (
            {"process_group": None},
            RuntimeError,
            r"call samestep.connect\(\) or torch.distributed.init_process_group\(\)",
        ),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(error, match=message):
            DistributedDataParallel(linear(), **{"process_group": comm, **options})

    run_threads(rank, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True, "static_graph": True, "gradient_as_bucket_view": True},
        {"device_ids": [], "dim": 0, "batched_grad_copy": True, "skip_all_reduce_unused_params": True},
        {"bucket_cap_mb_list": [0.00001, 1]},
        {"bucket_cap_mb": 1},
    ],
)
def test_arguments_that_torchs_class_takes_are_accepted(options: dict[str, Any]) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm, **options)
        for _ in range(2):
            model(samples(2)).sum().backward()
        assert all(g is not None for g in grads(model))

    run_threads(rank, 2)


def test_the_signature_takes_torchs_arguments_in_torchs_order() -> None:
    theirs, ours = (
        list(inspect.signature(c).parameters) for c in (nn.parallel.DistributedDataParallel, DistributedDataParallel)
    )
    assert ours[: len(theirs)] == theirs


def test_check_reduction_is_warned_about() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.warns(FutureWarning, match="check_reduction does nothing"):
            wrap(linear(), comm, check_reduction=True)

    run_threads(rank, 1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear, "expected a torch.nn.Module to wrap, got type"),
        (nn.Flatten(), "is not needed when a module doesn't have any parameter that requires a gradient"),
        (nn.Linear(2, 2).requires_grad_(False), "doesn't have any parameter that requires a gradient"),
        (nn.LazyLinear(2), "Modules with uninitialized parameters can't be used with `DistributedDataParallel`"),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]), "on the same type of devices"),
    ],
)
def test_modules_that_cannot_be_trained_are_torchs_own_errors(module: nn.Module, message: str) -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
            wrap(module, comm)

    run_threads(rank, 1)


def test_worlds_do_not_meet() -> None:
    """Two groups in one process, each with its own model, at the same time."""
    results: dict[int, list[list[Tensor | None]]] = {}

    def world(seed: int) -> None:
        def rank(comm: Communicator) -> list[Tensor | None]:
            model = wrap(linear(seed), comm)
            for step in range(20):
                model.zero_grad()
                model(samples(2, comm.rank + step * seed)).sum().backward()
            return grads(model)

        results[seed] = run_threads(rank, 2)

    threads = [threading.Thread(target=world, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        first, second = results[seed]
        assert torch.equal(first[0], second[0])  # type: ignore[arg-type]
    assert not torch.equal(results[1][0][0], results[2][0][0])  # type: ignore[arg-type]

"""skip_step(): one rank's bad step is every rank's, skipped by all and said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Recorder, equal, grads, linear, mlp, samples, wrap
from test_distributed_failures import Fragile
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.reducer import Reducer
from samestep.testing.ranks import run_processes, run_threads

SAID = r"all ranks skip a step, as rank\(s\) {} called skip_step\(\)"


def state(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def same(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("cap", [None, 0.0])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("skipping", [{0}, {1}, {1, 2}, {0, 1, 2}])
def test_all_ranks_skip_the_step_and_take_the_next(skipping: set[int], learned: bool, cap: float | None) -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        model = wrap(mlp(), comm, bucket_cap_mb=cap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        if learned:
            step(model, optimizer, comm.rank)
        before = state(model)
        loss = model(samples(2, comm.rank)).square().mean()
        if comm.rank in skipping:
            model.skip_step()
        else:
            loss.backward()
        assert model.step_skipped
        assert grads(model) == [None] * 4
        optimizer.step()
        assert same([before, state(model)]), "neither momentum nor weight decay moves anything"
        step(model, optimizer, comm.rank)
        assert not model.step_skipped
        return state(model)

    with pytest.warns(UserWarning, match=SAID.format(", ".join(map(str, sorted(skipping))))) as said:
        results = run_threads(rank, 3)
    assert len(said) == 1, "said once"
    assert same(results)
    expected = run_threads(lambda comm: reference(comm, learned), 3)
    assert same([results[0], expected[0]]), "as if the skipped step had never been"


def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model.zero_grad()
    model(samples(2, rank)).square().mean().backward()
    optimizer.step()


def reference(comm: Communicator, learned: bool) -> list[Tensor]:
    model = wrap(mlp(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(1 + learned):
        step(model, optimizer, comm.rank)
    return state(model)


@pytest.mark.parametrize("cap", [None, 0.0])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1, 2}])
@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_a_backward_that_failed_half_way_is_the_one_that_is_skipped(
    failing: set[int], learned: bool, cap: float | None
) -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Fragile(), comm, bucket_cap_mb=cap)
        if learned:
            model(samples(2)).sum().backward()
        model.zero_grad()
        try:
            model(samples(2), fail=comm.rank in failing).sum().backward()
        except ArithmeticError:
            model.skip_step()
        assert model.step_skipped
        assert grads(model) == [None] * 6
        for _ in range(2):
            model.zero_grad()
            model(samples(2, comm.rank)).sum().backward()
        assert not model.step_skipped
        return grads(model)

    results = run_threads(rank, 3)
    assert all(equal(result, results[0]) and None not in result for result in results)


def test_a_rank_that_skips_and_one_that_fails_without_a_word() -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(Fragile(), comm)
        loss = model(samples(2), fail=comm.rank == 1).sum()
        if comm.rank == 1:
            with pytest.raises(ArithmeticError):
                loss.backward()
        else:
            with pytest.raises(ReplicaError, match=rf"rank {comm.rank}: rank\(s\) \[1\] left backward"):
                (model.skip_step if comm.rank == 0 else loss.backward)()
        model.zero_grad()
        model(samples(2)).sum().backward()
        return grads(model)

    results = run_threads(rank, 3)
    assert all(equal(result, results[0]) for result in results)


def test_who_catches_the_error_of_another_rank_may_skip_too() -> None:
    """The exchange of that step has been made: there is no second one."""

    def rank(comm: Communicator) -> list[str]:
        recorder = Recorder(comm)
        model = wrap(Fragile(), recorder)
        try:
            model(samples(2), fail=comm.rank == 1).sum().backward()
        except ArithmeticError:
            pass  # goes on without a word
        except ReplicaError:
            assert not model.step_skipped
            model.skip_step()
            assert model.step_skipped
            assert grads(model) == [None] * 6
        model(samples(2)).sum().backward()
        assert not model.step_skipped
        return recorder.log

    first, second = run_threads(rank, 2)
    assert first == second


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
@pytest.mark.parametrize("weighted", [False, True])
def test_a_bad_micro_batch_spoils_the_accumulation_on_all_ranks(weighted: bool) -> None:
    def rank(comm: Communicator) -> list[Tensor | None]:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        weight = 1 + comm.rank if weighted else None
        for bad in (True, False):
            model.zero_grad()
            recorder.log.clear()
            with model.no_sync():
                model.backward(model(samples(2, comm.rank)).sum(), weight=weight)
                if bad and comm.rank == 1:
                    model.skip_step()
                assert recorder.log == [], "it is told with the next exchange"
                model.backward(model(samples(2, comm.rank)).sum(), weight=weight)
            model.backward(model(samples(1, comm.rank)).sum(), weight=weight)
            assert model.step_skipped == bad
            assert (grads(model) == [None] * 2) == bad
        return grads(model)

    first, second = run_threads(rank, 2)
    assert equal(first, second)


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_gradients_from_before_go_too() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        for weight in (None, 2):
            model.backward(model(samples(2)).sum(), weight=weight)
            if comm.rank:
                model.skip_step()
            else:
                model.backward(model(samples(2)).sum(), weight=weight)
            assert grads(model) == [None] * 2
            model.backward(model(samples(2)).sum(), weight=weight)
            local = linear()
            local(samples(2)).sum().backward()
            assert all(torch.allclose(a, b) for a, b in zip(grads(model), grads(local), strict=True))  # type: ignore[arg-type]
            model.zero_grad()

    run_threads(rank, 2)


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_gradients_that_stay_local_and_sparse_ones_go_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 4, sparse=True, dtype=torch.float64), linear()
            self.own = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, rows: Tensor) -> Tensor:
            return self.layer(self.table(rows)) * self.own

    def rank(comm: Communicator) -> None:
        module = Net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
        model = wrap(module, comm)
        for bad in (False, True, False):
            model.zero_grad()
            loss = model(torch.tensor([comm.rank, 3])).sum()
            if bad and comm.rank == 0:
                model.skip_step()
            else:
                loss.backward()
            assert [g is None for g in grads(model)] == [bad] * 4

    run_threads(rank, 2)


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
@pytest.mark.parametrize("skipping", [{0}, {1}, {0, 1}])
def test_buffers_come_from_a_rank_that_did_not_skip(skipping: set[int]) -> None:
    def rank(comm: Communicator) -> Tensor:
        model = wrap(nn.Sequential(linear(), nn.BatchNorm1d(2, dtype=torch.float64)), comm)
        bad = comm.rank in skipping
        loss = model(samples(3, comm.rank) * (torch.nan if bad else 1)).sum()
        if loss.isfinite():
            loss.backward()
        else:
            model.skip_step()
        return model.module[1].running_mean

    results = run_threads(rank, 3)
    assert same([[r] for r in results])
    assert bool(results[0].isfinite().all())


def test_an_unused_gradient_that_was_kept_does_not_come_back() -> None:
    """What a failed exchange had kept of a parameter that no rank used must not be given back by the next one."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = Fragile(), linear()

        def forward(self, x: Tensor, both: bool, fail: bool = False) -> Tensor:
            out: Tensor = self.always(x, fail)
            return out + self.sometimes(x) if both else out

    def rank(comm: Communicator) -> None:
        model = wrap(Two(), comm)
        model(samples(2), True).sum().backward()
        with pytest.raises((ReplicaError, ArithmeticError)):
            model(samples(2), False, fail=comm.rank == 1).sum().backward()
        model.zero_grad()
        model(samples(2), False).sum().backward()
        assert model.sometimes.weight.grad is None

    run_threads(rank, 2)


def test_skip_step_is_not_called_within_backward() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        output = model(samples(2))
        output.register_hook(lambda _: model.skip_step())
        with pytest.raises(ReplicaError, match=r"rank 0: skip_step\(\) was called while backward was running"):
            output.sum().backward()

    run_threads(rank, 1)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the control numbers as on a device: when somebody asks, or in the next backward."""
    monkeypatch.setattr(Reducer, "_defers", property(lambda self: self._expected is not None))


@pytest.mark.usefixtures("late")
@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_on_a_device_a_step_is_skipped_by_those_who_look() -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        model = wrap(linear(), comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(4):
            optimizer.zero_grad()
            loss = model(samples(2, comm.rank)).sum()
            if number == 2 and comm.rank == 1:
                model.skip_step()
                assert grads(model) == [None] * 2
            else:
                loss.backward()
            assert model.step_skipped == (number == 2)
            assert (grads(model) == [None] * 2) == (number == 2)
            optimizer.step()
        return state(model)

    results = run_threads(rank, 2)
    assert same(results)


@pytest.mark.usefixtures("late")
@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_on_a_device_who_does_not_look_is_told_so() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        model(samples(2)).sum().backward()
        if comm.rank == 1:
            model.skip_step()
            return
        model(samples(2)).sum().backward()
        with pytest.raises(ReplicaError, match=r"rank 0: a rank asked to skip the last step, .* read step_skipped"):
            model(samples(2)).sum().backward()

    run_threads(rank, 2)


@pytest.mark.usefixtures("late")
def test_on_a_device_a_failure_is_an_error_for_those_who_look() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(Fragile(), comm)
        for fail in (False, comm.rank == 1):
            loss = model(samples(2), fail).sum()
            if fail:
                with pytest.raises(ArithmeticError):
                    loss.backward()
                model(samples(2))
            else:
                loss.backward()
        if comm.rank == 0:
            with pytest.raises(ReplicaError, match=r"rank\(s\) \[1\] left backward"):
                _ = model.step_skipped

    run_threads(rank, 2)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "foreach": lambda p: torch.optim.NAdam(p, foreach=True),
}


@pytest.mark.filterwarnings("ignore:all ranks skip a step")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_optimizer_moves_anything(make: Callable[..., torch.optim.Optimizer]) -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(mlp(), comm)
        optimizer = make(model.parameters())
        step(model, optimizer, comm.rank)
        before, moments = state(model), repr(optimizer.state_dict())
        model.skip_step()
        optimizer.step()
        assert same([before, state(model)])
        assert repr(optimizer.state_dict()) == moments

    run_threads(rank, 2)


def test_over_shared_memory_with_a_gradient_scaler() -> None:
    first, second = run_processes(scaled, 2)
    assert first == second
    assert first[1] == 1, "rank 0 alone has said it"


def scaled(comm: Communicator) -> list[Any]:
    model = DistributedDataParallel(mlp(dtype=torch.float32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            optimizer.zero_grad()
            loss = model(samples(2, comm.rank + number, dtype=torch.float32)).square().mean()
            if number == 2 and comm.rank == 1:
                model.skip_step()
            else:
                scaler.scale(loss).backward()
            if not model.step_skipped:
                scaler.step(optimizer)
                scaler.update()
    said = comm.all_reduce(torch.tensor(sum("skip_step" in str(w.message) for w in caught)))
    return [[p.tolist() for p in model.parameters()], int(said), scaler.get_scale()]

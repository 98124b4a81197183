"""join(): ranks with different numbers of batches train until the last one has none left."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from models import Recorder, grads, linear, mlp, samples, wrap
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from samestep.comm.base import Communicator
from samestep.errors import MismatchError, ReplicaError
from samestep.parallel import join
from samestep.testing.ranks import run_threads

COUNTS = [(1, 3), (3, 1), (0, 2), (2, 2), (0, 0), (2, 4, 1), (0, 0, 1)]


def state(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def same(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


def batch(rank: int, number: int) -> Tensor:
    return samples(2 + rank, 10 * rank + number)


@pytest.mark.parametrize("cap", [None, 0.0])
@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_all_ranks_end_with_the_model_that_has_seen_every_batch(
    counts: tuple[int, ...], by_initial: bool, cap: float | None
) -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        model = wrap(mlp(), comm, bucket_cap_mb=cap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # the first time, also an order of arrival is learned
            with model.join(divide_by_initial_world_size=by_initial):
                for number in range(counts[comm.rank]):
                    model(batch(comm.rank, number)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert grads(model) == [None] * 4, "no gradient of others' steps is left"
        return state(model.module)

    results = run_threads(rank, len(counts))
    assert same(results)
    expected = by_hand(counts, 2, by_initial)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(results[0], expected, strict=True))


def by_hand(counts: tuple[int, ...], epochs: int, by_initial: bool) -> list[Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for number in range(max(counts)):
            there = [rank for rank, count in enumerate(counts) if number < count]
            for rank in there:
                loss = model(batch(rank, number)).square().mean() / (len(counts) if by_initial else len(there))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@pytest.mark.parametrize("counts", [(1, 3), (3, 2, 0)], ids=str)
def test_weighted_averages_stay_exact(counts: tuple[int, ...]) -> None:
    def rank(comm: Communicator) -> list[list[Tensor | None]]:
        model = wrap(linear(), comm)
        seen = []
        with model.join(divide_by_initial_world_size=comm.rank == 0):
            for number in range(counts[comm.rank]):
                model.zero_grad()
                mine = batch(comm.rank, number)
                model.backward(model(mine).square().mean(), weight=len(mine))
                seen.append(grads(model))
        return seen

    results = run_threads(rank, len(counts))
    for number in range(max(counts)):
        whole = linear()
        there = [batch(r, number) for r, count in enumerate(counts) if number < count]
        whole(torch.cat(there)).square().mean().backward()
        for got in (result[number] for result in results if number < len(result)):
            assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, grads(whole), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("weighted", [False, True])
def test_what_a_rank_has_accumulated_when_its_batches_end_counts(weighted: bool) -> None:
    """Rank 0 ends in the middle of an accumulation that rank 1 completes."""

    def rank(comm: Communicator) -> list[Tensor | None]:
        model = wrap(linear(), comm)
        weight = 3 if weighted else None
        with model.join():
            for number in range(5 if comm.rank == 0 else 6):
                if number % 2 == 0:
                    model.zero_grad()
                    with model.no_sync():
                        model.backward(model(batch(comm.rank, number)).sum(), weight=weight)
                else:
                    model.backward(model(batch(comm.rank, number)).sum(), weight=weight)
        return grads(model)

    _, last = run_threads(rank, 2)
    local = linear()
    total = local(batch(0, 4)).sum() + local(batch(1, 4)).sum() + local(batch(1, 5)).sum()
    (total / (3 if weighted else 2)).backward()
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(last, grads(local), strict=True))  # type: ignore[arg-type]


def test_nothing_is_said_in_evaluation_or_while_accumulating() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        with model.join():
            recorder.log.clear()
            with torch.no_grad():
                for _ in range(comm.rank):
                    model(samples(2))
            model(samples(2))
            x = samples(2).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
            with model.no_sync():
                for _ in range(comm.rank):
                    model(samples(2)).sum().backward()
            assert recorder.log == []
            model(samples(2)).sum().backward()
            assert recorder.log[0].startswith("all_reduce(sum) of float32[1] (gradients of synchronised backward 1;")
        recorder.log.clear()
        model(samples(2)).sum().backward()
        assert not any("float32[1]" in line for line in recorder.log), "the join is over"

    run_threads(rank, 2)


def test_buffers_come_from_ranks_that_still_train() -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        model = wrap(nn.Sequential(linear(), nn.BatchNorm1d(2, dtype=torch.float64)), comm)
        tracked = model.module[1]
        with model.join():
            for number in range(1 + 2 * (comm.rank > 0)):
                model(samples(3, 10 * comm.rank + number)).sum().backward()
            assert int(tracked.num_batches_tracked) == 1 + 2 * (comm.rank > 0)
        return state(tracked)

    results = run_threads(rank, 3)
    assert same(results)
    assert int(results[0][-1]) == 3


def test_buffers_that_are_not_shared_stay_ones_own() -> None:
    def rank(comm: Communicator) -> Tensor:
        module = nn.Sequential(linear())
        module.register_buffer("own", torch.tensor(7))
        model = wrap(module, comm, forward_sync_buffers=False)
        model.own.fill_(comm.rank)
        with model.join():
            for _ in range(comm.rank):
                model(samples(2)).sum().backward()
        return model.own

    assert [int(own) for own in run_threads(rank, 3)] == [0, 1, 2]


@pytest.mark.parametrize("failing", ["skips", "raises"])
@pytest.mark.filterwarnings("ignore:all ranks skip a step")
def test_bad_steps_of_those_who_still_train(failing: str) -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        model = wrap(linear(), comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for number in range(1 if comm.rank == 0 else 4):
                optimizer.zero_grad()
                output = model(batch(comm.rank, number))
                bad = number == 2 and comm.rank == 2
                if bad and failing == "skips":
                    model.skip_step()
                elif bad:
                    output.register_hook(_fail)
                    with pytest.raises(ArithmeticError):
                        output.sum().backward()
                elif number == 2 and failing == "raises":
                    with pytest.raises(ReplicaError, match=r"rank\(s\) \[2\] left"):
                        output.sum().backward()
                else:
                    output.sum().backward()
                if number != 2 or failing == "skips":
                    optimizer.step()
        return state(model)

    assert same(run_threads(rank, 3))


def _fail(_: Tensor) -> None:
    raise ArithmeticError


def test_all_end_with_the_first_if_told_to() -> None:
    def rank(comm: Communicator) -> int:
        model = wrap(linear(), comm)
        done = 0
        said = (
            "Rank 1 exhausted all inputs."
            if comm.rank == 1
            else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        )

        def train() -> None:
            nonlocal done
            with model.join(throw_on_early_termination=True):
                for number in range(2 if comm.rank == 1 else 5):
                    with torch.no_grad():
                        model(samples(1))
                    output = model(samples(2))
                    with model.no_sync() if number % 2 else torch.enable_grad():
                        output.sum().backward()
                    done += 1

        with pytest.raises(RuntimeError, match=f"^{said}$"):
            train()
        model(samples(2)).sum().backward()
        return done

    assert run_threads(rank, 3) == [2, 2, 2]


def test_an_exception_ends_the_context() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        with contextlib.suppress(KeyError), model.join():
            model(samples(2)).sum().backward()
            raise KeyError
        recorder.log.clear()
        model(samples(2)).sum().backward()
        assert all("float32[1]" not in line for line in recorder.log)

    run_threads(rank, 2)


def test_switched_off_it_does_nothing() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(linear(), recorder)
        recorder.log.clear()
        with model.join(enable=False, divide_by_initial_world_size=False):
            assert recorder.log == []
            model(samples(2)).sum().backward()
            assert not model._join_config.enable
        assert all("float32[1]" not in line for line in recorder.log)

    run_threads(rank, 2)


def test_many_more_batches_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_MANY", 3)

    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        with model.join():
            for _ in range(5 * comm.rank):
                model(samples(2)).sum().backward()

    with pytest.warns(UserWarning, match="rank 0 has at least 3 fewer inputs") as said:
        run_threads(rank, 2)
    assert len(said) == 1
    assert said[0].filename == __file__


def test_a_layer_that_exchanges_in_forward_is_an_error_on_all_ranks() -> None:
    class Exchanging(nn.Module):
        def __init__(self, comm: Communicator) -> None:
            super().__init__()
            self.layer, self.comm = linear(), [comm]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.comm[0].all_reduce(torch.ones(2, dtype=x.dtype))

    def rank(comm: Communicator) -> None:
        model = wrap(Exchanging(comm), comm)
        with model.join():
            for _ in range(1 + comm.rank):
                model(samples(2)).sum().backward()

    with pytest.raises(
        MismatchError, match=r"rank 0: all_reduce.* of float32\[1\]\n  rank 1: all_reduce.*float64\[2\]"
    ):
        run_threads(rank, 2)


def test_it_is_a_joinable_of_torchs() -> None:
    def rank(comm: Communicator) -> None:
        model = wrap(linear(), comm)
        assert isinstance(model, Joinable)
        assert model.join_device == torch.device("cpu")
        with pytest.raises(TypeError, match=r"rank 0: torch's Join needs a torch.distributed process group"):
            Join([model])
        other = copy.deepcopy(model)
        assert not other._join_config.enable
        with other.join():
            other(samples(2)).sum().backward()

    run_threads(rank, 1)

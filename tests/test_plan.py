"""Buckets, arrivals and control numbers: the parts of the engine that decide."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import ReplicaError
from samestep.parallel.arrivals import Arrivals, learned
from samestep.parallel.control import Control, Outcome, Verdict
from samestep.parallel.plan import Parameter, complete_order, make_plan


def parameter(
    index: int, numel: int = 10, dtype: str = "torch.float32", device: str = "cpu", sparse: bool = False
) -> Parameter:
    return Parameter(index, f"p{index}", (numel,), dtype, device, 4, sparse)


def members(parameters: list[Parameter], order: list[int], caps: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [bucket.indices for bucket in make_plan(parameters, order, caps).buckets]


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        ((1 << 20,), [(3, 2, 1, 0)]),
        ((40,), [(3,), (2,), (1,), (0,)]),
        ((41,), [(3, 2), (1, 0)]),
        ((40, 1 << 20), [(3,), (2, 1, 0)]),
        ((40, 80), [(3,), (2, 1), (0,)]),
        ((0,), [(3,), (2,), (1,), (0,)]),
    ],
)
def test_buckets_are_closed_by_their_caps(caps: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    assert members([parameter(i) for i in range(4)], [3, 2, 1, 0], caps) == expected


def test_kinds_do_not_mix_and_each_has_its_own_small_first_bucket() -> None:
    parameters = [parameter(i, dtype="torch.float32" if i % 2 else "torch.bfloat16") for i in range(6)]
    assert members(parameters, [5, 4, 3, 2, 1, 0], (40, 1000)) == [(5,), (4,), (3, 1), (2, 0)]
    elsewhere = [parameter(0), parameter(1, device="cuda:0"), parameter(2)]
    assert members(elsewhere, [2, 1, 0], (1000,)) == [(1,), (2, 0)]


def test_buckets_are_in_the_order_in_which_they_can_leave() -> None:
    # 3 and 0 share a bucket that is complete only when 0 arrives, after the other kind's.
    parameters = [parameter(0), parameter(1, dtype="torch.float64"), parameter(2, dtype="torch.float64"), parameter(3)]
    assert members(parameters, [3, 2, 1, 0], (1000,)) == [(2, 1), (3, 0)]


def test_sparse_parameters_travel_alone() -> None:
    plan = make_plan([parameter(0), parameter(1, sparse=True), parameter(2)], [2, 1, 0], (1000,))
    assert [(b.indices, b.sparse) for b in plan.buckets] == [((1,), True), ((2, 0), False)]
    assert "sparse" in str(plan)


@pytest.mark.parametrize(
    ("order", "caps", "message"),
    [
        ([0, 0], (1,), r"each of the 2 parameters' indices once, got the order \[0, 0\]"),
        ([0], (1,), r"got the order \[0\]"),
        ([0, 1], (), "at least one bucket cap"),
        ([0, 1], (-1,), r"none negative, got \[-1\]"),
    ],
)
def test_a_plan_refuses_what_it_cannot_mean(order: list[int], caps: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan([parameter(0), parameter(1)], order, caps)


@given(st.data())
def test_every_parameter_has_its_own_place_in_one_bucket(data: st.DataObject) -> None:
    numels = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=12))
    kinds = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=len(numels), max_size=len(numels)))
    parameters = [parameter(i, n, k) for i, (n, k) in enumerate(zip(numels, kinds, strict=True))]
    order = data.draw(st.permutations(range(len(numels))))
    caps = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    plan = make_plan(parameters, order, caps)
    assert sorted(i for bucket in plan.buckets for i in bucket.indices) == list(range(len(numels)))
    for bucket in plan.buckets:
        end = 0
        for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
            assert offset == end
            assert parameters[index].dtype == bucket.dtype
            end += parameters[index].numel
        assert bucket.numel == end
    assert plan == make_plan(parameters, order, caps), "ranks compare plans"


def test_order_of_arrival_is_completed_from_the_back() -> None:
    assert complete_order([2, 0, 2], 5) == [2, 0, 4, 3, 1]
    assert complete_order([], 3) == [2, 1, 0]


def test_buckets_are_ready_in_plan_order_only() -> None:
    parameters = [parameter(i) for i in range(4)]
    plan = make_plan(parameters, [3, 2, 1, 0], (80,))
    arrivals = Arrivals(plan, [1, 1, 0, 0], [1, 1, 1, 1])
    ready = []
    for index in (0, 1, 3, 2):
        assert arrivals.add(index)
        ready.append(arrivals.ready)
    assert ready == [0, 0, 0, 2]
    assert arrivals.order == [0, 1, 3, 2]


def test_a_parameter_that_arrives_twice_is_waited_for_twice() -> None:
    plan = make_plan([parameter(0), parameter(1)], [1, 0], (40,))
    expected = learned([1, 0, 1], 2)
    assert expected == [1, 2]
    arrivals = Arrivals(plan, [1, 0], expected)
    assert arrivals.add(1)
    assert arrivals.ready == 0
    assert arrivals.add(1)
    assert arrivals.ready == 1
    assert not arrivals.add(1), "its bucket may have left"
    assert learned([], 2) == [1, 1]


def test_nothing_is_ready_before_arrivals_were_learned() -> None:
    plan = make_plan([parameter(0), parameter(1)], [1, 0], (40,))
    arrivals = Arrivals(plan, [1, 0], None)
    assert all(arrivals.add(i) for i in (1, 1, 0))
    assert arrivals.ready == 0


def summed(
    control_of: list[tuple[bytes, float | None, bool]], dtype: torch.dtype = torch.float32
) -> tuple[Control, torch.Tensor]:
    size = len(control_of)
    total = torch.zeros(Control(3, 0, size).length, dtype=dtype)
    for rank, (used, weight, failed) in enumerate(control_of):
        mine = torch.full_like(total, 7)  # what was there before
        Control(3, rank, size).write(mine, bytearray(used), weight, failed=failed)
        total += mine
    return Control(3, 0, size), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_control_numbers_add_up(dtype: torch.dtype) -> None:
    control, total = summed([(b"\1\0\0", 3.0, False), (b"\1\1\0", 0.5, False)], dtype)
    assert control.judge(total) == Verdict(weighted=True)
    assert control.unused(total) == {2}
    assert control.total_weight(total).item() == 3.5
    assert control.total_weight(total).dim() == 0


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [(b"\1\1\1", None, False), (b"\0\0\0", None, True), (b"\0\0\0", None, True)],
            r"rank\(s\) \[1, 2\] left backward",
        ),
        ([(b"\1\1\1", 2.0, False), (b"\1\1\1", None, False)], "1 of 2 ranks gave a weight"),
        ([(b"\1\1\1", 0.0, False), (b"\1\1\1", 0.0, False)], "weights add up to 0"),
    ],
)
def test_control_numbers_stop_a_step_that_must_not_be_taken(
    ranks: list[tuple[bytes, float | None, bool]], message: str
) -> None:
    control, total = summed(ranks)
    error = control.judge(total).error
    assert isinstance(error, ReplicaError)
    assert re.search(message, str(error))


def test_a_skipped_step_takes_buffers_from_the_first_rank_that_is_done() -> None:
    numbers = torch.zeros(Control(3, 0, 4).length)
    for rank, outcome in enumerate((Outcome.JOINED, Outcome.SKIPPED, Outcome.DONE, Outcome.SKIPPED)):
        mine = torch.empty_like(numbers)
        Control(3, rank, 4).write(mine, bytearray(3), None, failed=False, outcome=outcome)
        numbers += mine
    assert Control(3, 0, 4).judge(numbers) == Verdict(skipping=(1, 3), source=2)
    assert Control(3, 0, 4).num_training(numbers).item() == 3

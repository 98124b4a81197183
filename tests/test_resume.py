"""Resuming in mid-epoch: on any number of ranks nothing is lost, and a state that does not fit is refused."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import Numbers, epoch_of, in_turn, lengths, sizes, start, torch_order, world

from samestep.data.sampler import DistributedSampler
from samestep.data.sharding import Remainder

MODES: list[Remainder] = ["pad", "drop", "keep"]
modes = st.sampled_from(MODES)


@settings(deadline=None)
@given(lengths, sizes, sizes, modes, st.booleans(), st.data())
def test_resuming_on_other_ranks_loses_nothing(
    length: int, before: int, after: int, mode: Remainder, shuffle: bool, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "remainder": mode, "seed": 5}
    old, new = world(length, before, **options), world(length, after, **options)
    list(map(list, old))
    turns = data.draw(st.integers(0, len(old[0])))
    held = [iter(sampler) for sampler in old]
    shares = [list(itertools.islice(iterator, turns)) for iterator in held]
    state = old[0].state_dict()
    for sampler in new:
        sampler.load_state_dict(state)
    counts = [len(sampler) for sampler in new]
    rest = [list(sampler) for sampler in new]
    assert counts == list(map(len, rest))
    order = torch_order(length, 1, seed=5) if shuffle else list(range(length))
    if state["epoch"] == 2:
        assert state["position"] == 0
        assert turns == len(old[0])
        rest = [[] for _ in new]
    else:
        assert epoch_of(new) == epoch_of(world_at(2, length, after, options))
    check_rest(in_turn(shares), in_turn(rest), order, mode, after if state["epoch"] == 1 else before)
    if before == after:
        assert in_turn(rest) == in_turn([list(iterator) for iterator in held])


def world_at(epoch: int, length: int, size: int, options: dict[str, Any]) -> list[DistributedSampler]:
    samplers = world(length, size, **options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def check_rest(first: list[int], rest: list[int], order: list[int], mode: Remainder, size: int) -> None:
    seen = first + rest
    if mode == "keep":
        assert seen == order
    elif mode == "pad":
        assert set(seen) == set(order)
        assert seen[: len(order)] == order
        assert not order or len(seen) - len(order) < size
    else:
        assert seen == order[: len(seen)]
        assert len(order) - len(seen) < size


@settings(deadline=None)
@given(lengths, st.lists(st.tuples(sizes, st.integers(0, 6)), min_size=1, max_size=5), st.booleans())
def test_resuming_again_and_again_covers_each_sample_once(
    length: int, stages: list[tuple[int, int]], shuffle: bool
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "remainder": "keep"}
    state = world(length, 1, **options)[0].state_dict()
    seen: list[int] = []
    for size, turns in stages:
        samplers = world(length, size, **options)
        for sampler in samplers:
            sampler.load_state_dict(state)
        turns = min(turns, max(len(samplers[0]) - 1, 0))
        iterators = [iter(sampler) for sampler in samplers]
        seen += in_turn([list(itertools.islice(iterator, turns)) for iterator in iterators])
        state = samplers[0].state_dict(turns)
        if not length:
            break
        assert (state["epoch"], state["position"]) == (0, len(seen))
    last = DistributedSampler(Numbers(length), 1, 0, **options)
    last.load_state_dict(state)
    assert seen + (list(last) if length else []) == (torch_order(length, 0) if shuffle else list(range(length)))


@settings(deadline=None)
@given(lengths, sizes, st.sampled_from(["pad", "drop"]), st.data())
def test_ranks_in_step_return_equal_states(length: int, size: int, mode: Remainder, data: st.DataObject) -> None:
    samplers = world(length, size, remainder=mode)
    turns = data.draw(st.integers(0, len(samplers[0])))
    held = [start(sampler, turns) for sampler in samplers]
    assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)
    assert len(held) == size


def test_keep_counts_alike_on_ranks_with_shorter_shares() -> None:
    samplers = world(5, 3, remainder="keep")
    held = [start(sampler, 1) for sampler in samplers]
    assert [sampler.state_dict()["position"] for sampler in samplers] == [3, 3, 3]
    assert [len(list(iterator)) for iterator in held] == [1, 1, 0]
    finished = {**samplers[0].state_dict(0), "epoch": 1, "position": 0}
    assert [sampler.state_dict() for sampler in samplers] == [finished] * 3
    assert [sampler.state_dict(2) for sampler in samplers] == [finished] * 3
    assert [sampler.state_dict(1)["position"] for sampler in samplers] == [3, 3, 3]


def test_a_state_is_plain_and_says_where_it_stands() -> None:
    sampler = DistributedSampler(Numbers(10), 2, 0, seed=4)
    state = {"epoch": 0, "position": 0, "seed": 4, "length": 10, "shuffle": True, "remainder": "pad"}
    assert sampler.state_dict() == state
    held = start(sampler, 3)
    assert sampler.state_dict() == {**state, "position": 6}
    assert sampler.state_dict(1) == {**state, "position": 2}
    assert len(list(held)) == 2
    assert sampler.state_dict() == {**state, "epoch": 1}
    assert sampler.state_dict(position=4) == {**state, "position": 8}
    sampler.set_epoch(6)
    assert sampler.state_dict() == {**state, "epoch": 6}


@pytest.mark.parametrize(
    ("turns", "position", "kind", "message"),
    [
        (3, 4, ValueError, "position is 4 on rank 0, expected 0 to 3, .* since this epoch began"),
        (3, -1, ValueError, "position is -1 on rank 0, expected 0 to 3"),
        (None, 1, ValueError, "position is 1 on rank 0, expected 0 to 0, .* no epoch has begun"),
        (3, 1.0, TypeError, "'float' object cannot be interpreted as an integer"),
    ],
)
def test_a_position_that_was_not_reached_is_refused(
    turns: int | None, position: Any, kind: type[Exception], message: str
) -> None:
    sampler = DistributedSampler(Numbers(10), 2, 0)
    held = start(sampler, turns) if turns else None
    with pytest.raises(kind, match=message):
        sampler.state_dict(position)
    assert held is None or len(list(held)) == 2


def test_set_epoch_keeps_the_position_of_the_epoch_it_resumes() -> None:
    state = {**DistributedSampler(Numbers(10), 1, 0).state_dict(), "epoch": 3, "position": 6}
    sampler = DistributedSampler(Numbers(10), 1, 0)
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state
    for epoch, skipped in ((3, 6), (4, 0), (3, 0)):
        sampler.set_epoch(epoch)
        assert len(sampler) == 10 - skipped
        assert list(sampler) == torch_order(10, epoch)[skipped:]
    sampler.load_state_dict(state)
    sampler.set_epoch(5)
    assert list(sampler) == torch_order(10, 5)


def test_the_length_is_the_resumed_epochs_until_that_is_over() -> None:
    sampler = DistributedSampler(Numbers(10), 2, 0)
    sampler.load_state_dict({**sampler.state_dict(), "position": 6})
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (2, 5, 10)
    iterator = iter(sampler)
    next(iterator)
    assert len(sampler) == 2
    assert len(list(iterator)) == 1
    assert len(sampler) == 5
    sampler.load_state_dict({**sampler.state_dict(), "position": 6})
    assert next(iter(sampler)) < 10
    assert len(sampler) == 5


GOOD = {"epoch": 2, "position": 4, "seed": 0, "length": 10, "shuffle": True, "remainder": "pad"}


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        ({**GOOD, "length": 11}, ValueError, "the state's 'length' is 11 and this sampler's is 10 on rank 1"),
        ({**GOOD, "seed": 3}, ValueError, "the state's 'seed' is 3 and this sampler's is 0 on rank 1"),
        ({**GOOD, "shuffle": False}, ValueError, "the state's 'shuffle' is False and this sampler's is True on rank 1"),
        ({**GOOD, "remainder": "keep"}, ValueError, "'remainder' is 'keep' and this sampler's is 'pad' on rank 1"),
        ({**GOOD, "position": 10}, ValueError, "the state's 'position' is 10 on rank 1, expected 0 to 9"),
        ({**GOOD, "position": -1}, ValueError, "the state's 'position' is -1 on rank 1, expected 0 to 9"),
        ({**GOOD, "position": 4.0}, ValueError, r"the state's 'position' is 4\.0 on rank 1, expected int"),
        ({**GOOD, "epoch": True}, ValueError, "the state's 'epoch' is True on rank 1, expected int"),
        ({**GOOD, "epoch": 2**64}, ValueError, r"seed 0 \+ epoch 18446744073709551616 is .*, expected -2\*\*63"),
        ({**GOOD, "shuffle": 1}, ValueError, "the state's 'shuffle' is 1 on rank 1, expected bool"),
        ({**GOOD, "length": -1}, ValueError, "the state's 'length' is -1 on rank 1, expected at least 0"),
        ({**GOOD, "remainder": "wrap"}, ValueError, "the state's 'remainder' is 'wrap' on rank 1, expected one of"),
        ({**GOOD, "remainder": None}, ValueError, "the state's 'remainder' is None on rank 1, expected str"),
        ({**GOOD, "yielded": 4}, ValueError, "the state has an unknown key 'yielded' on rank 1"),
        ({"epoch": 2}, ValueError, r"the state has no 'position' on rank 1; .* got \['epoch'\]"),
        ({}, ValueError, "the state has no 'epoch' on rank 1"),
        ([GOOD], TypeError, "on rank 1, expected a dict"),
        (None, TypeError, "the state is None on rank 1, expected a dict"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    state: Any, kind: type[Exception], message: str
) -> None:
    sampler = DistributedSampler(Numbers(10), 2, 1)
    sampler.load_state_dict(GOOD)
    with pytest.raises(kind, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == GOOD

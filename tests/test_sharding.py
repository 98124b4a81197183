"""The arithmetic of dealing samples to ranks, against plain lists, over every small case that hypothesis finds."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.sharding import Deal, Remainder

MODES: list[Remainder] = ["pad", "drop", "keep"]
lengths = st.integers(0, 40)
ranks = st.integers(1, 9)
modes = st.sampled_from(MODES)


def dealt(length: int, size: int, mode: Remainder, start: int = 0) -> list[list[int]]:
    """Return every rank's places in the order, each taken by `index`."""
    deals = [Deal(length, size, rank, mode, start) for rank in range(size)]
    return [[deal.index(turn) for turn in range(deal.count)] for deal in deals]


def in_turn(shares: list[list[int]]) -> list[int]:
    """Return what ranks that take turns get, one after the other."""
    rounds = itertools.zip_longest(*shares)
    return [place for one in rounds for place in one if place is not None]


def by_hand(length: int, size: int, mode: Remainder, start: int) -> list[int]:
    """Return the same with lists alone: leave out, or go round again, one sample at a time."""
    places = list(range(start, length))
    while mode == "drop" and len(places) % size:
        places.pop()
    while mode == "pad" and len(places) % size:
        places.append((start + len(places)) % length)
    return places


@settings(deadline=None)
@given(lengths, ranks, modes, st.data())
def test_ranks_take_turns_along_the_order(length: int, size: int, mode: Remainder, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    assert in_turn(dealt(length, size, mode, start)) == by_hand(length, size, mode, start)


@settings(deadline=None)
@given(lengths, ranks, modes, st.data())
def test_counts_add_up_and_lower_ranks_have_the_longer_shares(
    length: int, size: int, mode: Remainder, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, length))
    deals = [Deal(length, size, rank, mode, start) for rank in range(size)]
    counts = [deal.count for deal in deals]
    assert sum(counts) == deals[0].total
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= (1 if mode == "keep" else 0)


@settings(deadline=None)
@given(lengths, ranks, modes, st.data())
def test_slices_are_the_indices(length: int, size: int, mode: Remainder, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    order = range(length)
    for rank, places in enumerate(dealt(length, size, mode, start)):
        parts = Deal(length, size, rank, mode, start).slices()
        assert [place for part in parts for place in order[part]] == places


@settings(deadline=None)
@given(lengths, ranks, ranks, modes, st.data())
def test_the_rest_after_some_turns_goes_to_any_number_of_ranks(
    length: int, before: int, after: int, mode: Remainder, data: st.DataObject
) -> None:
    shares = dealt(length, before, mode)
    turns = data.draw(st.integers(0, len(shares[0])))
    start = min(Deal(length, before, 0, mode).consumed(turns), length)
    first, second = in_turn([share[:turns] for share in shares]), in_turn(dealt(length, after, mode, start))
    seen = first + second
    if mode == "keep":
        assert seen == list(range(length))
    elif mode == "pad":
        assert set(seen) == set(range(length))
        assert start == length or len(seen) - length < after
    elif start < length:
        assert seen == list(range(len(seen)))
        assert length - len(seen) < after
    if before == after:
        assert seen == in_turn(shares)


@pytest.mark.parametrize(
    ("length", "size", "mode", "start", "shares"),
    [
        (0, 2, "pad", 0, [[], []]),
        (0, 2, "keep", 0, [[], []]),
        (1, 3, "pad", 0, [[0], [0], [0]]),
        (1, 3, "drop", 0, [[], [], []]),
        (1, 3, "keep", 0, [[0], [], []]),
        (5, 2, "pad", 0, [[0, 2, 4], [1, 3, 0]]),
        (5, 2, "drop", 0, [[0, 2], [1, 3]]),
        (5, 2, "keep", 0, [[0, 2, 4], [1, 3]]),
        (2, 5, "pad", 0, [[0], [1], [0], [1], [0]]),
        (10, 4, "pad", 7, [[7], [8], [9], [0]]),
        (10, 4, "drop", 7, [[], [], [], []]),
        (10, 4, "keep", 7, [[7], [8], [9], []]),
        (3, 2, "pad", 3, [[], []]),
    ],
)
def test_known_deals(length: int, size: int, mode: Remainder, start: int, shares: list[list[int]]) -> None:
    assert dealt(length, size, mode, start) == shares


def test_consumed_stops_at_the_end_of_the_deal() -> None:
    assert [Deal(5, 2, 1, "keep").consumed(turns) for turns in range(5)] == [0, 2, 4, 5, 5]
    assert [Deal(5, 2, 1, "pad").consumed(turns) for turns in range(5)] == [0, 2, 4, 6, 6]
    assert [Deal(5, 2, 1, "drop", 1).consumed(turns) for turns in range(4)] == [1, 3, 5, 5]


def test_a_billion_billion_samples_are_arithmetic() -> None:
    deal = Deal(10**18 + 1, 8, 7, "pad", 16)
    assert deal.count == (10**18 + 1 - 16 + 7) // 8
    assert deal.index(deal.count - 1) == 6
    assert deal.total == 8 * deal.count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 0), "length is -1 on rank 0, expected at least 0"),
        ((5, 0, 0), "Invalid num_replicas 0 on rank 0, expected at least 1"),
        ((5, 2, 2), r"Invalid rank 2, rank should be in the interval \[0, 1\]"),
        ((5, 2, -1), r"Invalid rank -1, rank should be in the interval \[0, 1\]"),
        ((5, 2, 1, "wrap"), "remainder is 'wrap' on rank 1, expected one of .*'pad', 'drop', 'keep'"),
        ((5, 2, 1, "pad", 6), "start is 6 on rank 1, expected 0 to 5"),
        ((5, 2, 1, "pad", -1), "start is -1 on rank 1, expected 0 to 5"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deal(*arguments)


@pytest.mark.parametrize("turn", [-1, 3])
def test_a_turn_outside_the_share_is_an_index_error(turn: int) -> None:
    with pytest.raises(IndexError, match=f"sample {turn} of 3 on rank 0"):
        Deal(5, 2, 0).index(turn)


def test_deals_are_values() -> None:
    deal = Deal(5, 2, 0)
    assert deal == Deal(5, 2, 0, "pad", 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        deal.rank = 1  # type: ignore[misc]

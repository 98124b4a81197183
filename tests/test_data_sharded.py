"""Any sampler and any stream, dealt out: all ranks together take what one would, in its order."""

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import Numbers, in_turn, lengths, sizes, torch_order
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import samestep
from samestep.data.sharded import ShardedSampler
from samestep.data.sharding import Deal, Remainder
from samestep.data.stream import Slot

MODES: list[Remainder] = ["pad", "drop", "keep"]
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


# The arithmetic


@settings(deadline=None)
@given(lengths, sizes, st.sampled_from(MODES), st.data())
def test_a_stream_is_dealt_as_an_order_of_known_length(
    length: int, ranks: int, mode: Remainder, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, length))
    for rank in range(ranks):
        deal = Deal(length, ranks, rank, mode, start)
        slot = Slot(ranks, rank, mode)
        assert list(slot.share(iter(range(length)), start)) == [deal.index(turn) for turn in range(deal.count)]
        assert slot.count(length, start) == deal.count


@settings(deadline=None)
@given(lengths, sizes, st.integers(1, 5), st.integers(1, 4), st.sampled_from(MODES))
def test_loading_workers_share_evenly(length: int, ranks: int, workers: int, batch: int, mode: Remainder) -> None:
    shares = [
        [list(Slot(ranks, rank, mode, workers, worker).share(range(length))) for worker in range(workers)]
        for rank in range(ranks)
    ]
    seen = [item for rank in shares for worker in rank for item in worker]
    batches = [sum(-(-len(worker) // batch) for worker in rank) for rank in shares]
    if mode == "keep":
        assert sorted(seen) == list(range(length))
    else:
        assert len(set(batches)) == 1
        assert abs(len(seen) - length) < ranks
        assert set(seen) == set(range(length)) if mode == "pad" else len(set(seen)) == len(seen)


# Samplers


class Shuffled(Sampler[int]):
    """Draws with whichever of the three libraries; has no length."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(23))
        match self.library:
            case "python":
                random.shuffle(numbers)
            case "numpy":
                numbers = numpy.random.permutation(numbers).tolist()
            case _:
                numbers = torch.randperm(23).tolist()
        return iter(numbers)


WEIGHTS = [float(n % 5) for n in range(30)]


def own() -> torch.Generator:
    """A sampler's own generator, seeded otherwise on every rank."""
    return torch.Generator().manual_seed(random.getrandbits(9))


SAMPLERS: dict[str, Any] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 40),
    "random": lambda: RandomSampler(Numbers(30)),
    "replacement": lambda: RandomSampler(Numbers(30), replacement=True, num_samples=31),
    "subset": lambda: SubsetRandomSampler(range(5, 22)),
    "own generator": lambda: WeightedRandomSampler(WEIGHTS, 40, generator=own()),
    "batches": lambda: BatchSampler(WeightedRandomSampler(WEIGHTS, 41), 4, drop_last=False),
    "batches of own generator": lambda: BatchSampler(RandomSampler(Numbers(30), generator=own()), 4, drop_last=True),
    "python": lambda: Shuffled("python"),
    "numpy": lambda: Shuffled("numpy"),
    "torch": lambda: Shuffled("torch"),
}


def apart(rank: int) -> None:
    """As where a script seeds each rank by its number."""
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_draw_one_order_and_share_it(name: str) -> None:
    """pytorch#23430, #77154."""
    whole = ShardedSampler(SAMPLERS[name](), 1, 0)
    orders = [list(whole) for _ in range(3)]
    assert len({repr(order) for order in orders}) == 3, "every epoch has another order, by itself"
    shares: list[list[list[Any]]] = []
    for rank in range(3):
        apart(rank)
        sampler = ShardedSampler(SAMPLERS[name](), 3, rank, remainder="keep")
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        shares.append([list(sampler) for _ in range(3)])
        after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        assert torch.equal(states[0], after[0])
        assert states[1:] == after[1:], "the program's own random numbers are as if nothing had been drawn"
    for epoch, order in enumerate(orders):
        assert in_turn([share[epoch] for share in shares]) == order
    sampler = ShardedSampler(SAMPLERS[name](), 3, 0, remainder="keep")
    for epoch in (1, 1, 2):
        sampler.set_epoch(epoch)
        assert list(sampler) == orders[epoch][::3]


@pytest.mark.parametrize("mode", MODES)
def test_the_end_is_as_the_rule_says_and_lengths_are_known(mode: Remainder) -> None:
    samplers = [ShardedSampler(RandomSampler(Numbers(11)), 4, rank, remainder=mode) for rank in range(4)]
    counts = [len(sampler) for sampler in samplers]
    assert counts == [len(list(sampler)) for sampler in samplers] == [sampler.num_samples for sampler in samplers]
    assert counts == {"pad": [3, 3, 3, 3], "drop": [2, 2, 2, 2], "keep": [3, 3, 3, 2]}[mode]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(1000, ()))


def test_an_endless_sampler_is_shared_too() -> None:
    whole = list(itertools.islice(ShardedSampler(Endless(), 1, 0), 6000))
    shares = [list(itertools.islice(ShardedSampler(Endless(), 2, rank), 3000)) for rank in range(2)]
    assert in_turn(shares) == whole
    with pytest.raises(TypeError, match="has no len"):
        len(ShardedSampler(Endless(), 2, 0))


def test_batches_reach_the_loader_whole() -> None:
    batches = list(ShardedSampler(BatchSampler(range(10), 3, drop_last=False), 1, 0))  # type: ignore[arg-type]
    got: list[list[list[int]]] = []
    for rank in range(2):
        sampler = ShardedSampler(BatchSampler(range(10), 3, drop_last=False), 2, rank)  # type: ignore[arg-type]
        assert sampler.batch_size == 3
        loader: DataLoader[int] = DataLoader(Numbers(10), batch_sampler=sampler)
        assert len(loader) == 2
        got.append([batch.tolist() for batch in loader])
    assert in_turn(got) == batches


@settings(deadline=None, max_examples=30)
@given(sizes, sizes, st.integers(0, 10), st.sampled_from(MODES))
def test_resuming_on_other_ranks_loses_nothing(before: int, after: int, turns: int, mode: Remainder) -> None:
    whole = list(ShardedSampler(WeightedRandomSampler(WEIGHTS, 40), 1, 0))
    old = [ShardedSampler(WeightedRandomSampler(WEIGHTS, 40), before, rank, remainder=mode) for rank in range(before)]
    turns = min(turns, 40 // before - 1)
    held = [iter(sampler) for sampler in old]
    first = in_turn([list(itertools.islice(iterator, turns)) for iterator in held])
    states = [sampler.state_dict() if turns else sampler.state_dict(0) for sampler in old]
    assert all(state == states[0] for state in states)
    new = [ShardedSampler(WeightedRandomSampler(WEIGHTS, 40), after, rank, remainder=mode) for rank in range(after)]
    for sampler in new:
        sampler.load_state_dict(pickle.loads(pickle.dumps(states[0])))
    counts = [len(sampler) for sampler in new]
    rest = [list(sampler) for sampler in new]
    assert counts == list(map(len, rest))
    seen = first + in_turn(rest)
    least = min(len(seen), 40)
    assert seen[:least] == whole[:least]
    assert abs(len(seen) - 40) < after
    assert {sampler.state_dict()["epoch"] for sampler in new} == {1}
    assert list(new[0]) == list(new_epoch(after, mode))


def new_epoch(size: int, mode: Remainder) -> ShardedSampler:
    sampler = ShardedSampler(WeightedRandomSampler(WEIGHTS, 40), size, 0, remainder=mode)
    sampler.set_epoch(1)
    return sampler


STATE = {"epoch": 1, "position": 2, "seed": 0, "remainder": "pad"}


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (None, TypeError, "the state is None on rank 0"),
        ({"epoch": 1}, ValueError, r"the state has \['epoch'\] on rank 0, expected"),
        ({**STATE, "seed": 4}, ValueError, "the state's 'seed' is 4 and this sampler's is 0 on rank 0"),
        ({**STATE, "remainder": "keep"}, ValueError, "the state's 'remainder' is 'keep'"),
        ({**STATE, "position": -1}, ValueError, "'position' is -1 on rank 0"),
        ({**STATE, "epoch": 1.5}, TypeError, "integer"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: Any, kind: type[Exception], message: str) -> None:
    sampler = ShardedSampler(range(9), 2, 0)
    with pytest.raises(kind, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == {**STATE, "epoch": 0, "position": 0}


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ShardedSampler(3, 2, 0), TypeError, "expected a sampler, .* got int"),  # type: ignore[arg-type]
        (lambda: ShardedSampler(TorchSampler(Numbers(3), 2, 0), 2, 0), ValueError, "deals out to ranks already"),
        (
            lambda: ShardedSampler(BatchSampler(TorchSampler(Numbers(3), 2, 0), 2, False), 2, 0),
            ValueError,
            "the BatchSampler deals out to ranks already",
        ),
        (lambda: ShardedSampler(range(3), 2, 2), ValueError, r"Invalid rank 2, .* interval \[0, 1\]"),
        (lambda: ShardedSampler(range(3), 2, 0, drop_last=True, remainder="keep"), ValueError, "contradicts"),
        (lambda: ShardedSampler(range(3), 2, 0, seed=2**64), ValueError, "seed"),
        (lambda: samestep.ShardedIterable(Numbers(3), 2, 0), TypeError, "takes a DistributedSampler"),  # type: ignore[arg-type]
        (lambda: samestep.ShardedIterable(range(3), 2, -1), ValueError, "Invalid rank -1"),
        (lambda: ShardedSampler(range(3), 2, 0).state_dict(1), ValueError, "no epoch has begun"),
        (lambda: ShardedSampler(range(3), 2, 0).colour, AttributeError, "colour"),
    ],
)
def test_what_it_cannot_do_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_it_copies_and_pickles() -> None:
    sampler = ShardedSampler(RandomSampler(Numbers(9)), 2, 1)
    list(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(copy.deepcopy(sampler)) == list(sampler)


# Iterable data sets


class Stream(IterableDataset[int]):
    """Numbers in an order that is drawn; if it finds itself in a loading worker, it gives a part of them."""

    def __init__(self, length: int, *, shuffle: bool = True) -> None:
        self.length, self.shuffle = length, shuffle

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        numbers = torch.randperm(self.length).tolist() if self.shuffle else list(range(self.length))
        return iter(numbers if info is None else numbers[info.id :: info.num_workers])


def loaders(workers: int, mode: Remainder, length: int = 23, **options: Any) -> list[DataLoader[int]]:
    """The loaders of three ranks with batches of 2."""
    if workers:
        options |= {"timeout": 60, "multiprocessing_context": "fork"}
    return [
        DataLoader(samestep.ShardedIterable(Stream(length), 3, rank, remainder=mode), 2, num_workers=workers, **options)
        for rank in range(3)
    ]


@forks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_read_once_over_ranks_and_workers(workers: int, mode: Remainder) -> None:
    """pytorch#48702."""
    ranks = loaders(workers, mode)
    epochs = []
    for _ in range(2):
        batches = []
        for rank, loader in enumerate(ranks):
            apart(rank)
            batches.append([batch.tolist() for batch in loader])
        seen = [number for rank in batches for batch in rank for number in batch]
        assert len(seen) == {"pad": 24, "drop": 21, "keep": 23}[mode]
        assert len(set(seen)) == (21 if mode == "drop" else 23)
        if mode != "keep":
            assert len({len(rank) for rank in batches}) == 1, "every rank has as many batches"
        epochs.append(batches)
    assert epochs[0] != epochs[1], "epochs count themselves, although the workers are new ones"
    for loader in ranks:
        loader.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert [[batch.tolist() for batch in loader] for loader in ranks] == epochs[1]


@forks
def test_workers_that_stay_hear_of_set_epoch() -> None:
    (loader, *_) = loaders(2, "keep", persistent_workers=True)
    first = [batch.tolist() for batch in loader]
    second = [batch.tolist() for batch in loader]
    assert first != second
    loader.dataset.set_epoch(0)  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in loader] == first
    loader.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in loader] == second
    del loader


def test_a_stream_may_have_a_length_or_none_and_be_empty() -> None:
    assert len(samestep.ShardedIterable(range(7), 2, 1, remainder="keep")) == 3
    with pytest.raises(TypeError):
        len(samestep.ShardedIterable(Stream(7), 2, 1))
    assert list(samestep.ShardedIterable(Stream(0), 2, 1)) == []
    assert sorted(itertools.chain(*(samestep.ShardedIterable(Stream(1), 2, rank) for rank in range(2)))) == [0, 0]


# The loader


def numbers_of(loader: DataLoader[Any]) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


def test_the_loader_makes_the_sampler() -> None:
    for rank in range(2):
        loader = samestep.DataLoader(Numbers(9), 2, True, num_replicas=2, rank=rank)
        assert [numbers_of(loader), numbers_of(loader)] == [
            (torch_order(9, epoch) + torch_order(9, epoch)[:1])[rank::2] for epoch in range(2)
        ]
        loader.set_epoch(0)
        assert numbers_of(loader) == (torch_order(9, 0) + torch_order(9, 0)[:1])[rank::2]
    in_order = samestep.DataLoader(Numbers(9), 2, num_replicas=2, rank=1, remainder="keep", drop_last=True)
    assert numbers_of(in_order) == [1, 3, 5, 7]


def test_the_loader_deals_out_whatever_it_is_given() -> None:
    how: dict[str, Any] = {"num_replicas": 2, "rank": 1, "remainder": "keep"}
    stream = samestep.DataLoader(Stream(7, shuffle=False), 2, **how)
    weighted = samestep.DataLoader(Numbers(30), 4, sampler=WeightedRandomSampler(WEIGHTS, 9), **how)
    batches = samestep.DataLoader(Numbers(9), batch_sampler=BatchSampler(range(9), 2, False), **how)  # type: ignore[arg-type]
    dealt = TorchSampler(Numbers(9), 2, 1, shuffle=False)
    as_it_is = samestep.DataLoader(Numbers(9), batch_sampler=BatchSampler(dealt, 2, False), **how)
    assert numbers_of(stream) == [1, 3, 5]
    assert numbers_of(batches) == [2, 3, 6, 7]
    assert len(numbers_of(weighted)) == 4
    assert numbers_of(as_it_is) == list(dealt)
    for loader in (stream, weighted, batches, as_it_is):
        loader.set_epoch(3)
    assert dealt.epoch == 3

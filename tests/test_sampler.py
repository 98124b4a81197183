"""The sampler: torch's order bit for bit, epochs that count themselves, what is refused, loaders and memory."""

import gc
import itertools
import pickle
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import Numbers, in_turn, lengths, sizes, start, torch_order, world
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from samestep.data.sampler import DistributedSampler
from samestep.data.sharding import Remainder

# Workers fork from a process in which pytest's timer is a thread; Python 3.12 and later warn about that.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


# Order and epochs


@settings(deadline=None)
@given(lengths, sizes, st.integers(-5, 2**40), st.integers(0, 5), st.booleans(), st.booleans())
def test_parity_with_torchs_class(
    length: int, size: int, seed: int, epoch: int, drop_last: bool, shuffle: bool
) -> None:
    for rank in range(size):
        arguments = (Numbers(length), size, rank, shuffle, seed, drop_last)
        theirs: TorchSampler[int] = TorchSampler(*arguments)
        ours = DistributedSampler(*arguments)
        for number in (epoch, epoch, epoch + 1):
            theirs.set_epoch(number)
            ours.set_epoch(number)
            assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        for name in ("num_replicas", "rank", "epoch", "drop_last", "num_samples", "total_size", "shuffle", "seed"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.dataset is theirs.dataset


@pytest.mark.parametrize("length", [4095, 4096, 4097, 30_011])
@pytest.mark.parametrize("shuffle", [False, True])
def test_parity_over_several_chunks(length: int, shuffle: bool) -> None:
    for rank in range(2):
        theirs: TorchSampler[int] = TorchSampler(Numbers(length), 2, rank, shuffle)
        assert list(DistributedSampler(Numbers(length), 2, rank, shuffle)) == list(theirs)


def test_indices_are_plain_integers() -> None:
    assert {type(i) for shuffle in (False, True) for i in DistributedSampler(Numbers(5), 1, 0, shuffle)} == {int}


def test_the_order_does_not_depend_on_torchs_defaults() -> None:
    wanted = torch_order(50, 0)
    state = torch.random.get_rng_state()
    torch.set_default_device("meta")
    try:
        got = list(DistributedSampler(Numbers(50), 1, 0))
    finally:
        torch.set_default_device(None)
    assert got == wanted
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_epoch_counts_itself() -> None:
    sampler = DistributedSampler(Numbers(20), 1, 0)
    for epoch in range(3):
        assert sampler.epoch == epoch
        assert list(sampler) == torch_order(20, epoch)
    assert sampler.epoch == 3


def test_an_epoch_that_was_left_early_counts() -> None:
    sampler = DistributedSampler(Numbers(20), 1, 0)
    assert next(iter(sampler)) == torch_order(20, 0)[0]
    assert sampler.epoch == 1
    assert list(sampler) == torch_order(20, 1)


def test_an_iterator_that_nobody_asks_is_no_epoch() -> None:
    sampler = DistributedSampler(Numbers(20), 1, 0)
    unused = iter(sampler)
    assert sampler.epoch == 0
    assert list(sampler) == torch_order(20, 0)
    assert list(unused) == torch_order(20, 1)


@pytest.mark.parametrize("by_call", [True, False])
def test_after_set_epoch_the_callers_number_rules(by_call: bool) -> None:
    sampler = DistributedSampler(Numbers(20), 1, 0)
    list(sampler)
    if by_call:
        sampler.set_epoch(7)
    else:
        sampler.epoch = 7
    for _ in range(2):
        assert list(sampler) == torch_order(20, 7)
        assert sampler.epoch == 7


@settings(deadline=None)
@given(lengths, sizes, st.booleans())
def test_keep_covers_each_sample_exactly_once(length: int, size: int, shuffle: bool) -> None:
    samplers = world(length, size, shuffle=shuffle, remainder="keep")
    shares = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert in_turn(shares) == (torch_order(length, 0) if shuffle else list(range(length)))
    assert {sampler.total_size for sampler in samplers} == {length}


# What is accepted


@pytest.mark.parametrize(
    ("drop_last", "remainder", "mode"),
    [
        (False, None, "pad"),
        (True, None, "drop"),
        (False, "pad", "pad"),
        (False, "drop", "drop"),
        (True, "drop", "drop"),
        (False, "keep", "keep"),
    ],
)
def test_remainder_and_drop_last(drop_last: bool, remainder: Remainder | None, mode: Remainder) -> None:
    sampler = DistributedSampler(Numbers(5), 2, 1, drop_last=drop_last, remainder=remainder)
    assert (sampler.remainder, sampler.drop_last) == (mode, mode == "drop")
    assert len(sampler) == {"pad": 3, "drop": 2, "keep": 2}[mode]


class Unsized(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rank": 2}, ValueError, r"Invalid rank 2, rank should be in the interval \[0, 1\]"),
        ({"rank": -1}, ValueError, r"Invalid rank -1, rank should be in the interval \[0, 1\]"),
        ({"num_replicas": 0}, ValueError, "Invalid num_replicas 0 on rank 0, expected at least 1"),
        ({"num_replicas": "2"}, TypeError, "'str' object cannot be interpreted as an integer"),
        ({"rank": 0.0}, TypeError, "'float' object cannot be interpreted as an integer"),
        ({"seed": 0.5}, TypeError, "'float' object cannot be interpreted as an integer"),
        ({"seed": 2**64}, ValueError, r"seed 18446744073709551616 \+ epoch 0 is .*, expected -2\*\*63 to"),
        ({"remainder": "wrap"}, ValueError, "remainder is 'wrap', expected None or one of .*'pad', 'drop', 'keep'"),
        ({"remainder": "pad", "drop_last": True}, ValueError, "drop_last=True contradicts remainder='pad'"),
        ({"remainder": "keep", "drop_last": True}, ValueError, "drop_last=True contradicts remainder='keep'"),
        ({"dataset": Unsized()}, TypeError, "Unsized has no length; a sampler needs a data set with one"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        DistributedSampler(**{"dataset": Numbers(5), "num_replicas": 2, "rank": 0, **options})


@pytest.mark.parametrize(("epoch", "kind"), [(1.0, TypeError), (2**64, ValueError), (None, TypeError)])
def test_a_wrong_epoch_is_refused_and_changes_nothing(epoch: Any, kind: type[Exception]) -> None:
    sampler = DistributedSampler(Numbers(20), 1, 0)
    with pytest.raises(kind, match=r"integer|expected -2\*\*63"):
        sampler.set_epoch(epoch)
    assert [list(sampler), list(sampler)] == [torch_order(20, 0), torch_order(20, 1)]


def test_a_data_set_that_changed_its_length_is_refused() -> None:
    data = Numbers(5)
    sampler = DistributedSampler(data, 2, 1)
    data.length = 6
    with pytest.raises(ValueError, match="had 5 samples when its sampler was made and has 6 now, on rank 1"):
        list(sampler)


LAUNCHED = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}
PLACES = [((None, None), (3, 2)), ((7, None), (7, 2)), ((None, 1), (3, 1)), ((8, 5), (8, 5))]


@pytest.mark.parametrize(("given_place", "place"), PLACES)
def test_ranks_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, given_place: tuple[Any, Any], place: tuple[int, int]
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    # Too few GPUs for these ranks are no concern of a sampler.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sampler = DistributedSampler(Numbers(5), *given_place)
    assert (sampler.num_replicas, sampler.rank) == place


@pytest.mark.parametrize(("given_place", "place"), PLACES)
def test_the_process_group_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, given_place: tuple[Any, Any], place: tuple[int, int]
) -> None:
    for name, value in {**LAUNCHED, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name, answer in (("is_initialized", True), ("get_world_size", 3), ("get_rank", 2)):
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    sampler = DistributedSampler(Numbers(5), *given_place)
    assert (sampler.num_replicas, sampler.rank) == place


# Libraries and loaders


def test_libraries_take_it_for_torchs_sampler() -> None:
    sampler = DistributedSampler(Numbers(5), 1, 0)
    assert isinstance(sampler, TorchSampler)
    assert isinstance(sampler, Sampler)


def test_it_pickles_in_mid_epoch() -> None:
    sampler = DistributedSampler(Numbers(20), 2, 1, seed=3)
    list(sampler)
    held = start(sampler, 4)
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.state_dict() == sampler.state_dict()
    assert list(copy) == list(sampler)
    assert len(list(held)) == 6


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_resumes_where_training_stood(workers: int) -> None:
    def loader(sampler: DistributedSampler) -> DataLoader[int]:
        return DataLoader(
            sampler.dataset,
            batch_size=2,
            sampler=sampler,
            num_workers=workers,
            timeout=60 if workers else 0,
            multiprocessing_context="fork" if workers else None,
        )

    sampler = DistributedSampler(Numbers(21), 2, 1)
    batches = iter(loader(sampler))
    trained = [number for _ in range(3) for number in next(batches).tolist()]
    assert trained == torch_order(21, 0)[1::2][:6]
    state = sampler.state_dict(position=3 * 2)
    assert (state["epoch"], state["position"]) == (0, 12)
    rest = [number for batch in batches for number in batch.tolist()]
    assert sampler.state_dict(position=6 * 2) == sampler.state_dict()

    other = DistributedSampler(Numbers(21), 2, 1)
    other.load_state_dict(state)
    resumed = loader(other)
    assert len(resumed) == 3
    assert [number for batch in resumed for number in batch.tolist()] == rest
    assert [number for batch in resumed for number in batch.tolist()][:10] == torch_order(21, 1)[1::2]


@forks
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_without_batches_counts_epochs_one_by_one(workers: int) -> None:
    sampler = DistributedSampler(Numbers(6), 1, 0)
    loader: DataLoader[int] = DataLoader(
        sampler.dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        timeout=60 if workers else 0,
        multiprocessing_context="fork" if workers else None,
    )
    assert [list(loader) for _ in range(2)] == [torch_order(6, 0), torch_order(6, 1)]


# Memory


def test_a_billion_samples_in_order_need_no_memory() -> None:
    tracemalloc.start()
    try:
        sampler = DistributedSampler(Numbers(10**9), 4, 1, shuffle=False)
        assert len(sampler) == 250_000_000
        assert sum(itertools.islice(sampler, 100_000)) == 4 * sum(range(100_000)) + 100_000
        sampler.load_state_dict({**sampler.state_dict(), "position": 10**9 - 6})
        assert list(sampler) == [10**9 - 5, 10**9 - 1]
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def tensor_bytes() -> int:
    gc.collect()
    dense = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.layout == torch.strided]
    storages = [one.untyped_storage() for one in dense]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_ten_million_shuffled_samples_keep_the_share_alone() -> None:
    before = tensor_bytes()
    tracemalloc.start()
    try:
        sampler = DistributedSampler(Numbers(10**7), 8, 3)
        assert len(sampler) == 1_250_000
        iterator = iter(sampler)
        assert len(set(itertools.islice(iterator, 20_000))) == 20_000
        assert 0 < tensor_bytes() - before <= 8 * 1_250_000 + 64
        assert next(iterator) < 10**7
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()

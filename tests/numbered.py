"""Data sets of numbers and worlds of samplers, for the tests of the sampler and of resuming it."""

import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from samestep.data.sampler import DistributedSampler

__all__ = ["Numbers", "epoch_of", "in_turn", "lengths", "sizes", "start", "torch_order", "world"]

lengths = st.integers(0, 40)
sizes = st.integers(1, 9)


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def world(length: int, size: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(Numbers(length), size, rank, **options) for rank in range(size)]


def in_turn(shares: list[list[int]]) -> list[int]:
    """Return what ranks that take turns get, one after the other."""
    return [one for turn in itertools.zip_longest(*shares) for one in turn if one is not None]


def epoch_of(samplers: list[DistributedSampler]) -> list[int]:
    return in_turn([list(sampler) for sampler in samplers])


def torch_order(length: int, epoch: int, seed: int = 0) -> list[int]:
    """Return the order of one rank that has the data to itself."""
    sampler: TorchSampler[int] = TorchSampler(Numbers(length), 1, 0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def start(sampler: DistributedSampler, turns: int) -> Iterator[int]:
    """Take so many samples and return the iterator, that it stay alive."""
    iterator = iter(sampler)
    assert len(list(itertools.islice(iterator, turns))) <= turns
    return iterator

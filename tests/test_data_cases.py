"""What people met with samplers: evaluation that counts twice, orders that repeat, options that exclude each other."""

from functools import partial
from typing import Any

import pytest
import torch
from numbered import Numbers
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import samestep
from samestep.comm.base import Communicator
from samestep.testing.ranks import run_threads


def evaluate(comm: Communicator, count: int) -> tuple[float, int, int]:
    """Tell odd from even, but wrongly where 5 divides; return the share of errors, all samples, this rank's."""
    data = Numbers(count)
    sampler = samestep.DistributedSampler(data, comm.size, comm.rank, shuffle=False, remainder="keep")
    said, true = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for numbers in DataLoader(data, batch_size=2, sampler=sampler):
        said.append((numbers + (numbers % 5 == 0)) % 2)
        true.append(numbers % 2)
    all_said = torch.cat(samestep.all_gather_uneven(torch.cat(said), comm))
    all_true = torch.cat(samestep.all_gather_uneven(torch.cat(true), comm))
    return int((all_said != all_true).sum()) / max(1, len(all_said)), len(all_said), len(torch.cat(said))


@pytest.mark.parametrize("count", [0, 1, 3, 21, 22])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_01_evaluation_counts_every_sample_once(count: int, size: int) -> None:
    """21 images are 21 on any number of ranks, also where a rank gets none."""
    answers = run_threads(partial(evaluate, count=count), size)
    wrong = len(range(0, count, 5)) / max(1, count)
    assert [answer[:2] for answer in answers] == [(wrong, count)] * size
    assert sum(answer[2] for answer in answers) == count
    assert (min(answer[2] for answer in answers) == 0) == (count < size)


def test_what_ranks_hold_is_gathered_alone_too() -> None:
    """A program that nobody launched is one rank."""
    (got,) = samestep.all_gather_uneven(torch.arange(6).view(3, 2))
    assert torch.equal(got, torch.arange(6).view(3, 2))
    with pytest.raises(ValueError, match="got a scalar"):
        samestep.all_gather_uneven(torch.tensor(1))


class Drawn(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(torch.randperm(50).tolist())


def loaders() -> dict[str, Any]:
    """Everything of ours that has an order, in a program that forgets set_epoch."""
    data = Numbers(50)
    return {
        "sampler": DataLoader(data, 5, sampler=samestep.DistributedSampler(data, 2, 0)),
        "sharded": DataLoader(data, 5, sampler=samestep.ShardedSampler(RandomSampler(data), 2, 0)),
        "iterable": DataLoader(samestep.ShardedIterable(Drawn(), 2, 0), 5),
        "loader": samestep.DataLoader(data, 5, shuffle=True, num_replicas=2, rank=0),
    }


@pytest.mark.parametrize("kind", loaders())
def test_case_09_the_epoch_advances_by_itself_and_set_epoch_wins(kind: str) -> None:
    loader = loaders()[kind]
    epochs = [repr(list(loader)) for _ in range(3)]
    assert len(set(epochs)) == 3
    setter = {"sampler": "sampler", "sharded": "sampler", "iterable": "dataset"}.get(kind)
    chosen = getattr(loader, setter) if setter else loader
    for epoch in (2, 0, 0, 1):
        chosen.set_epoch(epoch)
        assert repr(list(loader)) == epochs[epoch]
    assert repr(list(loader)) == epochs[1], "once it was set it stays"


def test_case_10_shuffle_beside_a_sampler() -> None:
    """Our loader shuffles by itself; who gives a sampler as well, to either, gets torch's own error."""
    data = Numbers(10)
    assert len(samestep.DataLoader(data, 5, shuffle=True, num_replicas=2, rank=0)) == 1
    sampler = samestep.DistributedSampler(data, 2, 0)
    for loader in (DataLoader, partial(samestep.DataLoader, num_replicas=2, rank=0)):
        with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
            loader(data, shuffle=True, sampler=sampler)

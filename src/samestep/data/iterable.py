"""Iterable data sets, dealt out to ranks and their loading workers: nothing twice, nothing missed."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from samestep.data.place import check_seed, choose_remainder, place
from samestep.data.same_draws import SameDraws, drawn
from samestep.data.sharding import Remainder
from samestep.data.stream import Slot

__all__ = ["ShardedIterable"]

_MAX_WORKERS = 64


class ShardedIterable(IterableDataset[Any]):
    """Yields this rank's share of an iterable data set, and in a loading worker that worker's part of it.

    Every worker of every rank goes through all of `dataset`, which is the same stream everywhere, and takes its turns:
    see `stream`. So a stream that costs much to read had better be split by files, before this.

    dataset: any iterable that can begin anew each epoch. It sees no loading workers (`get_worker_info()` is None in
    it), so one that deals itself out to workers still gives all. While it makes an item, the generators of torch,
    Python and numpy are seeded with seed + epoch, as if by itself; so shuffling and augmentation that draw from these
    give the same stream on all. Its `set_epoch`, if it has one, is called.

    remainder: "pad" (default): ranks get as many items, and as many batches, as one another; some come twice, fewer
    than there are ranks. "drop": likewise, but a few are left out. "keep": each item exactly once, and the ranks' ends
    are uneven by one at most. Ranks must use the same number of loading workers.

    Epochs count themselves, also where workers live for one epoch only; `set_epoch` rules once it was called, in the
    workers too.

    Raises TypeError for what can't be iterated, ValueError for a rank out of range, more than 64 loading workers, or
    arguments that contradict each other.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        remainder: Remainder | None = None,
    ) -> None:
        if not hasattr(dataset, "__iter__"):
            raise TypeError(
                f"expected an iterable data set, got {type(dataset).__name__}; one with numbered samples takes a "
                "DistributedSampler"
            )
        self.dataset = dataset
        self.num_replicas, self.rank = place(num_replicas, rank)
        self.remainder = choose_remainder(drop_last, remainder)
        self.seed = operator.index(seed)
        check_seed(self.seed, 0)
        # In memory that loading workers share, as their copies of this object last no longer than they. First whether
        # and which epoch was set; then how many each worker has begun, for each number of workers.
        self._set = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._begun = torch.zeros(_MAX_WORKERS + 1, _MAX_WORKERS, dtype=torch.int16).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch for every iteration that begins from now on, until the next call."""
        epoch = operator.index(epoch)
        check_seed(self.seed, epoch)
        self._set[1] = epoch
        self._set[0] = 1

    def __len__(self) -> int:
        """Return how many items this rank gets; TypeError, as Python's own len(), where the data set has no length."""
        return Slot(self.num_replicas, self.rank, self.remainder).count(len(self.dataset))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        if workers > _MAX_WORKERS:
            raise ValueError(f"rank {self.rank}: got {workers} loading workers, expected at most {_MAX_WORKERS}")
        slot = Slot(self.num_replicas, self.rank, self.remainder, workers, worker)
        epoch = self._begin(0 if info is None else workers, worker)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return slot.share(drawn(_Alone(self.dataset), SameDraws(self.seed + epoch)))

    def _begin(self, workers: int, worker: int) -> int:
        begun = int(self._begun[workers, worker])
        self._begun[workers, worker] = (begun + 1) % 2**15
        return int(self._set[1]) if self._set[0] else begun


class _Alone:
    """What `dataset` yields where it can't see that it is read in a loading worker."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        with _NoWorker():
            iterator = iter(self._dataset)
        while True:
            with _NoWorker():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


class _NoWorker:
    def __enter__(self) -> None:
        self._info, torch_worker._worker_info = torch_worker._worker_info, None

    def __exit__(self, *_: object) -> None:
        torch_worker._worker_info = self._info

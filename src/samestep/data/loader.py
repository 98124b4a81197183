"""torch's DataLoader for one rank of several: it deals out whatever it is given."""

from collections.abc import Iterable
from typing import Any

import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Sampler

from samestep.data.iterable import ShardedIterable
from samestep.data.sampler import DistributedSampler
from samestep.data.sharded import ShardedSampler, is_dealt_out
from samestep.data.sharding import Remainder

__all__ = ["DataLoader"]


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Loads this rank's share of the batches of an epoch; torch's DataLoader with the sampler made by itself.

    dataset: with numbered samples, in order or with shuffle=True: a DistributedSampler deals them out; or an iterable
    one: a ShardedIterable does. sampler, batch_sampler: any, made alike on every rank: a ShardedSampler deals out what
    it yields. What deals out to ranks already is taken as it is.

    batch_size: samples on this rank, as in torch; a step is as many times the number of ranks. remainder: what happens
    at the end, see DistributedSampler; None pads. drop_last is torch's: whether a rank's own last short batch goes.
    num_replicas, rank, seed: as in DistributedSampler. options: all else that torch's DataLoader takes, by name.

    Epochs count themselves; `set_epoch` rules once it was called. Raises what torch's DataLoader and the samplers do.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        remainder: Remainder | None = None,
        **options: Any,
    ) -> None:
        how: dict[str, Any] = {"num_replicas": num_replicas, "rank": rank, "seed": seed, "remainder": remainder}
        self._dealer: Any = None
        if isinstance(dataset, IterableDataset):
            self._dealer = dataset = (
                dataset if isinstance(dataset, ShardedIterable) else ShardedIterable(dataset, **how)
            )
        elif batch_sampler is not None:
            self._dealer = batch_sampler = _dealt_out(batch_sampler, how)
        elif sampler is not None:
            self._dealer = sampler = _dealt_out(sampler, how)
        else:
            self._dealer = sampler = DistributedSampler(dataset, shuffle=bool(shuffle), **how)
            shuffle = None
        super().__init__(dataset, batch_size, shuffle, sampler, batch_sampler, **options)

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch for every iteration that begins from now on, until the next call."""
        inner = self._dealer
        while not hasattr(inner, "set_epoch"):  # a batch sampler on what deals out
            inner = inner.sampler
        inner.set_epoch(epoch)


def _dealt_out(sampler: Any, how: dict[str, Any]) -> Any:
    return sampler if is_dealt_out(sampler) else ShardedSampler(sampler, **how)

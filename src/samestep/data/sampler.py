"""Deals a data set's samples out to ranks, in torch's order, and resumes in mid-epoch on any number of ranks.

The arithmetic is in `sharding`; here are the shuffle (torch.randperm, as torch's class has it), the epoch
counter and the state of an epoch in progress.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data import distributed as torch_distributed

from samestep.data.epochs import CountsEpochs, Epochs, Progress
from samestep.data.place import check_seed, choose_remainder, place
from samestep.data.resume import EpochState
from samestep.data.sharding import Deal, Remainder

__all__ = ["DistributedSampler"]

# Python integers made from the shuffled tensor at a time: 4,096 of them take 160 KB, whatever the data set's length.
_CHUNK = 4096


# A subclass of torch's class, although nothing of it is used, because libraries that wrap loaders ask
# isinstance(sampler, torch's DistributedSampler) before they replace a sampler by one of their own.
class DistributedSampler(CountsEpochs, torch_distributed.DistributedSampler[int]):
    """Yields this rank's share of the sample numbers of each epoch; torch's order, bit for bit.

    dataset: anything with a length; it must keep it. num_replicas, rank: how many share it and who this is;
    what is not given comes from torch.distributed's default group when there is one, else from the launcher's
    environment. shuffle, seed: as torch's; the order is torch.randperm seeded with seed + epoch. drop_last:
    short for remainder="drop".

    remainder: what to do when the ranks do not divide the length. "pad" (as drop_last=False): some samples come
    twice. "drop" (as drop_last=True): a few are left out. "keep": each sample comes exactly once, for
    evaluation; ranks' lengths differ by one at most, the lowest ranks have the longest, and a rank may get
    none. None follows drop_last.

    **Epochs.** An epoch begins when its first sample is asked for, and the next one follows by itself, with
    another order. Once `set_epoch` has been called, or `epoch` assigned, the caller's number rules, as with
    torch's class. `epoch` is the one that the next iteration will use. Beware of peeking: `next(iter(loader))`
    on one rank alone begins an epoch there and not on the others, which then train on different orders, with
    samples twice or not at all. Peek on every rank, or at `dataset[0]`, or afterwards call `set_epoch`, or
    `load_state_dict` again when that came before.

    **Length.** `num_samples` (this rank) and `total_size` (all ranks) describe a whole epoch. `len()` is what
    an iteration yields: less than `num_samples` for an epoch that was resumed in its middle.

    **Memory.** Without shuffle none to speak of. With it, 8 bytes per sample of the data set while an epoch
    begins, of which this rank's share is kept.

    Raises ValueError for a rank, seed or remainder out of range or one that contradicts drop_last, TypeError
    for numbers that are no integers or a data set without a length, and WorldError when the environment
    contradicts itself.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        remainder: Remainder | None = None,
    ) -> None:
        # torch's __init__ is not called: it knows two remainder rules and only torch.distributed.
        self.num_replicas, self.rank = place(num_replicas, rank)
        self.remainder = choose_remainder(drop_last, remainder)
        self.dataset = dataset
        self.drop_last = self.remainder == "drop"
        self.shuffle = bool(shuffle)
        self.seed = operator.index(seed)
        check_seed(self.seed, 0)
        self._length = _length(dataset)
        whole = self._deal(0)
        self.num_samples, self.total_size = whole.count, whole.total
        self._epochs = Epochs()

    def __len__(self) -> int:
        """Return how many samples the iteration in progress, or else the next one, yields on this rank in all."""
        progress = self._epochs.progress
        return self._deal(progress.start if progress and progress.iterating else self._epochs.next_start).count

    def __iter__(self) -> Iterator[int]:
        # A generator, so that an iterator of which nobody asks a sample is no epoch: DataLoader makes and drops such
        # ones when it has workers and batch_size=None.
        progress = self._begin()
        try:
            for piece in self._share(progress):
                for at in range(0, len(piece), _CHUNK):
                    chunk = piece[at : at + _CHUNK]
                    for index in chunk.tolist() if isinstance(chunk, torch.Tensor) else chunk:
                        progress.yielded += 1
                        yield index
            progress.exhausted = True
        finally:
            progress.iterating = False

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Return where the epoch in progress stands, to be resumed on any number of ranks.

        position: how many samples this rank has consumed of the epoch that was begun last, counted from where
        that was begun or resumed. None takes what was yielded, which is more than was trained on when
        DataLoader's workers fetch ahead: then pass batches * batch_size. A short last batch may be counted as a
        full one. When an epoch's loop is over, leave it out: a finished epoch is the beginning of the next.

        "position" in the result counts what all ranks together have consumed when each has come as far as this
        one; so ranks in step return equal states, and one rank's is enough. With "keep" that is rank 0's, whose
        share is never shorter than another's. All values are plain numbers and text.

        Raises ValueError for a position below 0 or beyond what was yielded, and TypeError for one that is no
        integer.
        """
        progress = self._epochs.progress
        turns = self._turns(position)
        if progress is None:
            epoch, reached = self._epochs.next_epoch, self._epochs.next_start
        else:
            deal = self._deal(progress.start)
            epoch, reached = progress.epoch, deal.consumed(turns)
            if reached == deal.start + deal.total or (position is None and progress.exhausted):
                epoch, reached = epoch + 1, 0
        return self._state(epoch, reached).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration go on where the state was taken, on this sampler's number of ranks.

        The samples that were not consumed are dealt out anew by the same remainder rule. After them, epochs are
        whole again and counted on. An iterator that exists already is not affected.

        Raises, with nothing changed, TypeError when the state is no mapping and ValueError when a key is
        missing, unknown or has a wrong value, or when it is of another length, seed, shuffle or remainder; the
        message names both values.
        """
        state = EpochState.from_dict(state_dict, self.rank)
        state.check_fits(self._state(state.epoch, state.position), self.rank)
        check_seed(self.seed, state.epoch)
        self._epochs.resume(state.epoch, state.position)

    def _state(self, epoch: int, position: int) -> EpochState:
        return EpochState(epoch, position, self.seed, self._length, self.shuffle, self.remainder)

    def _deal(self, start: int) -> Deal:
        return Deal(self._length, self.num_replicas, self.rank, self.remainder, start)

    def _begin(self) -> Progress:
        length = _length(self.dataset)
        if length != self._length:
            raise ValueError(
                f"the data set had {self._length} samples when its sampler was made and has {length} now, "
                f"on rank {self.rank}; make a new sampler"
            )
        return self._epochs.begin()

    def _share(self, progress: Progress) -> list[torch.Tensor] | list[range]:
        """Return this rank's samples in pieces: ranges, or tensors that keep no more than the share alive."""
        slices = self._deal(progress.start).slices()
        if not self.shuffle:
            return [range(self._length)[part] for part in slices]
        # On the CPU whatever the default device is, or the order would depend on it.
        generator = torch.Generator(device="cpu")
        generator.manual_seed(self.seed + progress.epoch)
        order = torch.randperm(self._length, generator=generator, device="cpu")
        pieces = [order[part] for part in slices]
        return [piece if len(piece) == len(order) else piece.clone() for piece in pieces]

    def _turns(self, position: int | None) -> int:
        progress = self._epochs.progress
        yielded = progress.yielded if progress else 0
        if position is None:
            return yielded
        position = operator.index(position)
        # All of a share may be called more: a short last batch counted as full, a longer share on another rank.
        complete = progress is not None and yielded == self._deal(progress.start).count
        if position < 0 or (position > yielded and not complete):
            since = "this epoch began" if progress else "set_epoch or load_state_dict, and no epoch has begun"
            raise ValueError(
                f"position is {position} on rank {self.rank}, expected 0 to {yielded}, "
                f"the number of samples it was given since {since}"
            )
        return position


def _length(dataset: Dataset[Any]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]  # torch declares no length for Dataset
    except TypeError as error:
        raise TypeError(f"{type(dataset).__name__} has no length; a sampler needs a data set with one") from error

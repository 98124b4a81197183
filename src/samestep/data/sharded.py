"""Any sampler, dealt out to ranks: weighted ones, those of batches, those without a length or an end."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import distributed as torch_distributed

from samestep.data.epochs import CountsEpochs, Epochs
from samestep.data.place import check_seed, choose_remainder, place
from samestep.data.same_draws import SameDraws, drawn
from samestep.data.sharding import Remainder
from samestep.data.stream import Slot

__all__ = ["ShardedSampler", "is_dealt_out"]

# Going in and out of the sampler's own random numbers takes 40 us, as long as a sampler takes for 100 of them.
_AT_ONCE = 1024


# A subclass of torch's class for the reason that samestep's DistributedSampler is one: libraries ask.
class ShardedSampler(CountsEpochs, torch_distributed.DistributedSampler[Any]):
    """Yields this rank's share of what `sampler` yields: sample numbers, or whole batches of a batch sampler.

    Every rank draws the same order from its copy of `sampler`, and takes turns along it: with N ranks, rank r takes
    what comes at position r, r + N, r + 2 N, ... So what `sampler` promises (weights, replacement, buckets of alike
    lengths, no end) holds for all ranks together. Give it to torch's DataLoader as `sampler`, or as `batch_sampler` if
    it yields batches; then a step is N of them.

    sampler: any iterable that is made alike on every rank; it need not have a length. While it draws, the random
    generators of torch, Python and numpy, and its own `generator` if it has one, are seeded with seed + epoch; outside
    they are untouched. Its `set_epoch`, if it has one, is called. It is asked for up to 1,024 items ahead.

    num_replicas, rank, drop_last, remainder, epochs: as in samestep's DistributedSampler; "pad" goes round to the
    order's beginning. `state_dict` counts positions of the whole order, so it resumes on any number of ranks; what was
    consumed is drawn once more and passed over.

    Attributes that it does not have are the sampler's. Raises TypeError for what can't be iterated, ValueError for a
    sampler that deals out to ranks already, and what DistributedSampler raises.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        remainder: Remainder | None = None,
    ) -> None:
        self.sampler = sampler
        if not hasattr(sampler, "__iter__"):
            raise TypeError(f"expected a sampler, anything that can be iterated, got {type(sampler).__name__}")
        if is_dealt_out(sampler):
            raise ValueError(f"the {type(sampler).__name__} deals out to ranks already; give it to the loader as it is")
        self.num_replicas, self.rank = place(num_replicas, rank)
        self.remainder = choose_remainder(drop_last, remainder)
        self.drop_last = self.remainder == "drop"
        self.seed = operator.index(seed)
        check_seed(self.seed, 0)
        self._slot = Slot(self.num_replicas, self.rank, self.remainder)
        self._epochs = Epochs()

    def __len__(self) -> int:
        """Return how many items this rank gets in the iteration in progress, or else the next one.

        Raises TypeError, as Python's own len(), for a sampler without a length.
        """
        progress = self._epochs.progress
        start = progress.start if progress and progress.iterating else self._epochs.next_start
        return self._slot.count(len(self.sampler), start)  # type: ignore[arg-type]

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute of torch's class
        """Items that this rank gets in a whole epoch; TypeError without a length."""
        return self._slot.count(len(self.sampler))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        progress = self._epochs.begin()
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(progress.epoch)
        draws = SameDraws(self.seed + progress.epoch, _generators(self.sampler))
        try:
            for item in self._slot.share(drawn(self.sampler, draws, _AT_ONCE), progress.start):
                progress.yielded += 1
                yield item
            progress.exhausted = True
        finally:
            progress.iterating = False

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Return where the epoch in progress stands; `position` as in samestep's DistributedSampler."""
        progress = self._epochs.progress
        epoch, reached = self._epochs.next_epoch, self._epochs.next_start
        if progress is not None:
            turns = progress.yielded if position is None else operator.index(position)
            if turns < 0 or (turns > progress.yielded and not progress.exhausted):
                raise ValueError(f"position is {turns} on rank {self.rank}, expected 0 to {progress.yielded}")
            if progress.exhausted and turns >= progress.yielded:
                epoch, reached = progress.epoch + 1, 0
            else:
                epoch, reached = progress.epoch, progress.start + turns * self.num_replicas
        elif position:
            raise ValueError(f"position is {position} on rank {self.rank}, but no epoch has begun")
        return {"epoch": epoch, "position": reached, "seed": self.seed, "remainder": self.remainder}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next iteration go on where the state was taken, on this sampler's number of ranks.

        Raises, with nothing changed, TypeError or ValueError for a state that is none, or of another seed or rule.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the state is {state_dict!r} on rank {self.rank}, expected a dict of state_dict()")
        mine = {"epoch": 0, "position": 0, "seed": self.seed, "remainder": self.remainder}
        if state_dict.keys() != mine.keys():
            raise ValueError(f"the state has {list(state_dict)} on rank {self.rank}, expected {list(mine)}")
        for name in ("seed", "remainder"):
            if state_dict[name] != mine[name]:
                raise ValueError(
                    f"the state's {name!r} is {state_dict[name]!r} and this sampler's is {mine[name]!r} on rank "
                    f"{self.rank}; resume with the options that the state was saved with"
                )
        epoch, position = operator.index(state_dict["epoch"]), operator.index(state_dict["position"])
        check_seed(self.seed, epoch)
        if position < 0:
            raise ValueError(f"the state's 'position' is {position} on rank {self.rank}, expected at least 0")
        self._epochs.resume(epoch, position)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "sampler" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.sampler, name)


def is_dealt_out(sampler: object) -> bool:
    """Tell whether a sampler, or the one that it makes batches of, yields one rank's share already."""
    return any(isinstance(one, torch_distributed.DistributedSampler) for one in _chain(sampler))


def _chain(sampler: object) -> Iterator[object]:
    """Yield a sampler, the sampler that it is made on, and so on."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        inner = vars(sampler).get("sampler") if hasattr(sampler, "__dict__") else None
        sampler = inner


def _generators(sampler: object) -> list[torch.Generator]:
    found = (getattr(one, "generator", None) for one in _chain(sampler))
    return [one for one in found if isinstance(one, torch.Generator)]

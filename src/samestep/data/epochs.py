"""Counts epochs: by themselves, or as the caller says; and how far the one that was begun last has come."""

import operator
from dataclasses import dataclass

from samestep.data.place import check_seed

__all__ = ["CountsEpochs", "Epochs", "Progress"]


@dataclass
class Progress:
    """How far the epoch that was begun last has come."""

    epoch: int
    start: int
    yielded: int = 0
    exhausted: bool = False
    iterating: bool = True


class Epochs:
    """Which epoch comes next and where in its order it starts; `progress` is of the one begun last, if any."""

    def __init__(self) -> None:
        self.next_epoch, self.next_start = 0, 0
        self.was_set = False
        self.progress: Progress | None = None

    def set(self, epoch: int) -> None:
        """Use this epoch from now on; the one that was to be resumed keeps its start."""
        if epoch != self.next_epoch:
            self.next_start = 0
        self.next_epoch, self.was_set, self.progress = epoch, True, None

    def resume(self, epoch: int, start: int) -> None:
        """Let this epoch come next, from `start` on."""
        self.next_epoch, self.next_start, self.progress = epoch, start, None

    def begin(self) -> Progress:
        """Begin the next epoch; after it comes another one, unless epochs are the caller's to set."""
        self.progress = progress = Progress(self.next_epoch, self.next_start)
        self.next_start = 0
        if not self.was_set:
            self.next_epoch += 1
        return progress


class CountsEpochs:
    """What a sampler that counts epochs shows of it; it has a `seed`, to which the epoch is added."""

    seed: int
    _epochs: Epochs

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will use; assigning it is calling `set_epoch`."""
        return self._epochs.next_epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch for every iteration that begins from now on, until the next call.

        After `load_state_dict`, naming the epoch of the state keeps its position, and another epoch is begun
        from its start. Raises TypeError or ValueError, with nothing changed, for an epoch that is no integer
        or, added to the seed, no 64-bit one.
        """
        epoch = operator.index(epoch)
        check_seed(self.seed, epoch)
        self._epochs.set(epoch)

"""Which samples of an epoch's order each rank gets: arithmetic alone, for any length and any number of ranks.

An epoch has an *order*: the samples 0 to length-1, shuffled or not. Ranks take turns along it, as in torch's
DistributedSampler: position p of the order belongs to rank p % ranks. What happens at the end, where the ranks
do not divide the length, is the *remainder* rule:

- "pad": the order goes round once more, until every rank has as many samples as the others (some samples come twice);
- "drop": the last few samples are left out, so that every rank has as many samples as the others;
- "keep": each sample comes exactly once; ranks differ by one sample at most, and a rank may get none.

A deal may start at any position of the order. Then the rest of the order is dealt anew over the ranks of now,
by the same rule, and padding still goes round to the order's beginning: on an unchanged number of ranks this is
just what an uninterrupted epoch would have done.
"""

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Deal", "Remainder"]

Remainder = Literal["pad", "drop", "keep"]


@dataclass(frozen=True)
class Deal:
    """One rank's share of one epoch.

    length: samples in the data set. ranks, rank: how many share the order, and who asks. remainder: the rule at
    the end. start: position of the order from which on it is dealt (positions before it were consumed earlier).

    Raises ValueError when a number is out of its range or the rule is unknown.
    """

    length: int
    ranks: int
    rank: int
    remainder: Remainder = "pad"
    start: int = 0

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length is {self.length} on rank {self.rank}, expected at least 0")
        if self.ranks < 1:
            raise ValueError(f"Invalid num_replicas {self.ranks} on rank {self.rank}, expected at least 1")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"Invalid rank {self.rank}, rank should be in the interval [0, {self.ranks - 1}]")
        if self.remainder not in get_args(Remainder):
            raise ValueError(
                f"remainder is {self.remainder!r} on rank {self.rank}, expected one of {get_args(Remainder)}"
            )
        if not 0 <= self.start <= self.length:
            raise ValueError(f"start is {self.start} on rank {self.rank}, expected 0 to {self.length}")

    @property
    def total(self) -> int:
        """Samples that all ranks together get, those that padding repeats included."""
        rest = self.length - self.start
        if self.remainder == "keep":
            return rest
        even = rest // self.ranks * self.ranks
        return even if self.remainder == "drop" or even == rest else even + self.ranks

    @property
    def count(self) -> int:
        """Samples that this rank gets."""
        return len(range(self.rank, self.total, self.ranks))

    def index(self, turn: int) -> int:
        """Return where in the order this rank's sample number `turn` stands; IndexError outside 0 to count-1."""
        if not 0 <= turn < self.count:
            raise IndexError(f"sample {turn} of {self.count} on rank {self.rank}")
        return (self.start + self.rank + turn * self.ranks) % self.length

    def slices(self) -> tuple[slice, ...]:
        """Return this rank's share as slices of the order, to be taken one after the other.

        There is a second one when padding gave this rank a sample: fewer than `ranks` positions are padded, so
        that is one sample at most.
        """
        end = self.start + self.total
        main = slice(self.start + self.rank, min(end, self.length), self.ranks)
        if end - self.ranks + self.rank < self.length or not self.count:
            return (main,)
        padded = self.index(self.count - 1)
        return (main, slice(padded, padded + 1, 1))

    def consumed(self, turns: int) -> int:
        """Return the position of the order that is reached when every rank has taken `turns` samples of its share.

        A rank whose share is shorter has then taken all of it. The result is at most start + total.
        """
        return self.start + min(turns * self.ranks, self.total)

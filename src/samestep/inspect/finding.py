"""One thing that is wrong with a program, and everything that was seen of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from samestep.inspect.comparison import Comparison
from samestep.inspect.observation import Observation

__all__ = ["Finding", "Seen", "listed", "on_ranks"]

_SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """kind: a short name that stays. what: one line. seen: where and by how much. advice: what to do."""

    kind: str
    what: str
    seen: str
    advice: str


@dataclass(frozen=True)
class Seen:
    """The ranks of the run on several, and for each step its comparison with the run on one.

    why_not: the reason if there are no comparisons.
    """

    ranks: Sequence[Observation]
    comparisons: Sequence[Comparison] = field(default_factory=list)
    why_not: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def num_steps(self) -> int:
        """Steps that every rank took, of all optimizers."""
        return min(len(one.steps) for one in self.ranks)

    @property
    def has_trained(self) -> bool:
        """Whether some rank took a step."""
        return any(one.steps for one in self.ranks)

    @property
    def has_failed(self) -> bool:
        """Whether some rank ended with an error."""
        return any(one.error for one in self.ranks)


def listed(names: Sequence[str]) -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def on_ranks(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"

"""Where an epoch stands, as plain numbers that can be saved and read back with suspicion."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from samestep.data.sharding import Remainder

__all__ = ["EpochState"]


@dataclass(frozen=True)
class EpochState:
    """A position in an epoch's order, and what the order depends on.

    epoch, position: the epoch, and how many samples of its order all ranks together have consumed. seed,
    length, shuffle, remainder: the sampler's options, which must be the same where the state is loaded.
    """

    epoch: int
    position: int
    seed: int
    length: int
    shuffle: bool
    remainder: Remainder

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a new dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], rank: int) -> "EpochState":
        """Return the state that such a dict describes; `rank` is for the messages.

        Raises TypeError when it is no mapping, and ValueError that names the key when one is missing, unknown
        or has a value that `to_dict` never gives.
        """
        where = f"on rank {rank}"
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is {state!r} {where}, expected a dict of a sampler's state_dict()")
        names = [field.name for field in fields(cls)]
        for name in names:
            if name not in state:
                raise ValueError(f"the state has no {name!r} {where}; expected {names}, got {list(state)}")
        for name in state:
            if name not in names:
                raise ValueError(f"the state has an unknown key {name!r} {where}; expected {names}")
        for name in names:
            kind = {"shuffle": bool, "remainder": str}.get(name, int)
            # Exactly that type: True is an int for isinstance.
            if type(state[name]) is not kind:
                raise ValueError(f"the state's {name!r} is {state[name]!r} {where}, expected {kind.__name__}")
        if state["remainder"] not in get_args(Remainder):
            raise ValueError(
                f"the state's 'remainder' is {state['remainder']!r} {where}, expected one of {get_args(Remainder)}"
            )
        if state["length"] < 0:
            raise ValueError(f"the state's 'length' is {state['length']} {where}, expected at least 0")
        last = max(state["length"] - 1, 0)
        if not 0 <= state["position"] <= last:
            raise ValueError(f"the state's 'position' is {state['position']} {where}, expected 0 to {last}")
        return cls(**{name: state[name] for name in names})

    def check_fits(self, mine: "EpochState", rank: int) -> None:
        """Raise ValueError, with both values, when this state is of another order than `mine`."""
        for name in ("length", "seed", "shuffle", "remainder"):
            theirs, ours = getattr(self, name), getattr(mine, name)
            if theirs != ours:
                raise ValueError(
                    f"the state's {name!r} is {theirs!r} and this sampler's is {ours!r} on rank {rank}; resume "
                    "with the data set and the options that the state was saved with"
                )

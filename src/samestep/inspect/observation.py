"""What was seen of one rank of a program under `samestep check`, as plain values that travel as JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Clip", "Iteration", "Loader", "Observation", "Step", "from_json", "to_json"]


@dataclass
class Step:
    """One call of an optimizer's `step`, in the order of calls.

    optimizer: its number, by its first step. names, weights, gradients: of each of its parameters the name, a digest of
    its value before the step and one of its gradient (empty: it has none). is_orphan: none of its parameters has a
    gradient, while a model has gradients that no optimizer knows of. draws: random numbers were drawn since the batch
    came. norms: names of the model's BatchNorm layers that use their own batch's statistics.
    """

    optimizer: int
    names: list[str]
    weights: list[str]
    gradients: list[str]
    is_orphan: bool = False
    draws: bool = False
    norms: list[str] = field(default_factory=list)


@dataclass
class Clip:
    """One call of torch's clip_grad_norm_ or clip_grad_value_: before which step it was, the gradients that it got."""

    step: int
    gradients: list[str]


@dataclass
class Iteration:
    """One pass over a loader.

    indices: the samples of the whole pass, also of batches that the program was spared; None where they have no
    numbers. complete: all of them are there. trains: there was a backward on its batches. evaluates: a model was in
    evaluation mode, or gradients were off. digests: of samples without numbers, the first ones.
    """

    indices: list[int] | None
    complete: bool = True
    trains: bool = False
    evaluates: bool = False
    digests: list[str] = field(default_factory=list)


@dataclass
class Loader:
    """A DataLoader, by the order in which the program made them.

    length: of its data set, if it has one. batch_size: 0 where it has none. sampler: the name of its sampler's class.
    dealer: the number of its sampler, if that deals out to ranks; replicas, rank, shuffles: what it says of itself.
    probe: digests of some of its samples, to tell whether ranks have the same data.
    """

    length: int | None
    batch_size: int
    sampler: str
    dealer: int | None = None
    replicas: int | None = None
    rank: int | None = None
    shuffles: bool = False
    probe: list[str] = field(default_factory=list)
    passes: list[Iteration] = field(default_factory=list)


@dataclass
class Observation:
    """One rank. error: the traceback of what ended it. writes: paths of files that it made anew, by name.

    halves: it computed in half precision under autocast. incomparable: why its batches could not be put together.
    """

    rank: int
    size: int
    error: str = ""
    steps: list[Step] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    halves: bool = False
    incomparable: str = ""


def to_json(seen: Observation) -> str:
    return json.dumps(asdict(seen))


def from_json(text: str) -> Observation:
    """Return what `to_json` was given."""
    plain: dict[str, Any] = json.loads(text)
    loaders = [
        Loader(**{**one, "passes": [Iteration(**each) for each in one["passes"]]}) for one in plain.pop("loaders")
    ]
    steps, clips = [Step(**one) for one in plain.pop("steps")], [Clip(**one) for one in plain.pop("clips")]
    return Observation(**plain, loaders=loaders, steps=steps, clips=clips)

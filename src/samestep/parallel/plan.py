"""Which gradients travel together: parameters into buckets. Pure: it decides from descriptions and touches no tensor.

All ranks must arrive at the same plan, so a plan is a frozen value that can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BucketPlan", "Parameter", "Plan", "complete_order", "make_plan"]


@dataclass(frozen=True)
class Parameter:
    """What a plan needs to know of one parameter. `index` is its place among the module's trainable parameters."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    itemsize: int
    sparse: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class BucketPlan:
    """Parameters whose gradients travel as one flat tensor: `indices[k]`'s begins at element `offsets[k]`.

    A sparse bucket, or a whole one, holds one parameter and has no flat tensor: a whole gradient is exchanged where
    autograd put it.
    """

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str
    device: str
    sparse: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Plan:
    """All buckets, in the order in which their exchanges start."""

    buckets: tuple[BucketPlan, ...]

    def __str__(self) -> str:
        lines = [
            f"bucket {number}: {len(b.indices)} parameters, {b.numel} x {b.dtype} on {b.device}"
            + (", sparse" if b.sparse else "")
            + (", whole" if b.whole else "")
            for number, b in enumerate(self.buckets)
        ]
        return "\n".join(lines)


def make_plan(
    parameters: Sequence[Parameter],
    order: Iterable[int],
    caps_bytes: Sequence[int],
    late: Collection[int] = (),
    absent: Collection[int] = (),
    *,
    whole_bytes: int | None = None,
) -> Plan:
    """Fill buckets with `parameters` in `order` (indices, each once), one open bucket for each dtype and device.

    A bucket is closed once it holds at least its cap. The caps, in bytes, are those of the first, second, ... bucket of
    a kind (dtype and device); the last one serves all further ones. A bucket's exchange can start when its last
    parameter has its gradient, so buckets are put in the order of their last parameters. Sparse ones get one each, and
    so do those of `whole_bytes` or more. Those in `late` come after all others, each kind in one bucket of any size;
    those in `absent` don't come at all.

    The rule (a small first bucket so that the first exchange starts early; caps; one kind a bucket) is that of
    `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    order = list(order)
    if sorted(order) != list(range(len(parameters))):
        raise ValueError(f"expected each of the {len(parameters)} parameters' indices once, got the order {order}")
    if not caps_bytes or min(caps_bytes) < 0:
        raise ValueError(f"expected at least one bucket cap, none negative, got {list(caps_bytes)} bytes")
    order = [index for index in order if index not in absent]
    place = {index: position for position, index in enumerate(order)}
    open_buckets: dict[tuple[str, str], list[Parameter]] = {}
    held: dict[tuple[str, str], int] = {}
    closed: dict[tuple[str, str], int] = {}
    groups: list[list[Parameter]] = []
    whole = {p.index for p in parameters if p.index not in late and _is_whole(p, whole_bytes)}
    for index in order:
        parameter = parameters[index]
        if index in late:
            continue
        if parameter.sparse or index in whole:
            groups.append([parameter])
            continue
        kind = (parameter.dtype, parameter.device)
        open_buckets.setdefault(kind, []).append(parameter)
        held[kind] = held.get(kind, 0) + parameter.numel * parameter.itemsize
        if held[kind] >= caps_bytes[min(closed.get(kind, 0), len(caps_bytes) - 1)]:
            groups.append(open_buckets.pop(kind))
            closed[kind] = closed.get(kind, 0) + 1
            held[kind] = 0
    groups.extend(open_buckets.values())
    groups.sort(key=lambda group: place[group[-1].index])
    groups.extend(_one_of_each_kind([parameters[index] for index in order if index in late]))
    return Plan(tuple(_bucket(group, whole=group[0].index in whole) for group in groups))


def complete_order(arrivals: Iterable[int], count: int) -> list[int]:
    """Return the order in which gradients arrived, first arrivals only, and after it the indices that did not.

    Those that did not arrive come last first, as backward usually goes.
    """
    seen = dict.fromkeys(arrivals)
    return [*seen, *(index for index in reversed(range(count)) if index not in seen)]


def _one_of_each_kind(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    kinds: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        kind = parameter.index if parameter.sparse else (parameter.dtype, parameter.device)
        kinds.setdefault(kind, []).append(parameter)
    return list(kinds.values())


def _is_whole(parameter: Parameter, whole_bytes: int | None) -> bool:
    return whole_bytes is not None and not parameter.sparse and parameter.numel * parameter.itemsize >= whole_bytes


def _bucket(group: list[Parameter], *, whole: bool) -> BucketPlan:
    offsets, end = [], 0
    for parameter in group:
        offsets.append(end)
        end += parameter.numel
    first = group[0]
    indices = tuple(p.index for p in group)
    return BucketPlan(indices, tuple(offsets), end, first.dtype, first.device, sparse=first.sparse, whole=whole)

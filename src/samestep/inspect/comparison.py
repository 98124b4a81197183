"""Gradients of several ranks beside those of a single rank that had the same samples: by how much they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Comparison", "Difference", "compare"]

# Sums over a batch that is cut otherwise round otherwise: 1e-6 in float32, and more where terms cancel out. The
# mistakes that this is to find make differences of a tenth and more.
_RELATIVE, _RELATIVE_HALVES = 1e-2, 1e-1
# Of all gradients together: what is noise where a gradient ought to be nothing, as of a bias before a BatchNorm.
_FLOOR, _FLOOR_HALVES = 1e-4, 1e-2
_SAME_FACTOR = 0.02


@dataclass(frozen=True)
class Difference:
    """One parameter: the norm of the difference, and that of the larger gradient."""

    name: str
    difference: float
    norm: float
    agrees: bool
    is_noise: bool = False  # it agrees as it is next to nothing beside the others

    @property
    def relative(self) -> float:
        return self.difference / self.norm if self.norm else 0.0


@dataclass(frozen=True)
class Comparison:
    """One step. factor: by which all gradients of several ranks are those of one, where such a number explains them.

    missing: names of parameters that have a gradient in one of the two only.
    """

    differences: list[Difference] = field(default_factory=list)
    factor: float | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not self.missing and all(one.agrees for one in self.differences)


def compare(parts: Mapping[str, Tensor], whole: Mapping[str, Tensor], *, halves: bool = False) -> Comparison:
    """Compare gradients by name; `halves` if half precision took part in them."""
    halves = halves or any(one.dtype in (torch.float16, torch.bfloat16) for one in whole.values())
    pairs = {
        name: (parts[name].double().flatten(), whole[name].double().flatten())
        for name in whole
        if name in parts and parts[name].shape == whole[name].shape
    }
    missing = sorted(parts.keys() ^ whole.keys() | ((parts.keys() & whole.keys()) - pairs.keys()))
    differences = _differences(pairs, 1.0, halves)
    factor = None
    if not all(one.agrees for one in differences):
        inner = sum(float(a @ b) for a, b in pairs.values())
        square = sum(float(b @ b) for _, b in pairs.values())
        guess = inner / square if square else 0.0
        if (
            abs(guess - 1) > _SAME_FACTOR
            and guess > 0
            and all(one.agrees for one in _differences(pairs, guess, halves))
        ):
            factor = guess
    return Comparison(differences, factor, missing)


def _differences(pairs: Mapping[str, tuple[Tensor, Tensor]], factor: float, halves: bool) -> list[Difference]:
    relative, floor = (_RELATIVE_HALVES, _FLOOR_HALVES) if halves else (_RELATIVE, _FLOOR)
    total = max(
        sum(float(part @ part) for part, _ in pairs.values()) ** 0.5,
        sum(float(whole @ whole) for _, whole in pairs.values()) ** 0.5 * factor,
    )
    found = []
    for name, (part, whole) in pairs.items():
        difference = float((part - factor * whole).norm())
        norm = max(float(part.norm()), factor * float(whole.norm()))
        is_close, is_noise = difference <= relative * norm, difference <= floor * total
        found.append(Difference(name, difference, norm, is_close or is_noise, is_noise and not is_close))
    return found

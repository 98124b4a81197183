"""Lets code that draws random numbers draw the same ones on every rank, without a word between ranks."""

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

import numpy
import torch

__all__ = ["SameDraws", "drawn"]

T = TypeVar("T")


class SameDraws:
    """Within it, the generators of torch's CPU, Python's `random` and numpy go on from where it was left last.

    They begin seeded with `seed`, and so do `generators`, a caller's own of torch. Outside, all are as if nothing had
    been drawn. What draws from anything else (the system, numpy's default_rng without a seed) still draws as it will.
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self._seed = seed
        self._generators = (torch.default_generator, *generators)
        self._inside: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outside = self._take()
        if self._inside is not None:
            self._put(self._inside)
            return
        for generator in self._generators:
            generator.manual_seed(self._seed)
        random.seed(self._seed)
        numpy.random.seed(self._seed % 2**32)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = self._take()
        self._put(self._outside)

    def _take(self) -> tuple[Any, ...]:
        of_torch = [generator.get_state() for generator in self._generators]
        return of_torch, random.getstate(), numpy.random.get_state()

    def _put(self, states: tuple[Any, ...]) -> None:
        of_torch, of_python, of_numpy = states
        for generator, state in zip(self._generators, of_torch, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def drawn(order: Iterable[T], draws: SameDraws, at_once: int = 1) -> Iterator[T]:
    """Yield what `order` yields, with its random numbers from `draws`; `at_once` items are taken ahead."""
    with draws:
        iterator = iter(order)
    while True:
        with draws:
            items = list(islice(iterator, at_once))
        yield from items
        if len(items) < at_once:
            return

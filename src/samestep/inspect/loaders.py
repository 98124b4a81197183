"""torch's DataLoader in a checked program: every pass is short, and what it would have yielded is noted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from samestep.data.same_draws import SameDraws
from samestep.inspect.digests import sample_digest
from samestep.inspect.merging import merged
from samestep.inspect.observation import Iteration, Loader
from samestep.inspect.recorder import Recorder

__all__ = ["watch_loaders"]

_MOST_SAMPLES = 2_000_000  # of a pass whose numbers are noted; endless samplers have more
_PROBES = 8
# Passes that are as long as the steps to be looked at; later ones are one step long.
_LONG_PASSES = 2
# Batches for one step at most, where gradients accumulate.
_MOST_BATCHES = 64


def watch_loaders(recorder: Recorder) -> None:
    """Change torch's DataLoader, for the rest of this process: batches are made in it, and passes are short."""
    loaders = _Loaders(recorder)
    make = DataLoader.__init__

    def make_and_note(loader: Any, *args: Any, **options: Any) -> None:
        make(loader, *args, **options)
        loaders.add(loader)

    DataLoader.__init__ = make_and_note  # type: ignore[method-assign, assignment]
    DataLoader.__iter__ = lambda loader: loaders.iterate(loader)  # type: ignore[method-assign, assignment, return-value]


class _Loaders:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[int, int] = {}  # by the loader's id; each is kept alive in `_all`
        self._all: list[Any] = []
        self._dealers: dict[int, int] = {}  # by the sampler's id, as the loaders that have them

    def add(self, loader: Any) -> None:
        self._numbers[id(loader)] = len(self._all)
        self._all.append(loader)
        sampler = _sampler(loader)
        seen = Loader(
            _length(loader.dataset),
            loader.batch_size or getattr(sampler, "batch_size", None) or 0,
            type(sampler).__name__,
            shuffles=isinstance(sampler, RandomSampler | SubsetRandomSampler),
        )
        dealer = next((one for one in (sampler, getattr(sampler, "sampler", None)) if _deals_out(one)), None)
        if dealer is not None:
            seen.sampler = type(dealer).__name__
            seen.dealer = self._dealers.setdefault(id(dealer), len(self._dealers))
            seen.replicas, seen.rank = dealer.num_replicas, dealer.rank
            seen.shuffles = bool(getattr(dealer, "shuffle", False))
        self._recorder.seen.loaders.append(seen)

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Begin a pass at once, as the program expects of iter(), and return its batches."""
        number = self._numbers[id(loader)]
        seen = self._recorder.seen.loaders[number]
        if isinstance(loader.dataset, IterableDataset):
            note = Iteration(None)
            batches = _of_stream(loader)
        else:
            if not seen.passes:
                seen.probe = _probe(loader.dataset)
            numbers, complete = _drained(loader)
            note = Iteration(_flat(numbers), complete)
            batches = _of_numbers(loader, numbers)
        seen.passes.append(note)
        return self._cut(loader, batches, note, number, len(seen.passes) - 1)

    def _cut(self, loader: Any, batches: Iterator[Any], note: Iteration, number: int, at: int) -> Iterator[Any]:
        """Yield as few batches as will do, and note whether the program trains on them."""
        recorder = self._recorder
        steps = recorder.num_steps
        wanted = recorder.steps if at < _LONG_PASSES else 1
        recorder.pass_begins()
        for count, samples in enumerate(batches):
            name = f"batch-{number}-{at}-{count}"
            if recorder.mode == "whole":
                batch = self._together(loader, name, samples)
            else:
                if recorder.is_looking:
                    recorder.keep_batch(f"{name}-{recorder.seen.rank}", samples)
                batch = _collated(loader, samples)
            if note.indices is None and recorder.is_looking:
                note.digests += map(sample_digest, samples if _is_collated(loader) else [samples])
            recorder.batch_comes(note)
            yield batch
            recorder.batch_is_done()
            done = recorder.num_steps - steps if note.trains else count + 1
            if done >= wanted or count + 1 >= wanted * _MOST_BATCHES:
                return

    def _together(self, loader: Any, name: str, own: Any) -> Any:
        """The batch of all samples that ranks had here, as far as they were noted, else the loader's own."""
        recorder = self._recorder
        ranks = sorted(int(path.stem.rpartition("-")[2]) for path in recorder.folder.glob(f"{name}-*.pt"))
        parts = [recorder.kept(f"{name}-{rank}") for rank in ranks] or [own]
        if _is_collated(loader):
            return _collated(loader, [sample for part in parts for sample in part])
        try:
            return _collated(loader, merged(parts))
        except ValueError as error:
            recorder.seen.incomparable = str(error)
            return _collated(loader, parts[0])


def _of_numbers(loader: Any, numbers: list[Any]) -> Iterator[Any]:
    """Yield lists of samples, one for each batch; single samples where the loader makes no batches."""
    several = getattr(loader.dataset, "__getitems__", None)
    for number in numbers:
        if not _is_collated(loader):
            yield loader.dataset[number]
        else:
            yield several(number) if several else [loader.dataset[one] for one in number]


def _of_stream(loader: Any) -> Iterator[Any]:
    """Yield lists of samples, one for each batch; what comes where the loader makes no batches."""
    samples = iter(loader.dataset)
    if not _is_collated(loader):
        yield from samples
        return
    while batch := list(islice(samples, loader.batch_size)):
        if len(batch) < loader.batch_size and loader.drop_last:
            return
        yield batch


def _is_collated(loader: Any) -> bool:
    return bool(loader._auto_collation)


def _collated(loader: Any, samples: Any) -> Any:
    return loader.collate_fn(samples)


def _drained(loader: Any) -> tuple[list[Any], bool]:
    """Take a whole pass of sample numbers, or batches of them, from the loader's sampler."""
    found: list[Any] = []
    left = _MOST_SAMPLES
    for one in loader._index_sampler:
        found.append(one)
        left -= len(one) if isinstance(one, list | tuple) else 1
        if left <= 0:
            return found, False
    return found, True


def _flat(numbers: list[Any]) -> list[int] | None:
    flat = [number for one in numbers for number in (one if isinstance(one, list | tuple) else (one,))]
    return [int(number) for number in flat] if all(isinstance(number, int) for number in flat) else None


def _sampler(loader: Any) -> Any:
    """What the program gave the loader, or the loader made: torch puts a sampler beside a batch sampler, unused."""
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    return loader.batch_sampler if own_batches else loader.sampler


def _deals_out(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _probe(dataset: Any) -> list[str]:
    """Marks of a few samples all over the data set; nothing where they can't be had."""
    length = _length(dataset)
    if not length:
        return []
    found = []
    try:
        for number in sorted({length * n // _PROBES for n in range(_PROBES)} | {length - 1}):
            with SameDraws(number):
                found.append(sample_digest(dataset[number]))
    except Exception:  # noqa: BLE001 - the program's own affair; it would meet the same by itself
        return []
    return found if all(found) else []

"""Which samples ranks had: twice or not at all, always in the same order, padded where they are counted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from samestep.inspect.finding import Finding, Seen, on_ranks
from samestep.inspect.observation import Iteration, Loader

__all__ = ["evaluation_padded", "order_repeats", "samples_shared"]

_ENOUGH = 4  # samples in an order of which one can say that it came again by no accident


def samples_shared(seen: Seen) -> Finding | None:
    """Samples that several ranks train on in the same epoch, or none does."""
    streams = _streams_shared(seen)
    if streams is not None:
        return streams
    for loaders, passes in _passes(seen, trains=True):
        first = loaders[0]
        if not _same_data(loaders):
            continue
        shares = [one.indices or [] for one in passes]
        length, total = first.length or 0, sum(map(len, shares))
        if all(share == shares[0] for share in shares) and shares[0]:
            return _identical(loaders, shares[0])
        if any(_has_repeats(share, seen.size) for share in shares) or not all(one.complete for one in passes):
            continue  # drawn with replacement, or without an end: what comes twice may be meant so
        several = Counter(sample for share in shares for sample in set(share))
        twice, unseen = total - len(several), length - len(several)
        if twice > seen.size * max(1, first.batch_size):
            return Finding(
                "samples",
                "Ranks train on the same samples.",
                f"In an epoch of {length} samples {twice} are drawn more than once ({first.sampler} on every rank), "
                f"and {unseen} never.",
                f"{_why(loaders)}Give the loader sampler=DistributedSampler(dataset), for other samplers "
                "samestep.ShardedSampler(sampler), with the same seed and epoch on all ranks.",
            )
        if first.replicas is not None and first.replicas > seen.size and unseen > first.replicas:
            return Finding(
                "samples",
                "Samples are left out.",
                f"{unseen} of {length} samples come to no rank: the sampler deals out to {first.replicas} ranks, and "
                f"there are {seen.size}.",
                "Leave num_replicas and rank out; the sampler finds them by itself.",
            )
    return None


def _streams_shared(seen: Seen) -> Finding | None:
    """The same samples of a stream on several ranks."""
    for number, loaders in enumerate(zip(*(rank.loaders for rank in seen.ranks), strict=False)):
        firsts = [set(one.passes[0].digests) - {""} for one in loaders if one.passes and one.passes[0].trains]
        if len(firsts) < seen.size or min(map(len, firsts)) < _ENOUGH:
            continue
        shared = set.intersection(*firsts)
        if 2 * len(shared) >= max(map(len, firsts)):
            return Finding(
                "samples",
                "Ranks train on the same samples of a stream.",
                f"Of the first {len(loaders[0].passes[0].digests)} samples of loader {number} that each rank had, "
                f"{len(shared)} were the same on all.",
                "Give the loader samestep.ShardedIterable(dataset), or deal the stream out by rank in its __iter__.",
            )
    return None


def order_repeats(seen: Seen) -> Finding | None:
    """Epochs that shuffle, and all in the same order."""
    orders: dict[int, list[list[int]]] = {}
    for loader in seen.ranks[0].loaders:
        if loader.shuffles and loader.dealer is not None:
            passes = [one.indices for one in loader.passes if one.trains and one.indices is not None]
            orders.setdefault(loader.dealer, []).extend(passes)
    for earlier, later in (pair for of_one in orders.values() for pair in pairwise(of_one)):
        if earlier == later and len(set(earlier)) >= _ENOUGH:
            return Finding(
                "epoch",
                "Every epoch has the same order: set_epoch has no effect.",
                f"A sampler that shuffles gave rank 0 {len(later)} samples in the same order twice.",
                "Call sampler.set_epoch(epoch) before each epoch's loop, on the sampler that the loader has; or use "
                "samestep.DistributedSampler, whose epochs count themselves.",
            )
    return None


def evaluation_padded(seen: Seen) -> Finding | None:
    """An evaluation over ranks that counts some samples twice, to make ranks even."""
    for loaders, passes in _passes(seen, trains=False):
        if not all(one.evaluates for one in passes) or any(one.trains for loader in loaders for one in loader.passes):
            continue
        shares = [one.indices or [] for one in passes]
        if not _same_data(loaders) or all(share == shares[0] for share in shares):
            continue  # every rank evaluates everything, which counts nothing twice on any
        if loaders[0].replicas is None or not all(one.complete for one in passes):
            continue
        counts = Counter(sample for share in shares for sample in share)
        twice = sum(counts.values()) - len(counts)
        if 0 < twice < seen.size and len(counts) == loaders[0].length:
            return Finding(
                "evaluation",
                "Evaluation counts samples twice.",
                f"{len(counts)} samples are counted as {sum(counts.values())}: {loaders[0].sampler} pads, so that "
                f"{seen.size} ranks have as many.",
                'Use samestep.DistributedSampler(test, shuffle=False, remainder="keep") and '
                "samestep.all_gather_uneven, or cut the padding off before you count.",
            )
    return None


def _passes(seen: Seen, *, trains: bool) -> Iterator[tuple[list[Loader], list[Iteration]]]:
    """Yield each pass with numbered samples that all ranks made over a loader, with the ranks' loaders."""
    for loaders in zip(*(rank.loaders for rank in seen.ranks), strict=False):
        for passes in zip(*(loader.passes for loader in loaders), strict=False):
            if all(one.trains is trains and one.indices is not None for one in passes):
                yield list(loaders), list(passes)


def _same_data(loaders: Sequence[Loader]) -> bool:
    """Whether all ranks' loaders have the same data set, as far as samples can be told apart."""
    first = loaders[0]
    distinct = len(set(first.probe)) > 1
    return distinct and all((one.length, one.probe) == (first.length, first.probe) for one in loaders)


def _has_repeats(share: Sequence[int], ranks: int) -> bool:
    return len(share) - len(set(share)) >= max(ranks, 2)


def _identical(loaders: Sequence[Loader], share: Sequence[int]) -> Finding:
    first, ranks = loaders[0], list(range(len(loaders)))
    unseen = (first.length or 0) - len(set(share))
    return Finding(
        "samples",
        "All ranks train on the same samples.",
        f"{on_ranks(ranks).capitalize()} drew the same {len(share)} samples in the same order ({first.sampler}), so "
        f"several learn no more than one; {unseen} of {first.length} samples come to none.",
        f"{_why(loaders)}Give the loader sampler=DistributedSampler(dataset), for other samplers "
        "samestep.ShardedSampler(sampler); leave num_replicas and rank out.",
    )


def _why(loaders: Sequence[Loader]) -> str:
    ranks = [one.rank for one in loaders]
    if None not in ranks and ranks != list(range(len(loaders))):
        return f"The samplers were told that they are {on_ranks([rank or 0 for rank in ranks])}. "
    return ""

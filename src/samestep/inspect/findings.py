"""From what was seen of a program to what is wrong with it, and what to do. Pure.

Silence is better than a false alarm: each finding rests on something that was seen to happen, and what a program may
well mean to do is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from samestep.inspect.comparison import Comparison
from samestep.inspect.finding import Finding, Seen, listed, on_ranks
from samestep.inspect.observation import Step
from samestep.inspect.samples import evaluation_padded, order_repeats, samples_shared

__all__ = ["findings"]

_SAME_RATIO = 0.02


def findings(seen: Seen) -> list[Finding]:
    """Return what is wrong, the gravest first."""
    found = [_first(seen, optimizer_of_others, replicas_differ, clipped_before_exchange, gradients_differ)]
    found += [samples_shared(seen), order_repeats(seen), evaluation_padded(seen), *written_by_all(seen)]
    return [one for one in found if one is not None]


def _first(seen: Seen, *looks: Callable[[Seen], Finding | None]) -> Finding | None:
    """What the first look finds that finds anything: what later ones would find may come of it."""
    return next((found for look in looks if (found := look(seen)) is not None), None)


def optimizer_of_others(seen: Seen) -> Finding | None:
    """An optimizer that moves parameters which no model has any more."""
    for rank in seen.ranks:
        for number, step in enumerate(rank.steps):
            if step.is_orphan:
                return Finding(
                    "optimizer",
                    "An optimizer doesn't hold the parameters that are trained.",
                    f"Step {number} on rank {rank.rank}: none of its {len(step.names)} parameters has a gradient, and "
                    "a model has gradients that no optimizer knows of.",
                    "Move, cast, convert or copy the model first, and build the optimizer from its parameters then.",
                )
    return None


def replicas_differ(seen: Seen) -> Finding | None:
    """Weights that are not the same on all ranks, or gradients that would make them so."""
    for number in range(seen.num_steps):
        steps = [rank.steps[number] for rank in seen.ranks]
        weights = _unlike(steps, lambda step: step.weights)
        gradients = _unlike(steps, lambda step: step.gradients)
        is_first = all(one.optimizer != steps[0].optimizer for one in seen.ranks[0].steps[:number])
        if weights and is_first:
            return Finding(
                "replicas",
                "Replicas begin different.",
                f"Before the first step {_where(weights)}.",
                "Seed all ranks alike before the model is built, load the same weights on all, or wrap the model in "
                "DistributedDataParallel, which sends rank 0's.",
            )
        if weights:
            return Finding(
                "replicas",
                "Replicas come apart.",
                f"Before step {number} {_where(weights)}, though gradients were the same.",
                "Let nothing but the optimizer change weights, with the same learning rate and state on every rank.",
            )
        if gradients:
            return Finding(
                "replicas",
                "Gradients are not exchanged, so replicas come apart.",
                f"At step {number} each rank has its own gradient: {_where(gradients)}.",
                "Call the wrapped model (not model.module), run backward outside no_sync(), and wrap all that is "
                "trained in DistributedDataParallel.",
            )
    return None


def clipped_before_exchange(seen: Seen) -> Finding | None:
    """Gradients that were clipped while they were each rank's own, and averaged later."""
    for clips in zip(*(rank.clips for rank in seen.ranks), strict=False):
        number = clips[0].step
        own = len({tuple(clip.gradients) for clip in clips}) > 1
        if not own or number >= seen.num_steps or len({clip.step for clip in clips}) > 1:
            continue
        if not _unlike([rank.steps[number] for rank in seen.ranks], lambda step: step.gradients):
            return Finding(
                "clipping",
                "Gradients are clipped before they are exchanged.",
                f"Before step {number} every rank clipped its own gradients; at the step they were the same on all.",
                "Clip after the exchange: after the backward that is outside no_sync(), or after your own all_reduce. "
                "What is clipped first is no longer the gradient of the loss.",
            )
    return None


def gradients_differ(seen: Seen) -> Finding | None:
    """Gradients of several ranks that are not those of one rank with the same samples."""
    for number, comparison in enumerate(seen.comparisons[: seen.num_steps]):
        steps = [rank.steps[number] for rank in seen.ranks]
        if comparison.agrees or any(step.draws for step in steps):
            continue
        if comparison.factor is not None:
            return _by_a_factor(seen.size, number, comparison)
        norms = list(dict.fromkeys(name for step in steps for name in step.norms))
        if norms:
            return Finding(
                "batchnorm",
                "BatchNorm takes each rank's own batch for its statistics.",
                f"Layers: {listed(norms)}. At step {number} {_differences(seen, comparison)}.",
                "Convert the model with SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped, or keep "
                "batches on each rank large and accept that results depend on the number of ranks.",
            )
        return Finding(
            "gradients",
            f"Gradients of {seen.size} ranks are not those of one rank with the same samples.",
            f"At step {number} {_differences(seen, comparison)}.",
            "Look for what depends on the batch as a whole: means of unequal shares (DistributedDataParallel's "
            "backward(loss, weight=n) counts them rightly), losses over pairs of samples, parameters left out.",
        )
    return None


def written_by_all(seen: Seen) -> list[Finding]:
    """Files that several ranks write under one name."""
    writers: dict[str, list[int]] = {}
    for rank in seen.ranks:
        for path in rank.writes:
            writers.setdefault(path, []).append(rank.rank)
    shared = {path: ranks for path, ranks in writers.items() if len(ranks) > 1}
    if not shared:
        return []
    by = next(iter(shared.values()))
    return [
        Finding(
            "files",
            "A file is written by several ranks at once.",
            f"{listed(list(shared))}: by {on_ranks(by)}. Whoever is last wins, and a reader may get half of one.",
            "Write on rank 0 alone, with a barrier before others read; or samestep.save(model, path) on all.",
        )
    ]


def _by_a_factor(size: int, number: int, comparison: Comparison) -> Finding:
    factor = comparison.factor or 1.0
    if abs(factor * size - 1) < _SAME_RATIO:
        return Finding(
            "scale",
            "The loss is a sum over samples where it should be a mean.",
            f"At step {number} every gradient is {1 / factor:.3g} times smaller on {size} ranks than on one with the "
            "same samples: ranks are averaged, but a sum grows with the batch.",
            f"Take the mean over the batch, or multiply the loss by the number of ranks ({size}).",
        )
    if abs(factor / size - 1) < _SAME_RATIO:
        return Finding(
            "scale",
            "Gradients are summed over ranks where they should be averaged.",
            f"At step {number} every gradient is {factor:.3g} times larger on {size} ranks than on one.",
            f"Divide by the number of ranks ({size}) after your all_reduce, or use DistributedDataParallel.",
        )
    return Finding(
        "scale",
        "Gradients depend on the number of ranks by a factor.",
        f"At step {number} every gradient on {size} ranks is {factor:.3g} times that on one with the same samples.",
        "Look for what divides or multiplies the loss by a batch size, a length or the number of ranks.",
    )


def _differences(seen: Seen, comparison: Comparison) -> str:
    worst = sorted((one for one in comparison.differences if not one.agrees), key=lambda one: -one.relative)
    said = [f"{one.name} by {one.relative:.0%}" for one in worst]
    said += [f"{name}, which has a gradient in one of the two only" for name in comparison.missing]
    count = len(comparison.differences) + len(comparison.missing)
    return f"{len(said)} of {count} gradients differ between {seen.size} ranks and one: {listed(said)}"


def _unlike(steps: Sequence[Step], marks: Callable[[Step], Sequence[str]]) -> dict[str, list[int]]:
    """The names whose marks are not the same on all ranks that have them, each with the ranks unlike rank 0."""
    tables = [dict(zip(step.names, marks(step), strict=True)) for step in steps]
    found: dict[str, list[int]] = {}
    for name, mark in tables[0].items():
        others = [rank for rank, table in enumerate(tables) if table.get(name, mark) != mark]
        if others:
            found[name] = others
    return found


def _where(unlike: dict[str, list[int]]) -> str:
    ranks = sorted({rank for others in unlike.values() for rank in others})
    return f"{listed(list(unlike))} on {on_ranks(ranks)} differ from rank 0's"

"""What a check has found, as text for one screen. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from samestep.inspect.comparison import Difference
from samestep.inspect.finding import Finding, Seen
from samestep.launch.told import Told

__all__ = ["report"]

_WIDTH = 100
_MOST_ERROR_LINES = 15
_MOST_PARAMETERS = 6


def report(program: str, seen: Seen, found: Sequence[Finding]) -> str:
    """Return what was looked at, what is wrong, and what to do."""
    lines = [f"samestep check: {program} on {seen.size} ranks, and on one with the same samples", ""]
    lines += _table(seen, found)
    failed = sorted((rank for rank in seen.ranks if rank.error), key=lambda rank: Told(rank.error, 0.0).is_consequence)
    for rank in failed[:1]:
        told = rank.error.strip().splitlines()
        lines += ["", f"FAILED on rank {rank.rank}:", *told[-_MOST_ERROR_LINES:]]
    for number, one in enumerate(found, 1):
        lines += ["", *_wrapped(f"{number}. {one.what}", "", "   "), *_wrapped(one.seen, "   ", "   ")]
        lines += _wrapped(f"-> {one.advice}", "   ", "      ")
    lines += ["", _verdict(seen, len(found))]
    return "\n".join(lines)


def _table(seen: Seen, found: Sequence[Finding]) -> list[str]:
    lines = [
        *_row("steps", f"{seen.num_steps} on every rank"),
        *_row("gradients", _gradients(seen)),
        *_parameters(seen),
    ]
    if seen.num_steps and not any(one.kind == "replicas" for one in found):
        lines += _row("replicas", "the same weights and the same gradients on all ranks at every step")
    loaders = seen.ranks[0].loaders
    trained = sum(any(one.trains for one in loader.passes) for loader in loaders)
    others = sum(bool(one.passes) for one in loaders) - trained
    return lines + _row("loaders", f"{trained} for training, {others} for others")


def _gradients(seen: Seen) -> str:
    if not seen.comparisons:
        return f"not compared: {seen.why_not}"
    if any(step.draws for rank in seen.ranks for step in rank.steps) and not _all_agree(seen):
        return "not compared: the program draws random numbers in its steps, besides dropout, which is off here"
    if _all_agree(seen):
        count = len({one.name for each in seen.comparisons for one in each.differences})
        return f"{count} agree between {seen.size} ranks and one; differences as parts of the gradient:"
    first = next(each for each in seen.comparisons if not each.agrees)
    wrong = sum(not one.agrees for one in first.differences) + len(first.missing)
    count = len(first.differences) + len(first.missing)
    return f"{wrong} of {count} differ between {seen.size} ranks and one; differences as parts of the gradient:"


def _parameters(seen: Seen) -> list[str]:
    """By how much gradients differ, of all steps the worst for each parameter, the worst parameters first."""
    worst: dict[str, Difference] = {}
    for one in (one for each in seen.comparisons for one in each.differences):
        if one.name not in worst or _badness(one) > _badness(worst[one.name]):
            worst[one.name] = one
    order = sorted(worst.values(), key=_badness, reverse=True)
    shown = [f"{one.relative:.0e}  {one.name}{_remark(one)}" for one in order[:_MOST_PARAMETERS]]
    more = [f"and {len(order) - len(shown)} more, less"] if len(order) > len(shown) else []
    return [f"{' ' * 15}{line}" for line in shown + more]


def _badness(one: Difference) -> tuple[bool, float]:
    return not one.agrees, -1.0 if one.is_noise else one.relative


def _remark(one: Difference) -> str:
    if not one.agrees:
        return "  differs"
    return "  (noise beside the other gradients)" if one.is_noise else ""


def _row(name: str, text: str) -> list[str]:
    return _wrapped(text, f"  {name:<11}", " " * 13)


def _all_agree(seen: Seen) -> bool:
    return all(each.agrees for each in seen.comparisons)


def _verdict(seen: Seen, count: int) -> str:
    if seen.has_failed:
        return f"The program failed on {seen.size} ranks; what it did until then was looked at."
    if not seen.has_trained:
        return "There was nothing to look at: no optimizer of torch's took a step in the processes that were started."
    if count:
        return f"{count} thing{'s' * (count != 1)} to put right."
    return "Nothing wrong was found."


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)

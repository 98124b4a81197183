"""Expand the two lists that Slurm writes in short form: host names and tasks per node.

The grammars are those of `scontrol show hostnames` and of SLURM_TASKS_PER_NODE (Slurm's src/common/hostlist.c
and src/common/env.c). Pure text: whoever knows which variable a text came from adds that to the error.
"""

import itertools
import math
import re

__all__ = ["expand_counts", "expand_hosts"]

# Slurm refuses longer ranges itself (MAX_RANGE in hostlist.c); a damaged text must not eat the memory.
_LIMIT = 64 * 1024

_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_NAME = re.compile(r"(?:\[[^\[\]]+\]|[^\[\]\s])+")
_PIECE = re.compile(r"\[([^\[\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the host names of a list such as `node[01-03,07],gpu1` or `r[1-2]n[01-02]`, in order.

    Zero padding is kept. Several brackets in one name vary like digits: the last one fastest.

    Raises:
        ValueError: the text is not such a list, or names more than 65536 hosts.
    """
    hosts: list[str] = []
    for name in _COMMA_OUTSIDE_BRACKETS.split(text):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a host name with closed, filled brackets")
        pieces = [_numbers(inside) if inside else [word] for inside, word in _PIECE.findall(name)]
        _check_length(len(hosts) + math.prod(map(len, pieces)), "hosts")
        hosts.extend(map("".join, itertools.product(*pieces)))
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `2(x3),1`: 2, 2, 2, 1.

    Raises:
        ValueError: the text is not such a list, or has more than 65536 numbers.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is neither a number nor a repeated one such as 2(x3)")
        times = int(match[2] or 1)
        _check_length(len(counts) + times, "nodes")
        counts.extend([int(match[1])] * times)
    return tuple(counts)


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is neither a number nor a range such as 01-03")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise ValueError(f"the range {item!r} runs backwards")
        _check_length(len(numbers) + high - low + 1, "hosts")
        numbers.extend(f"{number:0{len(match[1])}d}" for number in range(low, high + 1))
    return numbers


def _check_length(length: int, what: str) -> None:
    if length > _LIMIT:
        raise ValueError(f"it stands for {length} {what}, more than the {_LIMIT} that Slurm allows")

"""The order of additions that gives a sum over shards the same bits for every number of ranks.

The tree over shards 0 to S - 1 is the complete binary tree over the next power of two, with the leaves from S on
cut off. Its nodes are the shard ranges [i * 2**k, (i + 1) * 2**k) cut at S; a node whose right half is cut off
altogether is the same node as its left half. It is as shallow as a binary tree can be (ceil(log2 S) additions deep),
and it depends on S alone: ranks only decide where a node is computed, never what it adds.

Everything here is numbers and frozen values. `samestep.comm.interpreter` acts on them.

    plan = sum_plan(shards=8, ranks=3)      # rank 0 owns shards 0, 1, 2 and contributes [0, 2) and [2, 3)
    plan.local(0)                           # how rank 0 adds its shards as they arrive
    plan.pushes                             # how an owner of elements adds the partials of all ranks
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "Block",
    "Push",
    "SumPlan",
    "aligned_blocks",
    "element_range",
    "num_buffers",
    "owned",
    "pushes",
    "sum_plan",
    "volume",
]


@dataclass(frozen=True, order=True)
class Block:
    """The shards from `start` up to `stop`, exclusive: one node of the tree."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True)
class Push:
    """Put the partial of `block` on the stack of partials; then complete the nodes that it makes complete.

    Each of `completes`, smallest first, is completed by taking the top of the stack off and adding it into the partial
    below, which held the node's left half.
    """

    block: Block
    completes: tuple[Block, ...] = ()


@dataclass(frozen=True)
class SumPlan:
    """Who contributes what to a sum over `shards` shards on `ranks` ranks, and how the contributions are added.

    It is equal on all ranks, whatever the tensors. `blocks[r]` are the partials that rank r contributes, in shard
    order: none for a rank without shards. `pushes` takes the blocks of all ranks, in rank order, to the one partial
    [0, shards).
    """

    shards: int
    ranks: int
    blocks: tuple[tuple[Block, ...], ...]
    pushes: tuple[Push, ...]

    def local(self, rank: int) -> tuple[Push, ...]:
        """Return how `rank` adds its shards as they arrive, one push for each; `blocks[rank]` stay on the stack."""
        return pushes(self.shards, (Block(k, k + 1) for k in owned(self.shards, self.ranks, rank)))


def sum_plan(shards: int, ranks: int) -> SumPlan:
    """Plan a sum over `shards` shards on `ranks` ranks, which may be more than there are shards.

    Raises ValueError unless there is at least one of each.
    """
    blocks = tuple(aligned_blocks(shards, owned(shards, ranks, rank)) for rank in range(_at_least_one(ranks, "rank")))
    return SumPlan(shards, ranks, blocks, pushes(shards, (block for of_rank in blocks for block in of_rank)))


def owned(shards: int, ranks: int, rank: int) -> range:
    """Return the shards that `rank` owns: the first `shards % ranks` ranks have one more than the others.

    Raises ValueError for less than one shard or a rank that is not among `ranks` ranks.
    """
    return _share(_at_least_one(shards, "shard"), ranks, rank)


def element_range(numel: int, ranks: int, rank: int) -> range:
    """Return the elements of a flat tensor of `numel` elements that `rank` adds up for all, dealt out like shards.

    Raises ValueError for a negative `numel` or a rank that is not among `ranks` ranks.
    """
    if numel < 0:
        raise ValueError(f"expected 0 or more elements, got {numel}")
    return _share(numel, ranks, rank)


def aligned_blocks(shards: int, held: range) -> tuple[Block, ...]:
    """Return the fewest nodes of the tree that make up the shards `held`, in order.

    Raises ValueError for a range that has gaps or leaves 0 to `shards`.
    """
    if held.step != 1 or not 0 <= held.start <= held.stop <= shards:
        raise ValueError(f"expected consecutive shards from 0 to {shards - 1}, got {held}")
    found, start = [], held.start
    while start < held.stop:
        width = 1
        while start + width < held.stop and start % (2 * width) == 0 and min(start + 2 * width, shards) <= held.stop:
            width *= 2
        found.append(Block(start, min(start + width, shards)))
        start = found[-1].stop
    return tuple(found)


def pushes(shards: int, blocks: Iterable[Block]) -> tuple[Push, ...]:
    """Return the order in which consecutive nodes of the tree over `shards` shards, arriving one by one, are added.

    It is a binary counter: a node is completed as soon as both of its halves are there, so that few partials wait.
    """
    stack: list[Block] = []
    found = []
    for block in blocks:
        stack.append(block)
        completes = []
        while len(stack) > 1 and _is_node(shards, stack[-2].start, stack[-1].stop):
            right = stack.pop()
            stack[-1] = Block(stack[-1].start, right.stop)
            completes.append(stack[-1])
        found.append(Push(block, tuple(completes)))
    return tuple(found)


def num_buffers(local: tuple[Push, ...]) -> int:
    """Return how many buffers the pushes of `local` need for partials that wait, where the last to arrive is not kept.

    For one block of n shards that is floor(log2 n): none for one shard.
    """
    waiting = most = 0
    for push in local[:-1]:
        waiting += 1 - len(push.completes)
        most = max(most, waiting)
    return most


def volume(plan: SumPlan, numel: int, rank: int) -> int:
    """Return how many elements `rank` sends to other ranks for the sum of tensors of `numel` elements.

    With b blocks on this rank and e elements in its range, it sends b * (numel - e) on the way to the owners, and
    e * (ranks - 1) on the way back. If every rank contributes one block and `numel` is a multiple of the N ranks,
    that is 2 * (N - 1) / N of the tensor, as much as a ring sends. Raises ValueError like `element_range`.
    """
    elements = len(element_range(numel, plan.ranks, rank))
    return len(plan.blocks[rank]) * (numel - elements) + elements * (plan.ranks - 1)


def _is_node(shards: int, start: int, stop: int) -> bool:
    width = 1 << (stop - start - 1).bit_length()
    return start % width == 0 and stop == min(start + width, shards)


def _share(total: int, ranks: int, rank: int) -> range:
    if not 0 <= rank < _at_least_one(ranks, "rank"):
        raise ValueError(f"rank {rank} is not among the {ranks} ranks 0 to {ranks - 1}")
    each, more = divmod(total, ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _at_least_one(count: int, what: str) -> int:
    if count < 1:
        raise ValueError(f"expected at least one {what}, got {count}")
    return count

"""The tree over shards: what it adds in which order (pure), and the same bits on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.comm.base import Communicator, Work
from samestep.comm.interpreter import Accumulator, ordered_sum, start_ordered_sum
from samestep.comm.ops import AllGather, AllToAll, Op
from samestep.comm.ordered import (
    Block,
    Push,
    SumPlan,
    aligned_blocks,
    element_range,
    num_buffers,
    owned,
    sum_plan,
    volume,
)
from samestep.testing.ranks import run_processes, run_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# The tree's definition, as short as it gets: the left half is the largest power of two that leaves something over.


def halves(block: Block) -> tuple[Block, Block]:
    middle = block.start + (1 << ((block.stop - block.start - 1).bit_length() - 1))
    return Block(block.start, middle), Block(middle, block.stop)


def tree(block: Block, leaf: Callable[[int], Any], add: Callable[[Any, Any], Any]) -> Any:
    if block.stop - block.start == 1:
        return leaf(block.start)
    left, right = halves(block)
    return add(tree(left, leaf, add), tree(right, leaf, add))


def formula(block: Block) -> Any:
    return tree(block, lambda shard: shard, lambda left, right: (left, right))


def cover(block: Block, held: range) -> list[Block]:
    """The nodes below `block` that make up `held`, by descending from the root."""
    if block.start >= held.stop or block.stop <= held.start:
        return []
    if block.start >= held.start and block.stop <= held.stop:
        return [block]
    left, right = halves(block)
    return cover(left, held) + cover(right, held)


def folded(order: Iterable[Push], leaves: Iterable[Any]) -> list[Any]:
    """What is on the stack after carrying out `order` on formulas instead of tensors."""
    stack: list[Any] = []
    for push, leaf in zip(order, leaves, strict=True):
        stack.append(leaf)
        for node in push.completes:
            right, left = stack.pop(), stack.pop()
            assert (left, right) == formula(node)
            stack.append((left, right))
    return stack


def check_plan(shards: int, ranks: int) -> None:
    plan = sum_plan(shards, ranks)
    ranges = [owned(shards, ranks, rank) for rank in range(ranks)]
    assert [shard for held in ranges for shard in held] == list(range(shards))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    partials = []
    for rank, held in enumerate(ranges):
        assert plan.blocks[rank] == tuple(cover(Block(0, shards), held))
        local = plan.local(rank)
        assert [push.block for push in local] == [Block(k, k + 1) for k in held]
        mine = folded(local, held)
        assert mine == [formula(block) for block in plan.blocks[rank]]
        partials += mine
    assert [push.block for push in plan.pushes] == [block for blocks in plan.blocks for block in blocks]
    assert folded(plan.pushes, partials) == [formula(Block(0, shards))]


def test_every_small_plan_adds_up_the_one_tree() -> None:
    for shards in range(1, 34):
        for ranks in range(1, 20):
            check_plan(shards, ranks)


@given(shards=st.integers(1, 600), ranks=st.integers(1, 80))
def test_any_plan_adds_up_the_one_tree(shards: int, ranks: int) -> None:
    check_plan(shards, ranks)


@given(shards=st.integers(1, 200), data=st.data())
def test_any_range_of_shards_is_cut_into_the_fewest_nodes(shards: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, shards))
    stop = data.draw(st.integers(start, shards))
    assert aligned_blocks(shards, range(start, stop)) == tuple(cover(Block(0, shards), range(start, stop)))


@pytest.mark.parametrize(
    ("shards", "ranks", "blocks"),
    [
        (1, 1, "[0, 1)"),
        (4, 2, "[0, 2) | [2, 4)"),
        (5, 2, "[0, 2) [2, 3) | [3, 4) [4, 5)"),
        (7, 1, "[0, 7)"),
        (7, 2, "[0, 4) | [4, 7)"),
        (8, 3, "[0, 2) [2, 3) | [3, 4) [4, 6) | [6, 8)"),
        (2, 4, "[0, 1) | [1, 2) |  | "),
    ],
)
def test_blocks_of_worked_examples(shards: int, ranks: int, blocks: str) -> None:
    assert " | ".join(" ".join(map(str, of_rank)) for of_rank in sum_plan(shards, ranks).blocks) == blocks


def test_a_plan_is_a_value_that_prints_and_compares() -> None:
    plan = sum_plan(3, 2)
    assert plan == sum_plan(3, 2)
    assert hash(plan) == hash(sum_plan(3, 2))
    assert plan != sum_plan(3, 3)
    two, three = Block(0, 2), Block(0, 3)
    assert plan == SumPlan(3, 2, ((two,), (Block(2, 3),)), (Push(two), Push(Block(2, 3), (three,))))
    assert plan.local(0) == (Push(Block(0, 1)), Push(Block(1, 2), (two,)))
    assert "Push(block=Block(start=2, stop=3), completes=(Block(start=0, stop=3),))" in repr(plan)


def test_one_block_needs_at_most_log2_buffers() -> None:
    for shards in range(1, 300):
        assert num_buffers(sum_plan(shards, 1).local(0)) == shards.bit_length() - 1
    assert num_buffers(()) == 0
    assert num_buffers(sum_plan(8, 3).local(1)) == 2  # [3, 4), and shard 4 while shard 5 is computed


@given(numel=st.integers(0, 10**12), ranks=st.integers(1, 60))
def test_element_ranges_are_even_and_leave_nothing_out(numel: int, ranks: int) -> None:
    ranges = [element_range(numel, ranks, rank) for rank in range(ranks)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == numel
    assert all(before.stop == after.start for before, after in pairwise(ranges))
    assert len(ranges[0]) - len(ranges[-1]) <= 1


@pytest.mark.parametrize("ranks", range(1, 10))
def test_volume_of_one_block_each_is_that_of_a_ring(ranks: int) -> None:
    numel = 12 * ranks
    for shards in (ranks, 2 * ranks, 4 * ranks):
        plan = sum_plan(shards, ranks)
        assert [len(blocks) for blocks in plan.blocks] == [1] * ranks
        for rank in range(ranks):
            assert volume(plan, numel, rank) * ranks == 2 * (ranks - 1) * numel


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sum_plan(0, 1), "at least one shard, got 0"),
        (lambda: sum_plan(4, 0), "at least one rank, got 0"),
        (lambda: owned(4, 2, 2), "rank 2 is not among the 2 ranks 0 to 1"),
        (lambda: owned(-1, 2, 0), "at least one shard, got -1"),
        (lambda: element_range(-1, 2, 0), "0 or more elements, got -1"),
        (lambda: element_range(4, 2, -1), "rank -1 is not among"),
        (lambda: aligned_blocks(4, range(2, 5)), r"from 0 to 3, got range\(2, 5\)"),
        (lambda: aligned_blocks(4, range(0, 4, 2)), "consecutive shards"),
        (lambda: sum_plan(4, 2).local(2), "rank 2 is not among"),
        (lambda: volume(sum_plan(4, 2), -3, 0), "0 or more elements, got -3"),
    ],
)
def test_impossible_plans_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# On tensors. Values spread over many magnitudes, so that almost every order of additions gives other bits.


def spread(shards: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * shards + numel)
    magnitudes = 2.0 ** torch.randint(-8, 9, (shards, numel), generator=generator)
    return (torch.randn(shards, numel, generator=generator, dtype=torch.float64) * magnitudes).to(dtype)


def tree_sum(rows: Tensor) -> Tensor:
    total: Tensor = tree(Block(0, len(rows)), lambda shard: rows[shard], torch.add)
    return total


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def summed(comm: Communicator, rows: Tensor) -> Tensor:
    """Sum the rows as a trainer would: each rank fills one bucket with one of its shards after another."""
    plan = sum_plan(len(rows), comm.size)
    accumulator, bucket = Accumulator(plan, comm.rank), torch.empty_like(rows[0])
    for shard in owned(len(rows), comm.size, comm.rank):
        accumulator.push(shard, bucket.copy_(rows[shard]))
        assert same_bits(bucket, rows[shard])
    return ordered_sum(comm, accumulator.partials(), plan, out=bucket)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_same_bits_for_every_number_of_ranks_and_shards(ranks: int) -> None:
    cases = [spread(shards, 37, dtype) for shards in range(1, 18) for dtype in DTYPES]
    for on_rank in run_threads(lambda comm: [summed(comm, rows) for rows in cases], ranks):
        for rows, got in zip(cases, on_rank, strict=True):
            assert same_bits(got, tree_sum(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordinary_sums_differ_between_numbers_of_ranks(dtype: torch.dtype) -> None:
    """What the test above rules out does happen: rank-order sums of the same shards give other bits."""
    rows = spread(8, 500, dtype)

    def in_rank_order(comm: Communicator) -> Tensor:
        held = owned(len(rows), comm.size, comm.rank)
        total = rows[held.start].clone()
        for shard in held[1:]:
            total += rows[shard]
        return comm.all_reduce(total)

    sums = [run_threads(in_rank_order, ranks)[0] for ranks in (1, 2, 3)]
    assert not any(same_bits(sums[a], sums[b]) for a, b in ((0, 1), (1, 2), (0, 2)))
    assert not any(same_bits(total, tree_sum(rows)) for total in sums)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=str)
def test_other_dtypes_that_have_a_sum(dtype: torch.dtype) -> None:
    rows = torch.arange(35).reshape(5, 7).to(dtype)
    for got in run_threads(lambda comm: summed(comm, rows), 3):
        assert same_bits(got, tree_sum(rows))


class Counting(Communicator):
    """Counts the elements that this rank sends to others."""

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner = inner
        self.sent = 0

    def _start(self, op: Op) -> Work:
        match op:
            case AllToAll(input_splits=splits):
                self.sent += sum(splits) - splits[self.rank]
            case AllGather(tensor=tensor):
                self.sent += tensor.numel() * (self.size - 1)
            case _:
                raise AssertionError(f"unexpected {op}")
        return self._inner.start(op)

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        return self._inner.split(ranks)


@pytest.mark.parametrize("ranks", range(1, 7))
def test_every_length_is_summed_and_moves_the_stated_volume(ranks: int) -> None:
    cases = [(shards, numel) for shards in sorted({1, 3, ranks, 8}) for numel in range(3 * ranks + 3)]

    def on_rank(comm: Communicator) -> None:
        for shards, numel in cases:
            rows, counting = spread(shards, numel, torch.float32), Counting(comm)
            assert same_bits(summed(counting, rows), tree_sum(rows))
            assert counting.sent == volume(sum_plan(shards, ranks), numel, comm.rank)

    run_threads(on_rank, ranks)


def test_out_is_filled_whatever_its_strides_and_partials_are_kept() -> None:
    rows = spread(6, 12, torch.float32)

    def on_rank(comm: Communicator) -> None:
        plan, held = sum_plan(6, 2), owned(6, 2, comm.rank)
        accumulator = Accumulator(plan, comm.rank)
        for shard in held:
            accumulator.push(shard, rows[shard].view(3, 4).t())
        partials = [p.t().contiguous().t() for p in accumulator.partials()]
        kept = [p.clone() for p in partials]
        memory = torch.zeros(4, 6)
        out = torch.nn.Parameter(memory[:, ::2])
        assert ordered_sum(comm, partials, plan, out) is out
        assert same_bits(out.detach(), tree_sum(rows).view(3, 4).t())
        assert not memory[:, 1::2].any()
        assert all(same_bits(p, k) for p, k in zip(partials, kept, strict=True))

    run_threads(on_rank, 2)


def test_sums_under_way_at_the_same_time_do_not_mix() -> None:
    plan = sum_plan(3, 3)
    buckets = [spread(3, numel, torch.float32) for numel in (5, 6, 1)]

    def on_rank(comm: Communicator) -> None:
        outs = [torch.empty_like(rows[0]) for rows in buckets]
        works = [start_ordered_sum(comm, [rows[comm.rank]], plan, out) for rows, out in zip(buckets, outs, strict=True)]
        assert not any(work.done() for work in works)
        for work, rows, out in zip(works, buckets, outs, strict=True):
            work.wait()
            work.wait()
            assert work.done()
            assert same_bits(out, tree_sum(rows))

    run_threads(on_rank, 3)


def test_accumulator_uses_its_buffers_again_and_copies_nothing_for_one_shard() -> None:
    rows = spread(8, 5, torch.float32)
    accumulator = Accumulator(sum_plan(8, 1), 0)
    places = []
    for sign in (1, -1):
        for shard in range(8):
            accumulator.push(shard, sign * rows[shard])
        (total,) = accumulator.partials()
        assert same_bits(total, sign * tree_sum(rows))
        places.append(total.data_ptr())
    assert places[0] == places[1]

    alone, gradient = Accumulator(sum_plan(2, 2), 1), torch.ones(3)
    alone.push(1, gradient)
    assert alone.partials()[0].data_ptr() == gradient.data_ptr()


def test_accumulator_refuses_what_is_out_of_turn_and_begins_anew_after_clear() -> None:
    rows = spread(4, 3, torch.float32)
    accumulator = Accumulator(sum_plan(4, 1), 0)
    accumulator.push(0, rows[0])
    for shard, tensor, message in (
        (0, rows[1], "rank 0: got shard 0, but shard 1 is next"),
        (1, torch.ones(4), "shard 1: got float32[4] on cpu, but earlier shards were float32[3] on cpu"),
        (1, rows[1].half(), "got float16[3] on cpu"),
        (1, rows[1].to_sparse(), "expected a dense tensor, got torch.sparse_coo"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            accumulator.push(shard, tensor)
    with pytest.raises(ValueError, match="1 of 4 shards have arrived"):
        accumulator.partials()
    accumulator.push(1, rows[1])
    accumulator.push(2, rows[0])
    accumulator.clear()
    for shard in range(4):
        accumulator.push(shard, rows[shard])
    assert same_bits(accumulator.partials()[0], tree_sum(rows))

    idle = Accumulator(sum_plan(1, 2), 1)
    assert idle.partials() == []
    with pytest.raises(ValueError, match="rank 1: got shard 0, but it owns none"):
        idle.push(0, rows[0])


ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("plan", "partials", "out", "message"),
    [
        (sum_plan(2, 2), [ONE], ONE, "plan for 2 ranks, but the group has 1"),
        (sum_plan(2, 1), [], ONE, "expected 1 contiguous partials of float32[3] on cpu, for the shards [0, 2); got []"),
        (sum_plan(2, 1), [ONE, ONE], ONE, "got ['float32[3] on cpu', 'float32[3] on cpu']"),
        (sum_plan(2, 1), [torch.ones(4)], ONE, "got ['float32[4] on cpu']"),
        (sum_plan(2, 1), [ONE.double()], ONE, "got ['float64[3] on cpu']"),
        (sum_plan(2, 1), [ONE.bool()], ONE.bool(), "sum is not defined for bool"),
        (sum_plan(2, 1), [ONE.to_sparse()], ONE, "expected 1 contiguous partials"),
        (sum_plan(2, 1), [ONE], ONE.to_sparse(), "only dense tensors"),
    ],
)
def test_sums_that_do_not_fit_are_refused(plan: SumPlan, partials: list[Tensor], out: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_threads(lambda comm: ordered_sum(comm, partials, plan, out), 1)


def test_starting_refuses_tensors_that_are_not_contiguous() -> None:
    gaps, dense, plan = torch.ones(6)[::2], torch.ones(3), sum_plan(1, 1)
    with pytest.raises(ValueError, match="not contiguous"):
        run_threads(lambda comm: start_ordered_sum(comm, [dense], plan, gaps), 1)
    with pytest.raises(ValueError, match="contiguous partials"):
        run_threads(lambda comm: start_ordered_sum(comm, [gaps], plan, dense), 1)


def _over_gloo(comm: Communicator) -> bool:
    cases = [spread(shards, numel, dtype) for shards in (2, 8) for numel in (0, 1, 9, 1000) for dtype in DTYPES]
    return all(same_bits(summed(comm, rows), tree_sum(rows)) for rows in cases)


def test_same_bits_over_processes() -> None:
    assert run_processes(_over_gloo, 3) == [True] * 3

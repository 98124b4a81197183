"""From what was seen to what is wrong: each finding at its edges, and what is no mistake. Nothing runs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.inspect.comparison import Comparison, Difference, compare
from samestep.inspect.finding import Finding, Seen
from samestep.inspect.findings import findings
from samestep.inspect.observation import Clip, Iteration, Loader, Observation, Step, from_json, to_json
from samestep.inspect.report import report

PROBE = ["a", "b", "c"]


def step(weights: str = "w", gradients: str = "g", **more: Any) -> Step:
    return Step(0, ["layer.weight", "layer.bias"], [weights, "v"], [gradients, "h"], **more)


def loader(indices: list[int] | None, *, evaluates: bool = False, passes: int = 1, **more: Any) -> Loader:
    made = [Iteration(indices, trains=not evaluates, evaluates=evaluates) for _ in range(passes)]
    options = {"length": 10, "batch_size": 1, "sampler": "DistributedSampler", "dealer": 0, "replicas": 2, "rank": 0}
    return Loader(**{**options, "probe": PROBE, **more}, passes=made)  # type: ignore[arg-type]


def seen(*ranks: dict[str, Any], comparisons: Sequence[Comparison] = ()) -> Seen:
    options = [{"steps": [step()], **rank} for rank in ranks]
    return Seen([Observation(rank, len(ranks), **given) for rank, given in enumerate(options)], comparisons)


def kinds(of: Seen) -> list[str]:
    return [one.kind for one in findings(of)]


def only(of: Seen) -> Finding:
    (found,) = findings(of)
    return found


def test_nothing_seen_is_nothing_found() -> None:
    assert findings(seen({}, {})) == []
    assert findings(seen({"steps": []}, {"steps": []})) == []


# Replicas


def test_replicas_that_begin_different() -> None:
    found = only(seen({}, {}, {"steps": [step("other")]}))
    assert (found.kind, found.what) == ("replicas", "Replicas begin different.")
    assert "layer.weight on rank 2 differ from rank 0's" in found.seen


def test_replicas_that_come_apart() -> None:
    found = only(seen({"steps": [step(), step()]}, {"steps": [step(), step("other")]}))
    assert (found.what, found.seen[:13]) == ("Replicas come apart.", "Before step 1")
    found = only(seen({"steps": [step(), step()]}, {"steps": [step(), step(gradients="other")]}))
    assert "not exchanged" in found.what
    assert "At step 1 each rank has its own gradient: layer.weight on rank 1" in found.seen


def test_a_second_optimizers_first_step_is_a_beginning() -> None:
    other = replace(step("x"), optimizer=1)
    found = only(seen({"steps": [step(), other]}, {"steps": [step(), replace(other, weights=["y", "v"])]}))
    assert found.what == "Replicas begin different."


def test_parameters_that_ranks_do_not_share_are_no_replicas() -> None:
    other = replace(step("x"), names=["other.weight", "layer.bias"])
    assert findings(seen({}, {"steps": [other]})) == []


def test_what_one_mistake_brings_is_not_told_twice() -> None:
    apart = {"steps": [step("other", is_orphan=True)]}
    assert kinds(seen({}, apart, comparisons=[wrong()])) == ["optimizer"]
    assert kinds(seen({}, {"steps": [step("other")]}, comparisons=[wrong()])) == ["replicas"]


# Clipping


def test_clipping_own_gradients_counts_where_they_are_exchanged_later() -> None:
    clips = [{"clips": [Clip(0, [mark])]} for mark in "ab"]
    assert kinds(seen(*clips)) == ["clipping"]
    assert findings(seen(clips[0], clips[0])) == []
    later = [{"clips": [Clip(7, [mark])]} for mark in "ab"]
    assert findings(seen(*later)) == []


# Gradients


def wrong(factor: float | None = None, missing: Sequence[str] = ()) -> Comparison:
    parts = [Difference("layer.weight", 0.5, 1.0, False), Difference("layer.bias", 0.0, 1.0, True)]
    return Comparison(parts, factor, list(missing))


@pytest.mark.parametrize(
    ("factor", "ranks", "said"),
    [
        (0.5, 2, "a sum over samples where it should be a mean"),
        (1 / 3, 3, "a sum over samples where it should be a mean"),
        (2.0, 2, "summed over ranks where they should be averaged"),
        (3.0, 2, "depend on the number of ranks by a factor"),
        (0.5, 3, "depend on the number of ranks by a factor"),
    ],
)
def test_gradients_off_by_a_factor(factor: float, ranks: int, said: str) -> None:
    found = only(seen(*[{}] * ranks, comparisons=[wrong(factor)]))
    assert found.kind == "scale"
    assert said in found.what


def test_gradients_that_differ() -> None:
    found = only(seen({}, {}, comparisons=[wrong(missing=["extra"])]))
    assert found.kind == "gradients"
    assert "2 of 3 gradients differ between 2 ranks and one: layer.weight by 50%, extra, which" in found.seen


def test_batchnorm_is_blamed_only_where_gradients_differ() -> None:
    norms = {"steps": [step(norms=["block.norm"])]}
    found = only(seen(norms, norms, comparisons=[wrong()]))
    assert found.kind == "batchnorm"
    assert found.seen.startswith("Layers: block.norm. At step 0 1 of 2 gradients differ")
    assert findings(seen(norms, norms, comparisons=[Comparison()])) == []


def test_a_program_that_draws_is_not_blamed() -> None:
    draws = {"steps": [step(draws=True)]}
    assert findings(seen({}, draws, comparisons=[wrong()])) == []
    assert "not compared: the program draws" in report("x", seen({}, draws, comparisons=[wrong()]), [])


def gradients(scale: float = 1.0, noise: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(50, generator=generator) * size for name, size in (("a", 1.0), ("b", 1e-3), ("c", 1e-9))}
    return {n: scale * (one + noise * one.norm() * torch.randn(50, generator=generator)) for n, one in made.items()}


def test_rounding_is_no_difference_and_mistakes_are() -> None:
    whole = gradients()
    assert compare(whole, whole).agrees
    assert compare(gradients(noise=1e-4), whole).agrees
    assert not compare(gradients(noise=0.05), whole).agrees
    assert compare(gradients(noise=5e-3), whole, halves=True).agrees
    noise = compare({**whole, "c": torch.randn(50) * 1e-9}, whole)
    assert noise.agrees
    assert [one.is_noise for one in noise.differences] == [False, False, True]
    assert not compare({**whole, "a": whole["a"].flip(0)}, whole).agrees
    for factor in (0.25, 0.5, 2.0, 4.0):
        found = compare(gradients(factor), whole)
        assert found.factor == pytest.approx(factor)
    assert compare(gradients(-1.0), whole).factor is None
    assert compare({"a": whole["a"]}, whole).missing == ["b", "c"]
    assert compare({**whole, "a": whole["a"][:3]}, whole).missing == ["a"]
    assert compare({}, {}).agrees


# Samples


def test_a_dealt_order_is_fine_padded_or_not() -> None:
    for shares in (([0, 2, 4, 6, 8], [1, 3, 5, 7, 9]), ([0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1])):
        ranks = [{"loaders": [loader(share, replicas=len(shares), rank=n)]} for n, share in enumerate(shares)]
        assert findings(seen(*ranks)) == []


def test_every_rank_goes_through_everything() -> None:
    plain = {"sampler": "RandomSampler", "dealer": None, "replicas": None, "rank": None}
    orders = [list(range(10)), list(range(9, -1, -1))]
    ranks = [{"loaders": [loader(order, **plain)]} for order in orders]
    found = only(seen(*ranks))
    assert (
        found.seen
        == "In an epoch of 10 samples 10 are drawn more than once (RandomSampler on every rank), and 0 never."
    )
    found = only(seen(ranks[0], ranks[0]))
    assert "Ranks 0, 1 drew the same 10 samples in the same order (RandomSampler)" in found.seen


def test_samplers_that_were_told_the_same_rank() -> None:
    ranks = [{"loaders": [loader([0, 2, 4, 6, 8], rank=0)]}] * 2
    found = only(seen(*ranks))
    assert "5 of 10 samples come to none" in found.seen
    assert found.advice.startswith("The samplers were told that they are ranks 0, 0. ")


def test_samplers_with_different_seeds() -> None:
    ranks = [{"loaders": [loader(share, rank=n)]} for n, share in enumerate(([0, 1, 2, 3, 4], [2, 3, 4, 8, 9]))]
    assert "3 are drawn more than once (DistributedSampler on every rank), and 3 never" in only(seen(*ranks)).seen


def test_samplers_that_deal_out_to_more_ranks_than_there_are() -> None:
    ranks = [{"loaders": [loader([n], rank=n, replicas=8)]} for n in range(2)]
    assert findings(seen(*ranks)) == [], "padding may be as much"
    long = [{"loaders": [loader(list(range(n, 100, 8)), rank=n, replicas=8, length=100)]} for n in range(2)]
    assert (
        "74 of 100 samples come to no rank: the sampler deals out to 8 ranks, and there are 2" in only(seen(*long)).seen
    )


@pytest.mark.parametrize(
    "more",
    [
        {"probe": []},  # samples can't be told apart
        {"probe": ["a", "a"]},
    ],
)
def test_same_numbers_of_other_data_are_not_the_same_samples(more: dict[str, Any]) -> None:
    ranks = [{"loaders": [loader(list(range(10)), **more)]}] * 2
    assert findings(seen(*ranks)) == []
    apart = [{"loaders": [loader(list(range(10)), probe=[f"{n}", "x"])]} for n in range(2)]
    assert findings(seen(*apart)) == []


def test_drawing_with_replacement_is_no_mistake() -> None:
    plain = {"sampler": "WeightedRandomSampler", "dealer": None, "replicas": None, "rank": None}
    ranks = [{"loaders": [loader(order, **plain)]} for order in ([1, 1, 1, 2, 3], [1, 3, 3, 3, 1])]
    assert findings(seen(*ranks)) == []
    assert kinds(seen(ranks[0], ranks[0])) == ["samples"]


def test_a_part_of_the_data_is_the_programs_choice() -> None:
    plain = {"sampler": "SubsetRandomSampler", "dealer": None, "replicas": None, "rank": None}
    ranks = [{"loaders": [loader(order, **plain)]} for order in ([1, 2], [3, 4])]
    assert findings(seen(*ranks)) == []


def streams(*digests: list[str]) -> Seen:
    made = [loader(None, dealer=None, replicas=None) for _ in digests]
    for one, its_own in zip(made, digests, strict=True):
        one.passes[0].digests = its_own
    return seen(*({"loaders": [one]} for one in made))


def test_a_stream_that_all_ranks_read_whole() -> None:
    assert "4 were the same on all" in only(streams(list("abcde"), list("abcdx"))).seen
    for fine in (
        (list("abcde"), list("vwxyz")),
        (["a"] * 5, ["a"] * 5),
        (list("abc"), list("abc")),
        ([""] * 5, [""] * 5),
    ):
        assert findings(streams(*fine)) == []


# Epochs


def test_the_same_order_again() -> None:
    order = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    twice = [{"loaders": [loader(share, rank=n, passes=2, shuffles=True)]} for n, share in enumerate(order)]
    assert kinds(seen(*twice)) == ["epoch"]
    again = [
        {"loaders": [loader(share, rank=n, shuffles=True), loader(share, rank=n, shuffles=True)]}
        for n, share in enumerate(order)
    ]
    assert kinds(seen(*again)) == ["epoch"], "a new loader for each epoch, on one sampler"
    for change in ({"shuffles": False}, {"dealer": None, "replicas": None}):
        options = {"shuffles": True, **change}
        fine = [{"loaders": [loader(share, rank=n, passes=2, **options)]} for n, share in enumerate(order)]
        assert findings(seen(*fine)) == []


# Evaluation


def test_padding_counts_only_where_something_is_evaluated() -> None:
    shares = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 0]]
    padded = [{"loaders": [loader(share, rank=n, length=9, evaluates=True)]} for n, share in enumerate(shares)]
    assert only(seen(*padded)).seen.startswith("9 samples are counted as 10: DistributedSampler pads, so that 2 ranks")
    for rank in padded:
        rank["loaders"][0].passes[0].evaluates = False
    assert findings(seen(*padded)) == [], "a look at the data"
    everything = [{"loaders": [loader(list(range(9)), length=9, evaluates=True)]}] * 2
    assert findings(seen(*everything)) == [], "every rank evaluates everything"
    kept = [{"loaders": [loader(s, rank=n, length=9, evaluates=True)]} for n, s in enumerate(([0, 2, 4], [1, 3]))]
    assert findings(seen(*kept)) == []


# Files


def test_files_of_several_ranks() -> None:
    found = only(seen({"writes": ["/a", "/b"]}, {"writes": ["/c"]}, {"writes": ["/b"]}))
    assert found.seen.startswith("/b: by ranks 0, 2.")
    assert findings(seen({"writes": ["/a"]}, {"writes": ["/c"]})) == []


# Text


def test_an_observation_travels_as_json() -> None:
    made = Observation(
        1,
        2,
        steps=[step(norms=["n"])],
        clips=[Clip(0, ["a", ""])],
        loaders=[loader([1, 2]), loader(None)],
        writes=["/a"],
        incomparable="x",
    )
    assert from_json(to_json(made)) == made


def test_a_report_fits_on_a_screen() -> None:
    ranks: list[dict[str, Any]] = [
        {
            "steps": [step("other" * n)],
            "writes": ["/a/" + "long/" * 30 + "model.pt"] * 3,
            "loaders": [loader([1, 2, 3])],
        }
        for n in range(2)
    ]
    of = seen(*ranks)
    text = report("train.py", of, findings(of))
    assert len(text.splitlines()) < 30
    assert text.splitlines()[-1] == "3 things to put right."
    assert "1. Replicas begin different." in text
    assert "   -> Seed all ranks alike" in text


def test_a_report_names_the_parameters_that_differ_most() -> None:
    first = Comparison([Difference(f"p{n}", n / 100, 1.0, n < 7) for n in range(9)])
    later = Comparison([Difference("p0", 0.5, 1.0, True), Difference("tiny", 1e-9, 1e-9, True, True)])
    lines = report("train.py", seen({}, {}, comparisons=[first, later]), []).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("  gradients"))
    assert lines[at].endswith("2 of 9 differ between 2 ranks and one; differences as parts of the gradient:")
    assert [line.split() for line in lines[at + 1 : at + 5]] == [
        ["8e-02", "p8", "differs"],
        ["7e-02", "p7", "differs"],
        ["5e-01", "p0"],
        ["6e-02", "p6"],
    ]
    assert lines[at + 7].split() == ["and", "4", "more,", "less"]


def test_a_report_says_what_failed_before_what_came_of_it() -> None:
    lost, cause = "ConnectionError: Connection closed by peer", "\n".join(map(str, range(99))) + "\nKeyError: 3"
    text = report("train.py", seen({"error": lost}, {"error": cause}), [])
    assert "FAILED on rank 1:" in text
    assert "KeyError: 3" in text
    assert len(text.splitlines()) < 30
    assert "The program failed on 2 ranks" in text
    nothing = report("train.py", seen({"steps": []}, {"steps": []}), [])
    assert "There was nothing to look at" in nothing
    fine = report("train.py", seen({}, {}, comparisons=[compare(gradients(), gradients())]), [])
    assert "  gradients  3 agree between 2 ranks and one; differences as parts of the gradient:\n" in fine
    assert " 0e+00  a\n" in fine
    assert fine.endswith("Nothing wrong was found.")

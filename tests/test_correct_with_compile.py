"""Correct with torch.compile: of the module, before or after wrapping, of the wrapper, and of the step around it."""

from __future__ import annotations

import compile_ranks

from samestep.testing.ranks import run_processes


def test_compiled_modules_have_the_same_bits_and_overlap_as_plain_ones() -> None:
    for found in run_processes(compile_ranks.train, 2, timeout_s=110):
        _, _, overlap = found.pop("plain")
        assert overlap[0] == 0, "the first backward learns the order"
        assert overlap[1:] == [3, 3], "both later layers' gradients have left, and the first layer's just now"
        assert set(found) == set(compile_ranks.STYLES)
        for style, (same, graphs, compiled_overlap) in found.items():
            assert same, style
            assert graphs[:3] == [2, 2, 2], f"{style}: a graph for each bucket, each with a layer and its tanh"
            assert sum(graphs[3:]) == (2 if style == "step" else 0), f"{style}: nothing of the wrapper is compiled"
            assert min(compiled_overlap[1:]) >= 2, f"{style}: a graph's gradients may come in another order"

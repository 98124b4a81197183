"""torch.compile: dynamo compiles the wrapped module, not the wrapper around it, and splits its graph into buckets.

A compiled graph hands over all its gradients when it ends: a module compiled as one graph leaves nothing to overlap.
torch's DDPOptimizer (torch/_dynamo/backends/distributed.py) cuts it where buckets end; it asks torch's class for what
is active, and needs its `bucket_bytes_cap`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from samestep.after_import import after_import

__all__ = ["Active"]

# Dynamo is imported by the first optimizer, or by torch.compile; it is not worth waiting for before.
after_import("torch._dynamo.trace_rules", lambda rules: rules.add("samestep"))


class Active:
    """What dynamo is told while a wrapped module's forward runs; `caps_bytes` are the buckets'."""

    def __init__(self, caps_bytes: Sequence[int]) -> None:
        first: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]  # no cap may be smaller there
        self.bucket_bytes_cap = max(caps_bytes[-1], first)

    def call(self, module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `module`, with its graph to be split if it, or a part of it, is compiled now."""
        dynamo = sys.modules.get("torch._dynamo.convert_frame")
        torchs = getattr(dynamo, "DistributedDataParallel", None)  # ours, if it was put in the place of torch's
        if torchs is None:
            return module(*inputs, **kwargs)
        before = torchs._active_ddp_module
        torchs._active_ddp_module = self
        try:
            return module(*inputs, **kwargs)
        finally:
            torchs._active_ddp_module = before

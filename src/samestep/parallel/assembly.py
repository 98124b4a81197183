"""The buckets of a plan: which memory each has, and where the control numbers travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.parallel.bucket import Bucket, DenseBucket, SparseBucket
from samestep.parallel.control import Control
from samestep.parallel.hooks import CommHook, HookedBucket, hooked
from samestep.parallel.plan import BucketPlan, Plan
from samestep.parallel.whole import WholeBucket

__all__ = ["AnyBucket", "Assembly", "assemble"]

# Half types would round weights, so with them the control numbers travel alone.
_CONTROL_DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})

AnyBucket = Bucket | WholeBucket | HookedBucket


class Assembly(NamedTuple):
    """The buckets, in the plan's order; `bucket_of[i]` has parameter i.

    The control numbers are written to `tail`, which is the end of the last bucket if it `rides` there.
    """

    buckets: Sequence[AnyBucket]
    bucket_of: Sequence[int]
    tail: Tensor
    rides: bool


def assemble(
    plan: Plan,
    parameters: Sequence[nn.Parameter],
    control: Control,
    communicator: Communicator,
    hook: CommHook | None,
    *,
    to_stay: bool,
) -> Assembly:
    """Make the buckets of `plan`, which averages by `hook`, if there is one.

    If they are `to_stay`, all ranks call it together, and memory is taken where the transport needs no copies.
    """
    bucket_of = [0] * len(parameters)
    for number, planned in enumerate(plan.buckets):
        for index in planned.indices:
            bucket_of[index] = number
    last = plan.buckets[-1]
    fits = not (last.sparse or last.whole) and parameters[last.indices[0]].dtype in _CONTROL_DTYPES
    extra = control.length if fits and hook is None else 0
    strange = hook is not None and not hook.traits.at_once  # may resize the memory, as PowerSGD does
    shared = communicator if to_stay and not strange else None

    def made(planned: BucketPlan) -> Bucket:
        if planned.sparse:
            return SparseBucket(planned, parameters)
        first, count = parameters[planned.indices[0]], planned.numel + (extra if planned is last else 0)
        if shared is None or first.device.type != "cpu":
            return DenseBucket(planned, parameters, first.new_zeros(count, requires_grad=False))
        return DenseBucket(planned, parameters, shared.empty((count,), first.dtype))

    if hook is not None:
        buckets: Sequence[AnyBucket] = hooked([made(planned) for planned in plan.buckets], hook)
    else:
        buckets = [WholeBucket(p, parameters) if p.whole else made(p) for p in plan.buckets]
    final = buckets[-1]
    if extra and isinstance(final, DenseBucket):
        return Assembly(buckets, bucket_of, final.tail, True)
    tail = torch.zeros(control.length, dtype=torch.float64, device=communicator.device)
    return Assembly(buckets, bucket_of, tail, False)

"""Small trainings that DistributedDataParallel, torch's class and plain averaging by hand must end with the same bits.

Run by two ranks, where a sum has two terms and so only one order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from models import equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.comm.base import Communicator
from samestep.parallel import reducer
from samestep.parallel.distributed import DistributedDataParallel

STRUCTURES = ("plain", "frozen", "shared", "unused on one rank", "unused on all ranks")
CHECKPOINTS = ("none", "non-reentrant", "reentrant")
STEPS = 3
_TINY = 0.000001


@dataclass(frozen=True)
class Case:
    structure: str
    checkpoints: str
    accumulation: str
    bucket_cap_mb: float | None
    dtype: torch.dtype
    clip: bool
    optimizer: str
    set_to_none: bool

    @property
    def micro_batches(self) -> int:
        return 1 if self.accumulation == "none" else 2

    @property
    def whole(self) -> bool:
        """Whether every gradient is exchanged where it is, as large ones are, instead of in a bucket for each."""
        return self.bucket_cap_mb == _TINY

    @property
    def torch_can(self) -> bool:
        """Torch's class marks a parameter ready once, and so fails where re-entrant checkpoints give it two gradients
        or where it searches for unused parameters in a graph that does not show them."""
        return self.checkpoints != "reentrant" or self.structure in ("plain", "frozen")


def cases(structure: str, checkpoints: str) -> Iterator[Case]:
    """Yield the cross product of everything else."""
    for rest in itertools.product(
        ("none", "no_sync", "synchronised twice"),
        (None, 0.0005, _TINY),
        (torch.float32, torch.bfloat16, torch.float64),
        (False, True),
        ("momentum", "adam"),
        (True, False),
    ):
        yield Case(structure, checkpoints, *rest)


class Net(nn.Module):
    """Four layers, of which the case says which are frozen, used twice, tied, or left out, and where."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.extra = nn.Linear(8, 8)
        self.case, self.rank, self.batch = case, rank, 0
        if case.structure == "frozen":
            self.middle.requires_grad_(False)
        if case.structure == "shared":
            self.extra.weight = self.middle.weight
        self.used: set[str] = set()

    def uses_extra(self) -> bool:
        if self.case.structure == "unused on all ranks":
            return False
        # In one batch of two, so that it is unused in some backwards only.
        return self.case.structure != "unused on one rank" or (self.rank == 0 and self.batch % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[..., Tensor] = lambda layer, x: layer(x).tanh()  # noqa: E731
        if self.case.checkpoints != "none":
            run = _checkpointed(reentrant=self.case.checkpoints == "reentrant")
        names = ["first", "middle", *(["extra"] if self.uses_extra() else ()), "last"]
        if self.case.structure == "shared":
            names.insert(2, "middle")
        for name in names:
            x = run(getattr(self, name), x)
        self.used.update(names)
        self.batch += 1
        return x


def _checkpointed(*, reentrant: bool) -> Callable[..., Tensor]:
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=reentrant)
        return result

    return run


class ByHand(nn.Module):
    """The reference that is plain to see: local gradients, halved and added parameter by parameter after backward."""

    def __init__(self, module: Net) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def average(self) -> None:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, self.module.used)
        used = set().union(*everywhere)
        self.module.used.clear()
        for name, parameter in self.module.named_parameters():
            layers = {name.split(".")[0]} | ({"extra"} if self.module.case.structure == "shared" else set())
            if parameter.requires_grad and used & layers:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = grad * 0.5
                dist.all_reduce(parameter.grad)


def train(case: Case, rank: int, wrap: Callable[[Net], nn.Module]) -> list[Tensor | None]:
    """Train as `case` says; return every gradient after every synchronised backward, and the final weights."""
    torch.manual_seed(7)
    net = Net(case, rank).to(case.dtype)
    model = wrap(net)
    parameters = [p for p in net.parameters() if p.requires_grad]
    if case.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=0.05)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    seen: list[Tensor | None] = []
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            synchronised = last or case.accumulation == "synchronised twice"
            context = nullcontext() if synchronised else model.no_sync()
            with context:
                x = torch.randn(5, 6, generator=data).to(case.dtype).requires_grad_(case.checkpoints == "reentrant")
                model(x).square().mean().backward()
            if synchronised:
                if isinstance(model, ByHand):
                    model.average()
                seen += [None if p.grad is None else p.grad.clone() for p in parameters]
        if case.clip:
            torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.step()
    return [*seen, *(p.detach().clone() for p in net.parameters())]


def compare(communicator: Communicator, structure: str, checkpoints: str) -> tuple[int, int, list[str]]:
    """Train every case three times; return the number of cases, of those torch took part in, and what differs."""
    torch.set_num_threads(1)
    rank, count, with_torch, wrong = communicator.rank, 0, 0, []
    by_hand: dict[Case, list[Tensor | None]] = {}
    by_torch: dict[Case, list[Tensor | None]] = {}
    for case in cases(structure, checkpoints):
        caps = {"bucket_cap_mb": case.bucket_cap_mb}
        with patch.object(reducer, "WHOLE_BYTES", 1 if case.whole else reducer.WHOLE_BYTES):
            ours = train(case, rank, lambda net, caps=caps: DistributedDataParallel(net, **caps))
        without_buckets = replace(case, bucket_cap_mb=None)
        if without_buckets not in by_hand:
            by_hand[without_buckets] = train(case, rank, ByHand)
        if not equal(ours, by_hand[without_buckets]):
            wrong.append(f"by hand: {case}")
        if case.torch_can:
            with_torch += 1
            if without_buckets not in by_torch:  # two ranks: torch's bits are the same for all sizes of its buckets
                find = {"find_unused_parameters": case.structure.startswith("unused")} | caps
                by_torch[without_buckets] = train(
                    case, rank, lambda net, find=find: nn.parallel.DistributedDataParallel(net, **find)
                )
            if not equal(ours, by_torch[without_buckets]):
                wrong.append(f"torch: {case}")
        count += 1
    return count, with_torch, wrong

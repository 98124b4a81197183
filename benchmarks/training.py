#!/usr/bin/env python3
"""The time of a training step on CPU ranks: alone, with torch's class over Gloo, and with ours, side by side.

    benchmarks/training.py                              # 2 ranks, all models
    benchmarks/training.py --models digits4,mlp --rounds 15
    benchmarks/training.py --backend samestep           # torch's class over shared memory, too

Each rank makes every way's replica of the same model, and the ways take turns, round by round, so that a machine whose
speed drifts slows all of them alike. "alone" is the same step without any exchange: the floor. Printed are medians over
rounds of the slowest rank's milliseconds a step, torch's time over each, the time added to "alone", and that as a part
of what torch adds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.comm.ops import Reduction
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes

__all__ = ["MODELS", "main", "measure", "table"]

Make = Callable[[], nn.Module]


def digits_net() -> nn.Module:
    """The template's net for 28 x 28 grey images: two convolutions, two linear layers, 1.2 million parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def mlp() -> nn.Module:
    """5.3 million parameters, and little to compute with them."""
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


class Transformer(nn.Module):
    """Six encoder layers of width 128: 75 small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.embed(tokens)).mean(1))
        return scores


# Of each: the model, a batch, and how many steps a round has.
MODELS: Mapping[str, tuple[Make, Callable[[], Tensor], int]] = {
    "digits4": (digits_net, lambda: torch.randn(4, 1, 28, 28), 30),
    "digits32": (digits_net, lambda: torch.randn(32, 1, 28, 28), 8),
    "mlp": (mlp, lambda: torch.randn(16, 512), 12),
    "transformer": (Transformer, lambda: torch.randint(0, 1000, (4, 32)), 12),
}


def measure(
    control: Communicator, models: tuple[str, ...], rounds: int, backends: tuple[str, ...]
) -> list[dict[str, float]]:
    """Return, for each model, the median milliseconds of a step of each way; every rank calls it."""
    groups = {backend: dist.new_group(backend=backend) for backend in backends}
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {"alone": lambda net: net}
    for backend, group in groups.items():
        wraps[f"torch {backend}"] = partial(nn.parallel.DistributedDataParallel, process_group=group)
    wraps["samestep"] = DistributedDataParallel
    return [_measure_model(control, wraps, rounds, *MODELS[name]) for name in models]


def _measure_model(
    control: Communicator,
    wraps: Mapping[str, Callable[[nn.Module], nn.Module]],
    rounds: int,
    make: Make,
    batch: Callable[[], Tensor],
    num_steps: int,
) -> dict[str, float]:
    torch.manual_seed(control.rank)
    inputs = batch()
    targets = torch.randint(0, 10, (len(inputs),))
    steps = {}
    for name, wrap in wraps.items():
        torch.manual_seed(0)
        steps[name] = _step(wrap(make()), inputs, targets)
        for _ in range(4):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            control.barrier()
            start = time.perf_counter()
            for _ in range(num_steps):
                steps[name]()
            spent = torch.tensor((time.perf_counter() - start) / num_steps * 1e3)
            times[name].append(control.all_reduce(spent, Reduction.MAX).item())
    return {name: statistics.median(of_way) for name, of_way in times.items()}


def _step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def table(models: tuple[str, ...], results: list[dict[str, float]]) -> str:
    """Return the measurements as text, one row a model and way."""
    rows = [f"{'model':12}{'way':18}{'ms/step':>10}{'torch/this':>12}{'added ms':>10}{'of torch':>10}"]
    for model, ms in zip(models, results, strict=True):
        alone, base = ms["alone"], ms["torch gloo"]
        for way, value in ms.items():
            part = f"{(value - alone) / (base - alone):>10.2f}" if base > alone else f"{'-':>10}"
            rows.append(f"{model:12}{way:18}{value:>10.3f}{base / value:>12.2f}{value - alone:>10.3f}{part}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--backend", default="", help="a further backend for torch's class")
    args = parser.parse_args()
    models = tuple(args.models.split(","))
    if unknown := sorted(set(models) - set(MODELS)):
        parser.error(f"--models: there is no {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    backends = ("gloo", *filter(None, [args.backend]))
    results = run_processes(measure, args.ranks, models, args.rounds, backends, timeout_s=1800.0)
    sys.stdout.write(f"{args.ranks} ranks, medians of {args.rounds} rounds\n{table(models, results[0])}\n")


if __name__ == "__main__":
    main()

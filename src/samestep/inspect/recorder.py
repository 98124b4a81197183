"""What one rank of a checked program does, step by step, noted in a folder that all ranks share.

The folder, besides each rank's observation: gradients of the first steps, and the weights after them, as rank 0 of
several ranks had them (`parts-gradients-0.pt`, `parts-weights-0.pt`), gradients of the same steps on a single rank
(`whole-gradients-0.pt`), and the samples of each batch (`batch-<loader>-<pass>-<number>-<rank>.pt`).
"""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from samestep.inspect.digests import digest
from samestep.inspect.models import Models
from samestep.inspect.observation import Clip, Iteration, Observation, Step, to_json

__all__ = ["Mode", "Recorder", "as_bare"]

Mode = Literal["parts", "whole"]
# Steps after those that are looked at: enough for a later epoch's, an evaluation and a file to be seen.
_MORE_STEPS = 30
# How long a rank that is done waits for the others, which may need it for their last exchange.
_PARTING_S = 20.0


class Recorder:
    """Notes the first `steps` steps of each optimizer, as one of several ranks ("parts") or the only one ("whole").

    As the only one it goes on from each step with the weights that several ranks had then.
    """

    def __init__(self, folder: Path, mode: Mode, steps: int, rank: int, size: int) -> None:
        self.folder, self.mode, self.steps = folder, mode, steps
        self.seen = Observation(rank, size)
        self.num_steps = self.num_batches = 0
        self._evaluates = False  # whether the program has put a model into evaluation mode last
        self._pass: Iteration | None = None  # that the latest batch came from
        self._drew = False
        self._counts: dict[int, int] = {}  # steps of each optimizer, by its id
        self._optimizers: list[Any] = []
        self._names: dict[int, str] = {}
        self._models: Models | None = None
        self._random = _random_state()

    @property
    def is_looking(self) -> bool:
        """Whether any of the steps to be noted is yet to come."""
        return not self._counts or min(self._counts.values()) < self.steps

    def batch_comes(self, of: Iteration) -> None:
        """Note that the program gets a batch now."""
        self.num_batches += 1
        self._pass = of
        of.evaluates = of.evaluates or self._evaluates or not torch.is_grad_enabled()
        if self.is_looking:
            self._random = _random_state()

    def batch_is_done(self) -> None:
        """Note that the program asks for more, before anything is drawn for that."""
        self._drew = self._drew or (self.is_looking and _random_state() != self._random)

    def pass_begins(self) -> None:
        self._drew = False

    def backward(self) -> None:
        """Note that the program goes backward."""
        if self._pass is not None:
            self._pass.trains = True

    def mode_set(self, training: bool) -> None:
        """Note that a model was put into this mode."""
        self._evaluates = not training

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """A hook of torch's for all optimizers."""
        if id(optimizer) not in self._counts:
            self._counts[id(optimizer)] = 0
            self._optimizers.append(optimizer)
        if self._counts[id(optimizer)] >= self.steps:
            return
        parameters = _parameters(optimizer)
        known = [parameter for one in self._optimizers for parameter in _parameters(one)]
        models = Models()
        names = self._name(parameters, models)
        empty = all(parameter.grad is None for parameter in parameters)
        step = Step(
            self._optimizers.index(optimizer),
            names,
            [digest(parameter) for parameter in parameters],
            [digest(parameter.grad) for parameter in parameters],
            is_orphan=empty and models.has_gradients_unknown_to(known),
            draws=self._drew or _random_state() != self._random,
            norms=models.own_norms(parameters),
        )
        number = len(self.seen.steps)
        self.seen.steps.append(step)
        if self.mode == "whole" or self.seen.rank == 0:
            gradients = {n: as_bare(p.grad) for n, p in zip(names, parameters, strict=True) if p.grad is not None}
            self.keep(f"{self.mode}-gradients-{number}", gradients)

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """A hook of torch's for all optimizers; ends the process when all that is wanted has been seen."""
        if self._counts[id(optimizer)] < self.steps:
            self._share_weights(f"parts-weights-{len(self.seen.steps) - 1}", _parameters(optimizer))
        self._counts[id(optimizer)] += 1
        self.num_steps += 1
        self._drew = False
        if self.is_looking:
            self._random = _random_state()
        if self.mode == "whole" and len(self.seen.steps) >= len(list(self.folder.glob("parts-gradients-*.pt"))):
            self.leave()
        limit = len(self._optimizers) * (2 * self.steps + _MORE_STEPS if self.num_batches else self.steps)
        if self.num_steps >= limit:
            self.leave()

    def clipped(self, parameters: Any) -> None:
        """Note the gradients that torch's clip_grad_norm_ or clip_grad_value_ is about to change."""
        if self.is_looking:
            several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.seen.clips.append(Clip(len(self.seen.steps), [digest(parameter.grad) for parameter in several]))

    def wrote(self, path: str) -> None:
        """Note a file that the program has made anew."""
        if path not in self.seen.writes:
            self.seen.writes.append(path)

    def keep(self, name: str, value: Any) -> None:
        """Leave a value in the folder, whole or not at all."""
        part = self.folder / f"{name}.{self.seen.rank}.part"
        torch.save(value, part)
        os.replace(part, self.folder / f"{name}.pt")

    def kept(self, name: str) -> Any:
        """Return what `keep` was given, or None."""
        path = self.folder / f"{name}.pt"
        # The ranks' batches may hold anything; they come from the same program, through a folder of this user's alone.
        return torch.load(path, map_location="cpu", weights_only=False) if path.exists() else None

    def keep_batch(self, name: str, value: Any) -> None:
        """Leave a batch for the single rank; one that can't be is noted, and then nothing is compared."""
        try:
            self.keep(name, value)
        except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
            self.seen.incomparable = f"a batch can't be handed on: {error}"

    def finish(self) -> None:
        """Leave the observation in the folder."""
        path = self.folder / f"{self.mode}-seen-{self.seen.rank}.json"
        path.write_text(to_json(self.seen))
        self._done(self.seen.rank).touch()

    def leave(self) -> None:
        """End this process, with what was seen, once the other ranks have come as far."""
        self.finish()
        others = [self._done(rank) for rank in range(self.seen.size)]
        deadline, pause = time.monotonic() + _PARTING_S, threading.Event()
        while not all(path.exists() for path in others) and time.monotonic() < deadline:
            pause.wait(0.01)
        os._exit(0)

    def _done(self, rank: int) -> Path:
        return self.folder / f"{self.mode}-done-{rank}"

    def _name(self, parameters: list[Tensor], models: Models) -> list[str]:
        names: list[str] = []
        for number, parameter in enumerate(parameters):
            name = self._names.get(id(parameter)) or models.name(parameter) or f"parameter {number}"
            if name in names:  # of another model
                name = f"{name} ({number})"
            self._names[id(parameter)] = name
            names.append(name)
        return names

    def _share_weights(self, name: str, parameters: list[Tensor]) -> None:
        """Leave what a step on several ranks has made of the weights, or as the only rank go on with that."""
        names = [self._names.get(id(parameter), "") for parameter in parameters]
        if self.mode == "parts":
            if self.seen.rank == 0:
                self.keep(name, dict(zip(names, map(as_bare, parameters), strict=True)))
            return
        weights = self.kept(name) or {}
        with torch.no_grad():
            for its_name, parameter in zip(names, parameters, strict=True):
                if its_name in weights and weights[its_name].shape == parameter.shape:
                    parameter.copy_(weights[its_name])


def as_bare(tensor: Tensor) -> Tensor:
    """The tensor's values alone, in memory of their own, on the CPU."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.cpu().clone()


def _parameters(optimizer: Any) -> list[Tensor]:
    """The optimizer's parameters; those of which each rank has a part (DTensor) can't be compared."""
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in everything if not hasattr(parameter, "to_local")]


def _random_state() -> tuple[Any, ...]:
    cuda = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    of_numpy = numpy.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(of_numpy), tuple(cuda)

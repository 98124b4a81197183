"""Weights on disk: written once for all ranks, whole or not at all, and read back on any rank under any wrapper."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch import distributed as dist

from samestep.comm.base import Communicator
from samestep.comm.select import communicator_for
from samestep.errors import CheckpointError, MismatchError, MissingCheckpointError, SaveError
from samestep.run.files import replace_file
from samestep.run.names import bare_names, bare_state, renaming, without_wrapper
from samestep.run.ranks import ranks_of
from samestep.run.sealed import read_sealed, write_sealed
from samestep.world import World

__all__ = ["LoadedKeys", "load", "save"]

Path = str | os.PathLike[str]


class LoadedKeys(NamedTuple):
    """Which names did not fit: those of the model that the file lacks, and those of the file that the model lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def save(model_or_state_dict: nn.Module | Mapping[str, Any], path: Path, *, group: object = None) -> None:
    """Write a model's weights to the file `path`: called on every rank, written by rank 0.

    model_or_state_dict: a model, wrapped or not, whose `state_dict()` is saved; or such a dict, or any dict of
    tensors, numbers, text, lists and dicts. Names are those of the model without wrappers: no "module." at any depth.
    (Of a dict nothing but names is known; there "module." goes where all names begin with it.)

    group: whose ranks call this: a torch.distributed process group or a Communicator; None is the default group, or a
    single rank where nobody launched more. All return once the file is there, under its name and on the disk.

    The file is what torch.save writes, so torch.load reads it, with a checksum that `load` looks at. Until it is
    whole, what was at `path` before stays, also when rank 0 is killed: see `replace_file`.

    Raises on every rank, naming the one where it happened: SaveError (also an OSError) where the system refuses,
    CheckpointError for contents that `load` would refuse, TypeError for what is no model and no dict or no path,
    MismatchError for different paths. The old file is untouched then.
    """
    ranks = ranks_of(group)
    target: str | None = None
    state: Mapping[str, Any] = {}
    problem: Exception | None = None
    try:
        target, state = os.path.abspath(_text(path)), _state_of(model_or_state_dict)
    except Exception as error:  # noqa: BLE001 - raised below, on every rank: one that left here would be waited for
        problem = error
    _raise_together(ranks, target, problem)
    targets: list[str] = ranks.all_gather_object(target)
    if len(set(targets)) > 1:
        lines = "\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(targets))
        raise MismatchError(f"save: rank 0 writes for all, so every rank must name the same path:\n{lines}")
    if ranks.rank == 0:
        try:
            replace_file(targets[0], lambda file: write_sealed(state, file))
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            problem = error
    _raise_together(ranks, targets[0], problem)


@overload
def load(path: Path, model: None = None, *, map_location: Any = None) -> dict[str, Any]: ...
@overload
def load(path: Path, model: nn.Module, *, map_location: Any = None, strict: bool = True) -> LoadedKeys: ...
def load(
    path: Path, model: nn.Module | None = None, *, map_location: Any = None, strict: bool = True
) -> dict[str, Any] | LoadedKeys:
    """Read weights from a file of `save` or of torch.save, on this rank alone.

    With a `model`, wrapped or not, its parameters and buffers get the values, where they are; whichever of the two was
    saved with "module." and has it now does not matter. Returns the names that did not fit, which without `strict` is
    no error. Without a model, returns the state dict, with names without "module.", on this rank's own device: that of
    the default group, or else `World.from_env().device`.

    map_location: as torch.load's, instead of these places. Only tensors and plain values are read, never code
    (weights_only).

    Raises MissingCheckpointError (also a FileNotFoundError), and CheckpointError (also a RuntimeError) for a file that
    is cut off, has changed since it was saved, or is something else, and for names or shapes that do not fit, with
    torch's text. The model is as before then. A file of torch.save has no checksum: what changed in it may go unseen.
    """
    where, place = os.path.abspath(_text(path)), map_location
    if place is None:
        place = _own_device() if model is None else "cpu"
    try:
        with open(where, "rb") as file:
            state = read_sealed(file, place)
    except FileNotFoundError as error:
        raise MissingCheckpointError(f"{_rank()}{where} is not there; give the path that was saved to") from error
    except OSError as error:
        raise CheckpointError(f"{_rank()}{where} can't be read: {error.strerror or error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{_rank()}{where} {error}") from error
    if model is None:
        return dict(without_wrapper(state))
    return _put(state, model, f"{_rank()}{where}", strict)


def _put(state: Mapping[str, Any], model: nn.Module, where: str, strict: bool) -> LoadedKeys:
    """Copy the state into the model, or raise CheckpointError and leave the model as it was."""
    own = model.state_dict()
    bare = bare_names(model)
    its_name = {bare(name): name for name in own}
    fitting = renaming(state, its_name)
    renamed = type(own)((its_name.get(fitting[name], fitting[name]), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        parts = {bare(path): path for path, _ in model.named_modules(remove_duplicate=False)}
        fits = renaming(versions, parts)
        renamed._metadata = {parts.get(fits[path], path): of for path, of in versions.items()}  # type: ignore[attr-defined]
    before = None if _fits(renamed, own, strict) else {name: _copy(value) for name, value in own.items()}
    try:
        missing, unexpected = model.load_state_dict(renamed, strict=strict)
    except Exception as error:
        if before is not None:
            _restore(own, before)
        raise CheckpointError(f"{where} does not fit the model, which is as it was: {error}") from error
    return LoadedKeys(list(missing), list(unexpected))


def _fits(state: Mapping[str, Any], own: Mapping[str, Any], strict: bool) -> bool:
    """Whether loading can only go well. A model with hooks of its own may well take what is not alike by name."""
    if strict and state.keys() != own.keys():
        return False
    return all(_alike(state[name], own[name]) for name in own.keys() & state.keys())


def _alike(given: Any, mine: Any) -> bool:
    if not isinstance(mine, Tensor):  # state beyond tensors is for the module to judge
        return False
    return not _has_no_shape(mine) and isinstance(given, Tensor) and given.shape == mine.shape


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and not _has_no_shape(value) else None


def _restore(own: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, value in before.items():
            if value is not None:
                own[name].copy_(value)


def _has_no_shape(tensor: Tensor) -> bool:
    return nn.parameter.is_lazy(tensor)  # of a lazy module before its first forward


def _state_of(given: Any) -> Mapping[str, Any]:
    if isinstance(given, nn.Module):
        return bare_state(given)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"save: expected a model or a state dict with names, got {type(given).__name__}")
    return without_wrapper(given)


def _text(path: Path) -> str:
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"expected a path as text, got {type(text).__name__}")
    return text


def _raise_together(ranks: Communicator, target: str | None, problem: Exception | None) -> None:
    """Raise, on every rank, the first rank's problem, if any has one."""
    mine = None if problem is None else (_kind(problem), str(getattr(problem, "strerror", None) or problem))
    for rank, met in enumerate(ranks.all_gather_object(mine)):
        if met is not None:
            kind, said = met
            what = f"{target} could not be saved: " if kind is SaveError else ""
            raise kind(f"rank {rank}: {what}{said}") from problem


def _kind(problem: Exception) -> type[Exception]:
    for kind, raised in ((OSError, SaveError), (TypeError, TypeError), (CheckpointError, CheckpointError)):
        if isinstance(problem, kind):
            return raised
    return SaveError


def _own_device() -> torch.device:
    if dist.is_available() and dist.is_initialized():
        return communicator_for().device
    return World.from_env().device


def _rank() -> str:
    known = dist.is_available() and dist.is_initialized()
    return f"rank {dist.get_rank()}: " if known else ""

"""Names of weights, with and without what wrappers put into them: "module." and "_orig_mod.", at any depth."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations
from typing import Any

from torch import nn

__all__ = ["bare_names", "bare_state", "renaming", "without_wrapper"]

# A wrapper's class, by name as other libraries and subclasses have them too, and what it calls the model inside.
_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
_INSIDE = frozenset(_WRAPPERS.values())
_MOST_WRAPPERS = 8  # of one name that are tried in all combinations


def bare_state(module: nn.Module) -> "OrderedDict[str, Any]":
    """Return the module's `state_dict()` with the names that it would have without wrappers, outside or within."""
    return _renamed(module.state_dict(), bare_names(module))


def bare_names(module: nn.Module) -> Callable[[str], str]:
    """Return what turns the name of a part of `module`, or of its state, into the name without wrappers."""
    inside = {
        _joined(path, name) for path, part in module.named_modules(remove_duplicate=False) if (name := _inside(part))
    }

    def bare(name: str) -> str:
        steps = name.split(".")
        return ".".join(step for n, step in enumerate(steps) if ".".join(steps[: n + 1]) not in inside)

    return bare


def without_wrapper(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take a wrapper's name off a state of which nothing but the names is known: where all of them begin with it."""
    while state and any(all(name.startswith(f"{inside}.") for name in state) for inside in _INSIDE):
        state = _renamed(state, lambda name: name.partition(".")[2])
    return state


def renaming(given: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Return, for each name in `given`, the name under which it fits to `wanted`, which are names without wrappers.

    Any of a name's wrappers may go. Which ones is decided for all names alike where that can be: those in front, or
    all; else for each name alone. Where nothing fits, a name stays.
    """
    names, goal = list(given), set(wanted)
    alike = [{name: name for name in names}]
    while any(name.partition(".")[0] in _INSIDE for name in alike[-1].values()):
        alike.append({name: _without_first(now) for name, now in alike[-1].items()})
    alike.append({name: ".".join(part for part in name.split(".") if part not in _INSIDE) for name in names})
    best = max(filter(_is_one_to_one, alike), key=lambda found: len(goal & set(found.values())))
    each = {name: now if now in goal else _fitting(name, goal) or now for name, now in best.items()}
    return each if _is_one_to_one(each) else best


def _is_one_to_one(found: Mapping[str, str]) -> bool:
    return len(set(found.values())) == len(found)


def _fitting(name: str, goal: Collection[str]) -> str | None:
    """The name without as few of its wrappers as make it fit; None where that can't be."""
    parts = name.split(".")
    places = [n for n, part in enumerate(parts) if part in _INSIDE][:_MOST_WRAPPERS]
    for count in range(len(places) + 1):
        for gone in combinations(places, count):
            shorter = ".".join(part for n, part in enumerate(parts) if n not in gone)
            if shorter in goal:
                return shorter
    return None


def _inside(part: nn.Module) -> str | None:
    """What a wrapper calls its model; None for anything that is no wrapper."""
    for kind in type(part).__mro__:
        name = _WRAPPERS.get(kind.__name__)
        if name is not None and list(part._modules) == [name]:
            return name
    return None


def _without_first(name: str) -> str:
    first, _, rest = name.partition(".")
    return rest if first in _INSIDE else name


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> "OrderedDict[str, Any]":
    renamed = OrderedDict((rename(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:  # what torch keeps beside the names: the version of each part
        renamed._metadata = OrderedDict((rename(path), of) for path, of in versions.items())  # type: ignore[attr-defined]
    return renamed

"""Do something to a module once it has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module `name`: at once if it has been imported, else as soon as it is.

    What `then` raises in the latter case comes out of that import. Other modules may be half imported at that time, so
    `then` had better import nothing.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds nothing itself: it lets the others find the one module, and adds to how that is executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # it is not there now; it may be later
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            del loader.exec_module  # as it was: the one of its class
            execute(module)
            self._then(module)

        loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec

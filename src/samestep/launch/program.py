"""The command line of a worker, after a look at whether there is anything to run."""

import importlib.machinery
import os
import sys
from collections.abc import Sequence

__all__ = ["find_module", "module_command", "script_command"]


def script_command(script: str, args: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the argument vector for `python script args`; a directory or archive with a `__main__.py` will do too.

    Raises ValueError where there is no such file, or it can't be read.
    """
    if not os.path.exists(script):
        raise ValueError(f"script {script!r} does not exist{_where(script)}")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise ValueError(f"script {script!r} is a directory without a __main__.py; expected a Python file")
    if not os.access(script, os.R_OK):
        raise ValueError(f"script {script!r} can't be read; its permissions forbid it")
    # What begins with a dash would be a flag of Python's.
    return (sys.executable, os.path.join(".", script) if script.startswith("-") else script, *args)


def module_command(module: str, args: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the argument vector for `python -m module args`.

    Nothing is imported to find it, not even its packages: their code is for the workers to run. Raises
    ValueError where there is no such module, or it is a package that can't be run.
    """
    spec = find_module(module)
    if spec is None:
        raise ValueError(f"module {module!r} can't be found in the current directory or among the installed ones")
    if spec.submodule_search_locations is not None and find_module(f"{module}.__main__") is None:
        raise ValueError(f"module {module!r} is a package without a __main__ module, so it can't be run")
    return (sys.executable, "-m", module, *args)


def _where(script: str) -> str:
    return "" if os.path.isabs(script) else f" in {_here() or 'the current folder, which is gone'}"


def _here() -> str:
    """The current folder, or nothing if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def find_module(module: str) -> importlib.machinery.ModuleSpec | None:
    """Asks Python's finders for a module as an import would, one name at a time, and imports nothing.

    A worker looks in its current directory first.
    """
    found = None
    places: Sequence[str] | None = None
    parents: list[str] = []
    for name in module.split("."):
        parents.append(name)
        full_name = ".".join(parents)
        if not name or (found is not None and found.submodule_search_locations is None):
            return None
        found = _ask_finders(full_name, places)
        if found is None:
            return None
        places = found.submodule_search_locations
    return found


def _ask_finders(full_name: str, places: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    if places is None and not getattr(sys.flags, "safe_path", False):
        found = importlib.machinery.PathFinder.find_spec(full_name, [_here()])
        if found is not None:
            return found
    for finder in sys.meta_path:
        found = finder.find_spec(full_name, places)
        if found is not None:
            return found
    return None

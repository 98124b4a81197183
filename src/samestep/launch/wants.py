"""Finds out, without running anything, what a script will import that takes long."""

import ast
import os
import re
from collections.abc import Iterable, Sequence

from samestep.launch.program import find_module

__all__ = ["wanted"]

# Whoever imports one of these needs torch.
_ON_TORCH = frozenset({"accelerate", "lightning", "pytorch_lightning", "samestep", "timm", "torch", "transformers"})
# The first optimizer imports this, and so does torch's DistributedDataParallel.
_LATER = "torch._dynamo"
_SIGNS = ("optim", "DistributedDataParallel")
# What changes the environment, or where modules are found; reading either is no such thing.
_WRITES = re.compile(
    r"environ(b?\[[^\]]*\]\s*=[^=]|\.(setdefault|update|pop|clear)\b)|\bputenv\b|\bunsetenv\b|\bload_dotenv\b"
    r"|del\s+os\.environ|sys\.path(\.(insert|append|extend)\b|\[[^\]]*\]\s*=|\s*=[^=]|\s*\+=)"
)
# So many files of the script's own are looked at, and no longer ones.
_MAX_FILES, _MAX_BYTES = 200, 1 << 20


def wanted(argv: Sequence[str]) -> list[str]:
    """Returns the names of modules that `script args` or `-m module args` will import: torch, and maybe its dynamo.

    Files of the script's own that it imports are looked at too. What can't be found or read is passed over: Python
    will say so when it runs. Nothing is named for a script that may change the environment, or where modules are
    found, before it imports torch: torch reads variables then. Dynamo is not named if it may change them at all.
    """
    sources = list(_sources(argv))
    names = {name.partition(".")[0] for source in sources for name in _imports(source)}
    if not names & _ON_TORCH or any(_sets_the_stage(source) for source in sources):
        return []
    writes = any(_WRITES.search(source) for source in sources)
    takes_steps = any(sign in source for source in sources for sign in _SIGNS)
    return ["torch", _LATER] if takes_steps and not writes else ["torch"]


def _sources(argv: Sequence[str]) -> Iterable[str]:
    """The texts of the script and of the files that it imports from its own folder, directly or not."""
    first = _file_of(argv)
    if first is None:
        return
    folder = os.getcwd() if argv[0] == "-m" else os.path.dirname(first)
    waiting, seen = [first], {first}
    while waiting and len(seen) <= _MAX_FILES:
        source = _text(waiting.pop())
        if source is None:
            continue
        yield source
        for name in _imports(source):
            for path in _beside(folder, name):
                if path not in seen and os.path.isfile(path):
                    seen.add(path)
                    waiting.append(path)


def _file_of(argv: Sequence[str]) -> str | None:
    if argv[0] != "-m":
        script = os.path.realpath(argv[0])
        return os.path.join(script, "__main__.py") if os.path.isdir(script) else script
    found = find_module(argv[1])
    if found is not None and found.submodule_search_locations is not None:
        found = find_module(f"{argv[1]}.__main__")
    return None if found is None else found.origin


def _beside(folder: str, name: str) -> list[str]:
    parts = name.split(".")
    paths = [os.path.join(folder, *parts[:n]) for n in range(1, len(parts) + 1)]
    return [file for path in paths for file in (path + ".py", os.path.join(path, "__init__.py"))]


def _sets_the_stage(source: str) -> bool:
    """Whether a file writes to os.environ or sys.path above its first import of torch, or without one."""
    lines = [n for n, line in enumerate(source.splitlines()) if _WRITES.search(line)]
    if not lines:
        return False
    heavy = [
        node.lineno - 1
        for node in ast.walk(_tree(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and {name.partition(".")[0] for name in _names(node)} & _ON_TORCH
    ]
    return not heavy or lines[0] < min(heavy)


def _text(path: str) -> str | None:
    if not os.path.isfile(path):  # reading from a pipe would take it away from the script
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return None


def _imports(source: str) -> list[str]:
    return [name for node in ast.walk(_tree(source)) for name in _names(node)]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _tree(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])

"""The rules that the tree keeps: each takes modules and returns what breaks it, one line for each place."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise

from architecture_tree import Import, Module, package, walk

__all__ = [
    "argument_counts",
    "cycles",
    "environment_readers",
    "exports",
    "function_sizes",
    "impure_modules",
    "layers",
    "module_sizes",
    "prints",
    "siblings",
    "sleepers",
    "slow_starters",
    "unfinished_work",
]

# Top to bottom: a room imports from itself and from those before it.
ROOMS = ("", "comm", "parallel", "data", "run", "launch", "inspect", "cli", "testing")
LOBBY = frozenset(
    {"errors", "world", "launchers", "variables", "hostlist", "clock", "after_import"}
)  # what may lie in no room
FREE = frozenset({"samestep", "samestep.__main__", "samestep.launch.__main__"})

# Rivals: none imports another.
TRANSPORTS = ("samestep.comm.c10d", "samestep.comm.shm.communicator", "samestep.comm.threads")

PURE = frozenset(
    f"samestep.{name}"
    for name in (
        "comm.ordered",
        "comm.algorithms",
        "parallel.plan",
        "parallel.arrivals",
        "data.epochs",
        "data.sharding",
        "data.stream",
        "inspect.comparison",
        "inspect.finding",
        "inspect.findings",
        "inspect.merging",
        "inspect.observation",
        "inspect.report",
        "inspect.samples",
        "launch.ending",
        "launch.events",
        "launch.logs",
        "launch.nodes",
        "launch.options",
        "launch.place",
        "launch.rows",
        "launch.spec",
        "launch.told",
    )
)
_WORLDLY = ("torch.distributed", "os", "time", "socket", "subprocess", "threading")

_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
_UNFINISHED = re.compile(r"\b({})\b".format("|".join(word.upper() for word in ("todo", "fixme", "xxx"))))

MAX_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 400, 60, 8

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def layers(tree: list[Module]) -> list[str]:
    """Modules import from their own room and from rooms above it."""
    known, broken = package(tree), []
    for m in known.values():
        if m.room not in ROOMS or (m.room == "" and m.name not in FREE and m.name.split(".")[1] not in LOBBY):
            broken.append(f"{m.path}: no known room; add it to the rules, in its place")
    for m, imported, other in _inner_imports(known):
        if m.name in FREE or other.name in FREE or not {m.room, other.room} <= set(ROOMS):
            continue
        if ROOMS.index(other.room) > ROOMS.index(m.room):
            broken.append(f"{m.path}:{imported.line}: imports {other.name}, from a room below")
    return broken


def cycles(tree: list[Module]) -> list[str]:
    """No module imports itself by way of others, not even inside a function."""
    known = package(tree)
    edges: dict[str, set[str]] = {name: set() for name in known}
    for m, imported, other in _inner_imports(known):
        if not imported.for_types:
            edges[m.name].add(other.name)
    return [" -> ".join(path) for path in _cycles(edges)]


def siblings(tree: list[Module]) -> list[str]:
    """Transports don't import one another, nor do commands."""
    known = package(tree)
    commands = {m.name for m in known.values() if m.room == "cli" and not m.is_package} - {
        "samestep.cli.flags",
        "samestep.cli.main",
    }
    return [
        f"{m.path}:{imported.line}: imports its sibling {other.name}"
        for m, imported, other in _inner_imports(known)
        if m is not other and any({m.name, other.name} <= set(group) for group in (TRANSPORTS, commands))
    ]


def module_sizes(tree: list[Module]) -> list[str]:
    """Files have at most 400 lines."""
    return [f"{m.path}: {n} lines" for m in tree if (n := len(m.text.splitlines())) > MAX_LINES]


def function_sizes(tree: list[Module]) -> list[str]:
    """Functions have at most 60 lines besides their docstring."""
    return [
        f"{m.path}:{f.lineno}: {f.name} has {n} lines"
        for m, _, f in _functions(tree)
        if (n := f.end_lineno - f.lineno + 1 - _docstring_lines(f)) > MAX_FUNCTION_LINES  # type: ignore[operator]
    ]


def argument_counts(tree: list[Module], exempt: Collection[str] = ()) -> list[str]:
    """Functions take at most 8 arguments besides self; `exempt` names those with a signature of torch's."""
    broken = []
    for m, owner, f in _functions(tree):
        a = f.args
        names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_ARGUMENTS and f"{owner}{f.name}" not in exempt:
            broken.append(f"{m.path}:{f.lineno}: {owner}{f.name} takes {count} arguments")
    return broken


def environment_readers(tree: list[Module]) -> list[str]:
    """Nothing but `world` looks at the process's environment."""
    return [
        f"{m.path}:{line}: {what}"
        for m in package(tree).values()
        if m.name != "samestep.world"
        for line, what in _uses(m, "os", _ENVIRONMENT)
    ]


def exports(tree: list[Module]) -> list[str]:
    """Every module has a docstring and a sorted `__all__` of names that it binds; an empty package may do without."""
    broken: list[str] = []
    for m in package(tree).values():
        if (m.is_package and not m.tree.body) or m.name == "samestep.__main__":
            continue
        if ast.get_docstring(m.tree) is None:
            broken.append(f"{m.path}: no docstring")
        listed = _listed(m)
        if listed is None:
            if not m.is_package or m.name == "samestep":
                broken.append(f"{m.path}: no __all__")
            continue
        broken += [f"{m.path}: __all__ is not sorted at {b!r}" for a, b in pairwise(listed) if a >= b]
        broken += [
            f"{m.path}: {name!r} in __all__ is not defined" for name in listed if name not in _bound(m.tree.body)
        ]
    return broken


def impure_modules(tree: list[Module]) -> list[str]:
    """Modules that decide know neither clock nor processes nor torch.distributed."""
    known = package(tree)
    broken = [f"{name}: listed as pure, but it is not there" for name in sorted(PURE - known.keys())]
    for m in (known[name] for name in sorted(PURE & known.keys())):
        imported = {i.line: i.target for i in m.imports() if _is_below(i.target, _WORLDLY)}
        broken += [f"{m.path}:{line}: imports {target}" for line, target in imported.items()]
        used = _uses(m, "torch", {"distributed"})
        broken += [f"{m.path}:{line}: {what}" for line, what in used if line not in imported]
    return broken


def slow_starters(tree: list[Module]) -> list[str]:
    """What the launcher imports doesn't import torch, by whatever way, before it is needed."""
    known = package(tree)
    edges: dict[str, set[str]] = {name: set() for name in known}
    torch_at: dict[str, int] = {}
    for m in known.values():
        edges[m.name] |= set(_ancestors(m.name, known))
        for i in (i for i in m.imports() if i.at_top and not i.for_types):
            if _is_below(i.target, ("torch",)):
                torch_at.setdefault(m.name, i.line)
            edges[m.name] |= _reached(i, known)
    broken = []
    for m in (m for m in known.values() if m.room in ("", "launch", "cli")):
        for name in sorted(_closure(m.name, edges) & torch_at.keys()):
            broken.append(f"{m.path}: importing it imports torch at {known[name].path}:{torch_at[name]}")
    return broken


def sleepers(tree: list[Module], exempt: Collection[str] = ()) -> list[str]:
    """Nobody sleeps: waits are for a condition, with a deadline."""
    return [
        f"{m.path}:{line}: {what}" for m in tree if m.path not in exempt for line, what in _uses(m, "time", {"sleep"})
    ]


def prints(tree: list[Module]) -> list[str]:
    """Only the command and the launcher write to the screen."""
    return [
        f"{m.path}:{node.lineno}: prints"
        for m in package(tree).values()
        if m.room not in ("cli", "launch")
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def unfinished_work(tree: list[Module]) -> list[str]:
    """No notes of work left for later."""
    return [
        f"{m.path}:{number}: {found.group()}"
        for m in tree
        for number, line in enumerate(m.text.splitlines(), 1)
        if (found := _UNFINISHED.search(line))
    ]


def _inner_imports(known: Mapping[str, Module]) -> Iterator[tuple[Module, Import, Module]]:
    """Yield who imports what of the package: a module, if there is one of that name, or else what it is taken from."""
    for m in known.values():
        for imported in m.imports():
            for name in (imported.target, imported.target.rpartition(".")[0]):
                if name in known:
                    yield m, imported, known[name]
                    break


def _reached(imported: Import, known: Mapping[str, Module]) -> set[str]:
    """Return the modules that run because of an import: also the packages on the way."""
    target = imported.target
    return {name for name in (target, target.rpartition(".")[0], *_ancestors(target, known)) if name in known}


def _ancestors(name: str, known: Mapping[str, Module]) -> list[str]:
    parts = name.split(".")
    return [parent for n in range(1, len(parts)) if (parent := ".".join(parts[:n])) in known]


def _closure(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found, left = {start}, [start]
    while left:
        new = edges[left.pop()] - found
        found |= new
        left += new
    return found


def _cycles(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield one shortest way from each module back to itself, each cycle once."""
    seen: set[frozenset[str]] = set()
    for start in sorted(edges):
        ways = [[start]]
        reached = {start}
        while ways:
            way = ways.pop(0)
            if start in edges[way[-1]]:
                if frozenset(way) not in seen:
                    seen.add(frozenset(way))
                    yield [*way, start]
                break
            new = sorted(edges[way[-1]] - reached)
            reached |= set(new)
            ways += [[*way, name] for name in new]


def _functions(tree: list[Module]) -> Iterator[tuple[Module, str, _Function]]:
    """Yield each function with the name of the class that it is defined in and a dot, if it is."""
    for m in tree:
        owners = {
            id(f): f"{c.name}."
            for c in ast.walk(m.tree)
            if isinstance(c, ast.ClassDef)
            for f in ast.iter_child_nodes(c)
        }
        for f in ast.walk(m.tree):
            if isinstance(f, _Function):
                yield m, owners.get(id(f), ""), f


def _docstring_lines(f: _Function) -> int:
    if ast.get_docstring(f) is None:
        return 0
    return f.body[0].end_lineno - f.body[0].lineno + 1  # type: ignore[operator]


def _uses(m: Module, library: str, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Find `library.name`, under whatever name `library` was imported, and `from library import name`."""
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == library or (alias.asname is None and alias.name.startswith(f"{library}."))
    } | {library}
    for node, _, _ in walk(m.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in names and node.value.id in aliases:
                yield node.lineno, f"{library}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == library:
            yield from ((node.lineno, f"{library}.{a.name}") for a in node.names if a.name in {*names, "*"})


def _is_below(target: str, names: Collection[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in names)


def _listed(m: Module) -> list[str] | None:
    for node in m.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(target) for target in targets] == ["__all__"]:
                names: list[str] = ast.literal_eval(node.value)
                return names
    return None


def _bound(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements bind in their own scope, those for type checkers included."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, _Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            names |= _bound(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))
        else:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names

"""The source tree as the rules of architecture see it: modules, and who imports whom. Reads, imports nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Import", "Module", "module", "modules", "package", "walk"]

_PACKAGE = "samestep"


@dataclass(frozen=True)
class Import:
    """One imported name: `target` as written (`a.b.c` for `from a.b import c`), and where it stands."""

    target: str
    line: int
    at_top: bool  # runs when the module is imported
    for_types: bool  # under `if TYPE_CHECKING`


@dataclass(frozen=True)
class Module:
    """A parsed file; `name` is dotted for modules of the package, and the path for other files."""

    name: str
    path: str
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def room(self) -> str:
        """The folder within the package; empty for modules that lie directly in it."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (self.is_package and len(parts) == 2) else ""

    def imports(self) -> Iterator[Import]:
        for node, at_top, for_types in walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                yield Import(name, node.lineno, at_top, for_types)

    def _base(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".")
        up = node.level - 1 if self.is_package else node.level
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def walk(tree: ast.Module) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Go through all nodes; tell for each whether it runs at import, and whether it is there for type checkers only."""

    def visit(node: ast.AST, at_top: bool, for_types: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
        yield node, at_top, for_types
        inside = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from visit(statement, inside, True)
            rest: list[ast.AST] = [node.test, *node.orelse]
        else:
            rest = list(ast.iter_child_nodes(node))
        for child in rest:
            yield from visit(child, inside, for_types)

    return visit(tree, True, False)


def module(path: str, text: str) -> Module:
    parts = Path(path).with_suffix("").parts
    name = path
    if parts[:2] == ("src", _PACKAGE):
        name = ".".join(parts[1:-1] if parts[-1] == "__init__" else parts[1:])
    return Module(name, path, text, ast.parse(text, path))


def modules(files: Mapping[str, str]) -> list[Module]:
    """Parse files given as path (from the repository's root) and text."""
    return [module(path, text) for path, text in sorted(files.items())]


def package(tree: list[Module]) -> dict[str, Module]:
    """Return the package's own modules by name."""
    return {m.name: m for m in tree if m.name.split(".")[0] == _PACKAGE}

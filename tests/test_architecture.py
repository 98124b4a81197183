"""The tree keeps its own rules, and every rule bites."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import architecture_rules as rules
import pytest
from architecture_tree import Module, modules

from samestep.cli import launch
from samestep.cli.main import parser

_ROOT = Path(__file__).resolve().parents[1]
_TREE = modules(
    {
        str(path.relative_to(_ROOT)): path.read_text("utf-8")
        for folder in ("src/samestep", "tests")
        for path in (_ROOT / folder).rglob("*.py")
    }
)

# Signatures that torch has, name by name.
_LIKE_TORCH = ("DataLoader.__init__", "DistributedDataParallel.__init__", "SyncBatchNorm.__init__")

Rule = Callable[[list[Module]], list[str]]

_RULES: dict[str, Rule] = {
    "layers": rules.layers,
    "cycles": rules.cycles,
    "siblings": rules.siblings,
    "module_sizes": rules.module_sizes,
    "function_sizes": rules.function_sizes,
    "argument_counts": partial(rules.argument_counts, exempt=_LIKE_TORCH),
    "environment_readers": rules.environment_readers,
    "exports": rules.exports,
    "impure_modules": rules.impure_modules,
    "slow_starters": rules.slow_starters,
    "sleepers": rules.sleepers,
    "prints": rules.prints,
    "unfinished_work": rules.unfinished_work,
}


@pytest.mark.parametrize("rule", _RULES)
def test_the_tree_keeps_the_rule(rule: str) -> None:
    assert _RULES[rule](_TREE) == []


def test_the_tree_is_there() -> None:
    paths = {m.path for m in _TREE}
    assert {"src/samestep/__init__.py", "src/samestep/comm/base.py", "tests/test_architecture.py"} <= paths


def test_every_exception_is_needed() -> None:
    for name in _LIKE_TORCH:
        others = [other for other in _LIKE_TORCH if other != name]
        assert [broken for broken in rules.argument_counts(_TREE, others) if name in broken], f"{name} needs none"


def _spelled(flags: str) -> set[str]:
    """Return the flags, and those of several words also with underscores, as torchrun takes them."""
    names = {"-h", "--help", *flags.split()}
    return names | {"--" + name[2:].replace("-", "_") for name in names if name.startswith("--")}


_RUN = """
--drop-in --duplicate-stderr-filters --duplicate-stdout-filters --event-log-handler --local-addr
--local-ranks-filter --log-dir --logs-specs --master-addr --master-port --max-restarts --module
--monitor-interval --nnodes --no-prefix --no-python --node-rank --nproc-per-node --numa-binding
--rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id --redirects --role --run-path
--shutdown-timeout --signals-to-handle --standalone --start-method --tee --virtual-local-rank -m -r
-t
"""
_FLAGS: dict[str, set[str]] = {
    "samestep": {"--help", "--version", "-h"},
    "samestep check": {
        "--help",
        "--module",
        "--nproc-per-node",
        "--pass-local-rank",
        "--steps",
        "--timeout",
        "-h",
        "-m",
    },
    "samestep run": _spelled(_RUN),
    "python -m samestep.launch": _spelled(_RUN + "--local-rank-spelling --use-env"),
}


def _flags(command: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Return the option strings of a command and of all its subcommands, by their full names."""
    found = {command.prog: {flag for action in command._actions for flag in action.option_strings}}
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                found |= _flags(subcommand)
    return found


def test_flags_are_a_promise() -> None:
    """A flag that is gone or renamed breaks somebody's script: change this list only on purpose."""
    assert _flags(parser()) | _flags(launch.parser()) == _FLAGS


def test_new_flags_are_noticed() -> None:
    command = argparse.ArgumentParser(prog="tool", add_help=False)
    command.add_subparsers().add_parser("go", add_help=False).add_argument("-f", "--fast", action="store_true")
    assert _flags(command) == {"tool": set(), "tool go": {"--fast", "-f"}}


def _long(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


_NINE = ", ".join(f"x{i}" for i in range(9))

# What breaks each rule: files, and what the rule says of them.
_BREACHES: list[tuple[str, dict[str, str], list[str]]] = [
    (
        "layers",
        {"comm/a.py": "from samestep.data import b", "data/b.py": "", "errors.py": "import samestep.comm.a"},
        [
            "comm/a.py:1: imports samestep.data.b, from a room below",
            "errors.py:1: imports samestep.comm.a, from a room",
        ],
    ),
    (
        "layers",
        {"comm/a.py": "def f():\n    from ..testing import b", "testing/b.py": "from samestep.comm import a"},
        ["comm/a.py:2: imports samestep.testing.b, from a room below"],
    ),
    (
        "layers",
        {"comm/a.py": "if TYPE_CHECKING:\n    from samestep.run.b import C", "run/b.py": ""},
        ["comm/a.py:2: imports samestep.run.b"],
    ),
    ("layers", {"utils.py": "", "misc/a.py": ""}, ["misc/a.py: no known room", "utils.py: no known room"]),
    (
        "cycles",
        {
            "comm/a.py": "from . import b",
            "comm/b.py": "def f():\n    import samestep.comm.c",
            "comm/c.py": "from .a import x",
        },
        ["samestep.comm.a -> samestep.comm.b -> samestep.comm.c -> samestep.comm.a"],
    ),
    (
        "siblings",
        {"comm/c10d.py": "", "comm/threads.py": "from samestep.comm import c10d"},
        ["threads.py:1: imports its"],
    ),
    (
        "siblings",
        {"cli/main.py": "from samestep.cli import a", "cli/a.py": "def f():\n    from .b import g", "cli/b.py": ""},
        ["cli/a.py:2: imports its sibling samestep.cli.b"],
    ),
    ("module_sizes", {"comm/a.py": "\n" * 401}, ["comm/a.py: 401 lines"]),
    ("function_sizes", {"comm/a.py": _long(61)}, ["comm/a.py:1: f has 61 lines"]),
    (
        "argument_counts",
        {"comm/a.py": f"class C:\n    def f(self, {_NINE}): ..."},
        ["comm/a.py:2: C.f takes 9 arguments"],
    ),
    ("argument_counts", {"comm/a.py": "def f(a, b, /, c, d, *e, f, g, h, **i): ..."}, ["comm/a.py:1: f takes 9"]),
    (
        "environment_readers",
        {
            "comm/a.py": "import os\nos.environ['A']",
            "comm/b.py": "from os import getenv",
            "comm/c.py": "def f():\n    import os as o\n    o.putenv('a', 'b')",
            "comm/d.py": "import os.path\nos.unsetenv('a')",
        },
        ["a.py:2: os.environ", "b.py:1: os.getenv", "c.py:3: os.putenv", "d.py:2: os.unsetenv"],
    ),
    ("exports", {"comm/a.py": "__all__ = []"}, ["comm/a.py: no docstring"]),
    ("exports", {"comm/a.py": "'''A.'''"}, ["comm/a.py: no __all__"]),
    (
        "exports",
        {"comm/a.py": "'''A.'''\n__all__ = ['b', 'a']\na = b = 1"},
        ["comm/a.py: __all__ is not sorted at 'a'"],
    ),
    (
        "exports",
        {"comm/a.py": "'''A.'''\n__all__ = ['f']\nclass C:\n    def f(): ..."},
        ["'f' in __all__ is not defined"],
    ),
    ("exports", {"comm/__init__.py": "'''A.'''\n__all__: list = ['f']"}, ["'f' in __all__ is not defined"]),
    ("exports", {"__init__.py": "'''A.'''"}, ["src/samestep/__init__.py: no __all__"]),
    (
        "impure_modules",
        {"comm/ordered.py": "import torch.distributed as dist"},
        ["ordered.py:1: imports torch.distributed"],
    ),
    (
        "impure_modules",
        {"comm/ordered.py": "from torch import distributed"},
        ["ordered.py:1: imports torch.distributed"],
    ),
    ("impure_modules", {"comm/ordered.py": "import torch\ntorch.distributed.barrier()"}, ["ordered.py:2: torch.dist"]),
    ("impure_modules", {"launch/spec.py": "def f():\n    from os import path"}, ["spec.py:2: imports os.path"]),
    ("impure_modules", {"launch/spec.py": "from time import monotonic"}, ["spec.py:1: imports time.monotonic"]),
    (
        "slow_starters",
        {"launch/a.py": "import torch"},
        ["launch/a.py: importing it imports torch at src/samestep/launch/a"],
    ),
    (
        "slow_starters",
        {
            "cli/a.py": "from samestep.comm.b import c",
            "comm/__init__.py": "try:\n    from torch import x\nfinally: ...",
            "comm/b.py": "",
        },
        ["cli/a.py: importing it imports torch at src/samestep/comm/__init__.py:2"],
    ),
    (
        "slow_starters",
        {"errors.py": "", "__init__.py": "from torch import x"},
        ["__init__.py: ", "errors.py: importing"],
    ),
    ("sleepers", {"comm/a.py": "import time as t\nt.sleep(1)"}, ["comm/a.py:2: time.sleep"]),
    ("sleepers", {"comm/a.py": "from time import monotonic, sleep"}, ["comm/a.py:1: time.sleep"]),
    ("prints", {"comm/a.py": "def f():\n    print(1)"}, ["comm/a.py:2: prints"]),
    ("unfinished_work", {"comm/a.py": f"# {'fixme'.upper()}: later"}, ["comm/a.py:1: FIX"]),
    ("unfinished_work", {"comm/a.py": f"x = 1  # {'todo'.upper()}"}, ["comm/a.py:1: TO"]),
]


def _synthetic(files: dict[str, str]) -> list[Module]:
    return modules({f"src/samestep/{path}": text for path, text in files.items()})


@pytest.mark.parametrize(("rule", "files", "said"), _BREACHES, ids=[f"{b[0]}-{n}" for n, b in enumerate(_BREACHES)])
def test_the_rule_bites(rule: str, files: dict[str, str], said: list[str]) -> None:
    broken = [line for line in _RULES[rule](_synthetic(files)) if "listed as pure, but" not in line]
    assert len(broken) == len(said), broken
    for line, part in zip(broken, said, strict=True):
        assert part in line


def test_a_pure_module_that_moved_is_noticed() -> None:
    broken = rules.impure_modules(_synthetic({"comm/ordered.py": ""}))
    assert "samestep.launch.spec: listed as pure, but it is not there" in broken
    assert len(broken) == len(rules.PURE) - 1


def test_rules_let_pass_what_they_allow() -> None:
    tree = _synthetic(
        {
            "__init__.py": "'''A.'''\nif TYPE_CHECKING:\n    from samestep.testing.z import Z\n__all__ = ['Z']",
            "__main__.py": "from samestep.cli.main import main",
            "world.py": "'''A.'''\nimport os\n__all__ = ['E']\ndef f():\n    import torch\nif 1:\n    E = os.environ",
            "comm/__init__.py": "",
            "comm/a.py": "'''A.'''\nimport torch\nfrom samestep.world import E\n__all__ = ['E', 'torch']",
            "comm/b.py": "'''A.'''\nif TYPE_CHECKING:\n    from .c import x\n__all__ = ['x']",
            "comm/c.py": "'''A.'''\nfrom .b import x\n__all__ = ['x']",
            "cli/main.py": "'''A.'''\nfrom samestep.cli import go\n__all__ = ['go']\nprint(1)",
            "cli/go.py": "'''A.'''\n__all__ = []\ndef f():\n    import samestep.comm.a",
            "testing/z.py": "'''A.'''\nimport time\n__all__ = ['Z', 'f']\nZ, y = 1, time.monotonic()\n" + _long(60),
        }
    )
    for name, rule in _RULES.items():
        if name != "impure_modules":
            assert rule(tree) == [], name
    docstring = "    '''A.\n" + "\n" * 90 + "    '''\n"
    assert rules.function_sizes(_synthetic({"comm/a.py": _long(60).replace("\n", f"\n{docstring}", 1)})) == []
    assert rules.argument_counts(_synthetic({"comm/a.py": f"class C:\n    def f(self, {_NINE}): ..."}), ["C.f"]) == []
    assert rules.sleepers(_synthetic({"comm/a.py": "import time\ntime.sleep(1)"}), ["src/samestep/comm/a.py"]) == []

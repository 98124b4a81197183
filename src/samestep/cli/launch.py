"""`python -m samestep.launch`: `samestep run` for scripts that take their local rank as an argument.

It stands in for `python -m torch.distributed.launch`, which puts `--local-rank=N` before the script's own arguments.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from samestep.cli.flags import Flag, Formatter, add_flags, launch_options, values
from samestep.cli.main import Parser, leave, outcome
from samestep.launch import job
from samestep.launch.options import Options
from samestep.world import environment

__all__ = ["entry", "main", "parser"]

_DESCRIPTION = """\
Start N processes of a Python script as `samestep run` does, each with its
local rank as the first of its arguments: --local-rank=N.
"""
# torch passed --local_rank until 2.0, and scripts from then ask their argparse for that alone.
_SPELLINGS = {"hyphen": "--local-rank", "underscore": "--local_rank"}


def _spelling(text: str) -> str:
    if text not in _SPELLINGS:
        raise ValueError(f"got {text!r}, expected hyphen or underscore")
    return _SPELLINGS[text]


_FLAGS = (
    Flag("--use-env", None, False, help="no such argument: the script reads LOCAL_RANK"),
    Flag("--local-rank-spelling", _spelling, None, "HOW", "hyphen (default); underscore for --local_rank=N"),
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser, with all flags of `samestep run` and those of its own."""
    top = Parser(
        prog="python -m samestep.launch",
        usage="%(prog)s [flags] script [args ...]",
        description=_DESCRIPTION,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add_flags(top, {"workers": _FLAGS})
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code, as that of `samestep run`."""
    return outcome(lambda: _main(argv))


def entry() -> NoReturn:
    """Run the command as a process of its own and exit with its code."""
    leave(main())


def _main(argv: Sequence[str] | None) -> int:
    top = parser()
    args = top.parse_args(argv)
    try:
        options = _options(args)
    except ValueError as e:
        top.error(str(e))
    return job.launch(options)


def _options(args: argparse.Namespace) -> Options:
    environ = environment()
    given = values(args, environ, _FLAGS)
    options = launch_options(args, given, environ)
    spelling = given["local_rank_spelling"]
    if given["use_env"]:
        if spelling is not None:
            raise ValueError("--use-env and --local-rank-spelling contradict each other; leave one out")
        return options
    if not options.is_python:
        raise ValueError("--no-python needs --use-env: what is no script of Python's gets no --local-rank")
    return replace(options, local_rank_flag=spelling or _SPELLINGS["hyphen"])

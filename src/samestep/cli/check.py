"""`samestep check`: runs a program's first steps, and says what is wrong with it as a program of several ranks."""

import argparse
from typing import TYPE_CHECKING, Any

from samestep.cli.flags import Formatter
from samestep.launch.command import python_command

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser"]

_DESCRIPTION = """\
Run the first steps of a training script on N ranks, and on one with the same
samples; compare gradients, and look for what people often get wrong. The
script is not changed. Its output is not shown, dropout is off, batches are
loaded in the rank itself, every pass over a loader is short, and what it
writes by Python's means goes to a scratch folder.
"""
_EPILOG = """\
The exit code is 0 if nothing wrong was found; 1 if something was, or the
script failed, or took no step; 2 for a wrong call.

  samestep check train.py --epochs 3
"""
_FOUND = 1


def add_parser(commands: "_SubParsersAction[Any]") -> None:
    """Adds the subcommand and its flags."""
    parser = commands.add_parser(
        "check",
        help="say what is wrong with a training script on several ranks",
        usage="%(prog)s [flags] script [args ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nproc-per-node", type=_ranks, default=2, metavar="N", help="ranks to compare with one (2)")
    parser.add_argument("--steps", type=_steps, default=3, metavar="K", help="steps to look at (3)")
    parser.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="seconds for each run (600)")
    parser.add_argument("-m", "--module", action="store_true", help="script is a module, as in python -m")
    parser.add_argument("--pass-local-rank", action="store_true", help="give the script --local-rank=N")
    parser.add_argument("script", help="Python file, or module with -m")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments and flags of the script's own")
    rest.required = False  # so that a missing script is all that is missed
    parser.set_defaults(execute=_execute, parser=parser)


def _execute(args: argparse.Namespace) -> int:
    try:
        command = python_command(args.script, args.args, is_module=args.module)
    except ValueError as e:
        args.parser.error(str(e))
    from samestep.inspect.check import Program, check  # late, as they import torch
    from samestep.inspect.report import report

    flag = "--local-rank" if args.pass_local_rank else None
    seen, found = check(Program(command[1:], args.nproc_per_node, args.steps, args.timeout, flag))
    print(report(args.script, seen, found))
    return _FOUND if found or seen.has_failed or not seen.has_trained else 0


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 1):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 2, to compare with one")
    return int(text)


def _steps(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds above 0")
    return seconds

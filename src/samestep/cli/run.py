"""`samestep run`: starts the workers of a training script."""

import argparse
from typing import TYPE_CHECKING, Any

from samestep.cli.flags import DESCRIPTION, EPILOG, Formatter, add_flags, launch_options, values
from samestep.launch import job
from samestep.world import environment

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser"]


def add_parser(commands: "_SubParsersAction[Any]") -> None:
    """Adds the subcommand and its flags."""
    parser = commands.add_parser(
        "run",
        help="start the workers of a training script on this machine",
        usage="%(prog)s [flags] script [args ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(execute=_execute, parser=parser)


def _execute(args: argparse.Namespace) -> int:
    environ = environment()
    try:
        options = launch_options(args, values(args, environ), environ)
    except ValueError as e:
        args.parser.error(str(e))
    return job.launch(options)

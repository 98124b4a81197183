"""The `samestep` command: reads the arguments and calls the subcommand."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from samestep.errors import SamestepError

__all__ = ["Parser", "entry", "leave", "main", "outcome", "parser"]

_DESCRIPTION = "Data-parallel training for PyTorch: every worker takes the same step."
USAGE_ERROR, _FAILURE, _INTERRUPTED = 2, 1, 130


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command, with all subcommands and flags."""
    from samestep.cli import check, run  # late, so that a Ctrl-C meanwhile ends in an exit code, not in a traceback

    top = Parser(prog="samestep", description=_DESCRIPTION, allow_abbrev=False)
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(title="commands", dest="command", metavar="command")
    run.add_parser(commands)
    check.add_parser(commands)
    top.set_defaults(execute=None)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 2 for arguments that make no sense, 1 where it could not be done.

    `argv` is what follows the command's name; None stands for the process's own.
    """
    return outcome(lambda: _main(argv))


def outcome(run: Callable[[], int]) -> int:
    """Returns the exit code of a command: that of `run`, or the one that its error stands for, which is shown."""
    try:
        return run()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else USAGE_ERROR
    except SamestepError as e:
        print(f"samestep: {e}", file=sys.stderr)
        return _FAILURE
    except KeyboardInterrupt:
        return _INTERRUPTED


def leave(code: int) -> NoReturn:
    """Exit with `code`."""
    # Nothing is left that a late Ctrl-C could end; it would only put a traceback in the place of the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def entry() -> NoReturn:
    """Run the command as a process of its own and exit with its code."""
    leave(main())


def _main(argv: Sequence[str] | None) -> int:
    top = parser()
    args = top.parse_args(argv)
    execute: Callable[[argparse.Namespace], int] | None = args.execute
    if execute is None:
        top.print_help(sys.stderr)
        return USAGE_ERROR
    return execute(args)


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, not below the whole usage, and names the subcommand that it belongs to."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes longer than all the rest of the start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"samestep {version('samestep')}")
        parser.exit()

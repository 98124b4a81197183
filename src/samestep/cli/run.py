"""`samestep run`: starts the workers of a training script on this machine."""

import argparse
from typing import TYPE_CHECKING, Any

from samestep.launch import agent
from samestep.launch.drop_in import drop_in_command
from samestep.launch.program import module_command, script_command
from samestep.launch.spec import LaunchSpec, num_workers
from samestep.launch.worker import usable_cores
from samestep.world import environment

if TYPE_CHECKING:
    from argparse import _ArgumentGroup, _SubParsersAction

__all__ = ["add_parser"]

_DESCRIPTION = """\
Start N processes of a Python script on this machine, as ranks 0 to N-1, with
the environment that torchrun gives. Their output comes through in whole lines;
their stdin is /dev/null.
"""
_EPILOG = """\
The first rank to fail ends the others; the exit code is its own, or 128+n if
signal n killed it. SIGINT, SIGTERM and SIGHUP are passed on to the ranks; a
second Ctrl-C kills them at once. No process outlives the launcher, even if it
is killed.

  samestep run --nproc-per-node 2 train.py --epochs 3
"""


def add_parser(commands: "_SubParsersAction[Any]") -> None:
    """Adds the subcommand and its flags; torchrun's spellings with underscores are taken too, unlisted."""
    parser = commands.add_parser(
        "run",
        help="start the workers of a training script on this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("workers")
    text = "number of workers, or cpu for one per usable core (default: 1)"
    _flag(group, "--nproc-per-node", metavar="N", type=_num_workers, default=1, help=text)
    text = "address of this machine at which rank 0 listens (default: 127.0.0.1)"
    _flag(group, "--master-addr", metavar="A", type=_address, default="127.0.0.1", help=text)
    text = "port at which rank 0 listens (default: a free one)"
    _flag(group, "--master-port", metavar="P", type=_port, default=0, help=text)
    text = "seconds that ranks told to end may take before they are killed (default: 30)"
    _flag(group, "--shutdown-timeout", metavar="S", type=_seconds, default=30.0, help=text)
    _flag(group, "--no-prefix", action="store_true", help="pass lines on without the rank in front")
    text = "torch's DistributedDataParallel is samestep's in the script"
    _flag(group, "--drop-in", action="store_true", help=text)
    parser.add_argument("-m", "--module", action="store_true", help="script is a module, as in python -m")
    parser.add_argument("script", help="Python file to run, or module with -m")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments and flags of the script's own")
    rest.required = False  # so that a missing script is all that is missed
    parser.set_defaults(execute=_execute, parser=parser)


def _execute(args: argparse.Namespace) -> int:
    find = module_command if args.module else script_command
    try:
        command = find(args.script, args.args)
        spec = LaunchSpec(
            command=drop_in_command(command) if args.drop_in else command,
            nproc_per_node=args.nproc_per_node,
            environment=environment(),
            cores=usable_cores(),
            master_addr=args.master_addr,
            master_port=args.master_port,
            shutdown_timeout_s=args.shutdown_timeout,
            prefix=not args.no_prefix,
        )
    except ValueError as e:
        args.parser.error(str(e))
    return agent.run(spec)


def _flag(group: "_ArgumentGroup", name: str, **settings: Any) -> None:
    """Adds a flag, and beside it the spelling with underscores, which the help does not list."""
    action = group.add_argument(name, **settings)
    unlisted = {"dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    group.add_argument("--" + name[2:].replace("-", "_"), **{**settings, **unlisted})


def _num_workers(text: str) -> int:
    try:
        return num_workers(text, usable_cores())
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _address(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("got nothing, expected a host name or an address")
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 0 (a free one) to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds, at least 0")
    return seconds

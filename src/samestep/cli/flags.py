"""The flags of a launch: torchrun's and our own, in a table; each is honoured, or refused with the reason."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from samestep.launch import options
from samestep.launch.command import program_command, python_command
from samestep.launch.options import Options
from samestep.launch.place import Asked, backend, place
from samestep.launch.worker import usable_cores
from samestep.variables import address_fault
from samestep.world import environment

__all__ = ["DESCRIPTION", "EPILOG", "Flag", "Formatter", "add_flags", "launch_options", "values"]

DESCRIPTION = """\
Start N processes of a Python script as ranks 0 to N-1, with the environment
that torchrun gives; with --nnodes on each of several machines. Output comes
through in whole lines; stdin is /dev/null.
"""
EPILOG = """\
The exit code is that of the rank that failed first, or 128+n if signal n
killed it. A second Ctrl-C kills all at once. No process outlives the launcher.
A flag that is not given is taken from PET_<FLAG>, such as PET_NNODES=2.

  samestep run --nproc-per-node 2 train.py --epochs 3
"""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Leaves room for the help beside the longest flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


@dataclass(frozen=True)
class Flag:
    """One flag: how its value is read (None: it takes none), what stands for it where it is not given, its help."""

    name: str
    parse: Callable[[str], Any] | None
    default: Any
    metavar: str = ""
    help: str = argparse.SUPPRESS
    short: str = ""

    @property
    def dest(self) -> str:
        """The name among the values; the spelling with underscores is that after two dashes."""
        return self.name[2:].replace("-", "_")

    def read(self, text: str) -> Any:
        """The value that `text` stands for. Raises ValueError, with the reason, where there is none."""
        return bool(_int(0)(text)) if self.parse is None else self.parse(text)


def add_flags(parser: argparse.ArgumentParser, more: Mapping[str, Sequence[Flag]] | None = None) -> None:
    """Adds all flags and the script, and beside each flag torchrun's spelling with underscores, which isn't listed.

    `more` adds flags to groups, by their title.
    """
    more = more or {}
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in (*flags, *more.get(title, ())):
            settings: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": flag.help}
            if flag.parse is None:
                settings["action"] = "store_true"
            else:
                settings |= {"metavar": flag.metavar, "type": _refusing(flag.parse)}
            group.add_argument(*filter(None, (flag.short, flag.name)), **settings)
            if "_" in flag.dest:
                group.add_argument(f"--{flag.dest}", **{**settings, "help": argparse.SUPPRESS})
    parser.add_argument("script", help="Python file, or module with -m, or program with --no-python")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments and flags of the script's own")
    rest.required = False  # so that a missing script is all that is missed


def values(args: argparse.Namespace, environ: Mapping[str, str], more: Sequence[Flag] = ()) -> dict[str, Any]:
    """Returns the value of every flag: as given, or from the environment's PET_<FLAG>, or the default.

    Raises ValueError where a variable can't be read; the message has its name.
    """
    found: dict[str, Any] = {}
    for flag in (*(flag for flags in _GROUPS.values() for flag in flags), *more):
        variable = f"PET_{flag.dest.upper()}"
        if hasattr(args, flag.dest):
            found[flag.dest] = getattr(args, flag.dest)
        elif variable in environ:
            try:
                found[flag.dest] = flag.read(environ[variable])
            except ValueError as e:
                raise ValueError(f"{variable} in the environment: {e}") from e
        else:
            found[flag.dest] = flag.default
    return found


def launch_options(args: argparse.Namespace, given: Mapping[str, Any], environ: Mapping[str, str]) -> Options:
    """Returns the launch that the values `given` ask for, and `args` with its script and arguments.

    Raises ValueError where they contradict one another, or the script can't be run.
    """
    if given["virtual_local_rank"]:
        raise ValueError("--virtual-local-rank is not honoured: LOCAL_RANK numbers the workers of this machine")
    where = place(
        Asked(
            standalone=given["standalone"],
            nodes=given["nnodes"],
            node_rank=given["node_rank"],
            backend=given["rdzv_backend"],
            endpoint=given["rdzv_endpoint"],
            master_addr=given["master_addr"],
            master_port=given["master_port"],
        )
    )
    conf = given["rdzv_conf"]
    if where.rendezvous == "static":
        holds_store = where.node_rank == 0
        if conf.is_host not in (None, holds_store):
            raise ValueError(f"--rdzv-conf says is_host, but --node-rank is {where.node_rank}; the host is node 0")
        conf = replace(conf, is_host=holds_store)
    timeout = given["shutdown_timeout"]
    if timeout is None:
        timeout = _default_timeout(environ)
    _require_ranks(given)
    return Options(
        command=_command(args, given, environ),
        num_script_args=len(args.args),
        is_python=not given["no_python"],
        start_method=given["start_method"] or ("fork" if _can_fork(given) else "spawn"),
        run_id=given["rdzv_id"],
        conf=conf,
        shutdown_timeout_s=timeout,
        signals=given["signals_to_handle"],
        prefix=not given["no_prefix"],
        **{name: given[name] for name in _SAME},
        **asdict(where),
    )


_SAME = (
    "nproc_per_node",
    "drop_in",
    "local_addr",
    "max_restarts",
    "role",
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
)


def _require_ranks(given: Mapping[str, Any]) -> None:
    """Raises ValueError where a flag names local ranks that there will not be."""
    for flag in ("redirects", "tee", "local_ranks_filter"):
        ranks = [] if isinstance(given[flag], int) else [int(rank) for rank in given[flag]]
        if ranks and max(ranks) >= given["nproc_per_node"]:
            most = given["nproc_per_node"] - 1
            raise ValueError(f"--{flag} names local rank {max(ranks)}, but they are 0 to {most}".replace("_", "-"))


def _command(args: argparse.Namespace, given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, ...]:
    for flag, others in (("run_path", ("module", "no_python")), ("no_python", ("module", "drop_in"))):
        for other in others:
            if given[flag] and given[other]:
                raise ValueError(f"--{flag} and --{other} contradict each other; leave one out".replace("_", "-"))
    if not given["no_python"]:
        return python_command(args.script, args.args, is_module=given["module"])
    if given["start_method"] == "fork":
        raise ValueError("--no-python and --start-method fork contradict each other: only Python can be forked")
    return program_command(args.script, args.args, environ.get("PATH"))


def _can_fork(given: Mapping[str, Any]) -> bool:
    return sys.platform == "linux" and not given["no_python"]


def _default_timeout(environ: Mapping[str, str]) -> float:
    try:
        return _seconds(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    except ValueError as e:
        raise ValueError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT in the environment: {e}") from e


def _refusing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Lets argparse show why a value is refused."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    return read


def _workers(text: str) -> int:
    if text not in ("auto", "gpu"):
        return options.num_workers(text, usable_cores(), 0)
    from samestep.launch import devices  # rarely needed

    return options.num_workers(text, usable_cores(), devices.num_gpus(environment()))


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("got nothing, expected a name")
    return text


def _folder(text: str) -> str:
    if not text:
        raise ValueError("got nothing, expected a folder")
    return text


def _address(text: str) -> str:
    if not text.strip():
        raise ValueError("got nothing, expected a host name or an address")
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if fault := address_fault(bare):
        raise ValueError(fault)
    return bare


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise ValueError(f"got {text!r}, expected 0 (a free one) to 65535")
    return int(text)


def _int(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= low):
            raise ValueError(f"got {text!r}, expected an integer of at least {low}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"got {text!r}, expected a number of seconds, at least 0")
    return seconds


def _start_method(text: str) -> str:
    if text not in ("fork", "spawn", "forkserver"):
        raise ValueError(f"got {text!r}, expected fork or spawn")
    # What forks the workers is a server for forks: it has one thread, and has run none of the script.
    return "spawn" if text == "spawn" else "fork"


def _endpoint(text: str) -> tuple[str, int] | None:
    return options.endpoint(text) if text else None  # torchrun's default is the empty text


def _no_use(reason: str, *harmless: str) -> Callable[[str], None]:
    """Refuses a value for a reason, unless it asks for what is done anyway."""

    def read(text: str) -> None:
        if text not in harmless:
            raise ValueError(f"not honoured: {reason}")

    return read


_GROUPS: dict[str, tuple[Flag, ...]] = {
    "workers": (
        Flag("--nproc-per-node", _workers, 1, "N", "workers on this machine: a number, cpu, gpu or auto"),
        Flag("--module", None, False, help="script is a module, as in python -m", short="-m"),
        Flag("--no-python", None, False, help="script is any program, not Python's"),
        Flag("--run-path", None, False, help="script is a file: what is done anyway"),
        Flag("--drop-in", None, False, help="DistributedDataParallel of torch is samestep's"),
        Flag("--start-method", _start_method, None, "HOW", "fork (quick; Linux's default) or spawn (afresh)"),
        Flag("--max-restarts", _int(0), 0, "N", "start all anew so often after failures (0)"),
        Flag("--role", _text, "default", "NAME", "ROLE_NAME of the workers (default)"),
    ),
    "machines": (
        Flag("--nnodes", options.node_range, None, "N", "number of machines, or MIN:MAX (1)"),
        Flag("--node-rank", _int(0), None, "R", "number of this machine, from 0"),
        Flag("--rdzv-endpoint", _endpoint, None, "H:P", "host and port where machines meet, same on all"),
        Flag("--rdzv-backend", backend, None, "B", "c10d: they number themselves; static: by rank"),
        Flag("--rdzv-id", _text, "none", "ID", "runs of other names don't mix with this one"),
        Flag("--rdzv-conf", options.rendezvous_conf, options.Conf(), "K=V", "such as join_timeout=60,is_host=true"),
        Flag("--standalone", None, False, help="this machine alone, at a free port (default)"),
        Flag("--master-addr", _address, None, "A", "address at which rank 0 listens (127.0.0.1)"),
        Flag("--master-port", _port, None, "P", "port at which rank 0 listens (a free one)"),
        Flag("--local-addr", _address, None, "A", "address of this machine for the others"),
    ),
    "output": (
        Flag("--log-dir", _folder, None, "DIR", "a file for each rank and stream in this folder"),
        Flag("--redirects", options.streams, 0, "S", "streams for files only: 1 out, 2 err, 3; 0:3,1:1", "-r"),
        Flag("--tee", options.streams, 0, "S", "streams for files and for the screen", "-t"),
        Flag("--local-ranks-filter", options.ranks_filter, frozenset(), "R,R", "show output of these local ranks only"),
        Flag("--no-prefix", None, False, help="pass lines on without the rank in front"),
    ),
    "ending": (
        Flag("--shutdown-timeout", _seconds, None, "S", "seconds from being told to end to SIGKILL (30)"),
        Flag(
            "--signals-to-handle",
            options.signals,
            Options.signals,
            "SIG,..",
            "passed on, then all end (TERM, INT, HUP, QUIT)",
        ),
        Flag("--monitor-interval", _seconds, 0.1, "S", "no effect: an end is seen at once"),
    ),
    "refused": (
        Flag("--event-log-handler", _no_use("there are no events to log", "null"), None),
        Flag("--logs-specs", _no_use("files are laid out by --log-dir, --redirects and --tee alone"), None),
        Flag("--duplicate-stdout-filters", _no_use("give --tee, and search its file", ""), None),
        Flag("--duplicate-stderr-filters", _no_use("give --tee, and search its file", ""), None),
        Flag("--numa-binding", _no_use("the system places workers; bind them with numactl and --no-python"), None),
        Flag("--virtual-local-rank", None, False),
    ),
}

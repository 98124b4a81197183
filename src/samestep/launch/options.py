"""What the flags of a launch say, each read and checked. Pure: counts, platform and environment are passed in."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from samestep.variables import address_fault

__all__ = [
    "Conf",
    "Options",
    "Streams",
    "endpoint",
    "node_range",
    "num_workers",
    "ranks_filter",
    "rendezvous_conf",
    "signals",
    "streams",
]

_DEFAULT_PORT = 29400  # of torchrun's c10d rendezvous

# Bit 1 stands for stdout, bit 2 for stderr: one number for all local ranks, or one for each that is named.
Streams = int | Mapping[int, int]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TRUE, _FALSE = frozenset({"1", "true", "t", "yes", "y"}), frozenset({"0", "false", "f", "no", "n"})
_NOT_FOR_US = {
    "SIGKILL": "no program can handle it",
    "SIGSTOP": "no program can handle it",
    "SIGCHLD": "it tells the launcher that a worker has ended",
}
# Keys of torchrun's rendezvous that have no counterpart here.
_REFUSED_CONF = {
    "rank": "give --node-rank",
    "close_timeout": "nodes close without waiting",
    "heartbeat_timeout": "give keep_alive_interval and keep_alive_max_attempt",
    "read_timeout": "reads are bounded by keep_alive_interval and keep_alive_max_attempt",
    "store_type": "nodes meet in a TCP store only",
    "use_libuv": "the store's server is torch's choice",
}


@dataclass(frozen=True)
class Conf:
    """What `--rdzv-conf` says: how long nodes wait for one another, and who holds the store (None: found out)."""

    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    keep_alive_interval_s: float = 5.0
    keep_alive_max_attempt: int = 3
    is_host: bool | None = None


@dataclass(frozen=True)
class Options:
    """A launch as the user wants it.

    Attributes:
        command: the argument vector of a worker; its last `num_script_args` are the script's own arguments, and
            `is_python` says whether it begins with this Python.
        rendezvous: "none" where all workers are on this machine; "c10d" where nodes meet at the endpoint, with
            `node_rank` a wish or None; "static" where they meet there and `node_rank` is given.
        endpoint_host, endpoint_port: where nodes meet; empty and 0 where they don't.
        master_addr, master_port: where ranks meet if rendezvous is "none"; port 0 stands for a free one.
        redirects, tee: the streams that go into files only, and into files too.
        local_ranks_filter: the local ranks whose output is shown; none for all.
        signals: those that end the run, and are passed on to the ranks.
        local_rank_flag: the script's first argument is this flag with the local rank; None for no such argument.
    """

    command: tuple[str, ...]
    num_script_args: int = 0
    nproc_per_node: int = 1
    is_python: bool = True
    drop_in: bool = False
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    rendezvous: Literal["none", "c10d", "static"] = "none"
    endpoint_host: str = ""
    endpoint_port: int = 0
    run_id: str = "none"
    conf: Conf = Conf()
    local_addr: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    max_restarts: int = 0
    role: str = "default"
    start_method: Literal["fork", "spawn"] = "fork"
    log_dir: str | None = None
    redirects: Streams = 0
    tee: Streams = 0
    local_ranks_filter: frozenset[int] = frozenset()
    shutdown_timeout_s: float = 30.0
    signals: tuple[signal.Signals, ...] = _SIGNALS
    prefix: bool = True
    local_rank_flag: str | None = None


def num_workers(text: str, cores: int, gpus: int) -> int:
    """Reads a number of workers: an integer of at least 1, cpu, gpu, or auto for the GPUs if there are any, else cpu.

    Raises ValueError, with the reason, for anything else.
    """
    if text in ("cpu", "auto", "gpu"):
        if text == "gpu" and gpus == 0:
            raise ValueError("got 'gpu', but no GPU is visible here; give a number, or cpu for one worker per core")
        return cores if text == "cpu" or gpus == 0 else gpus
    if text == "xpu":
        raise ValueError("got 'xpu': Intel's GPUs are not counted here, give their number")
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"got {text!r}, expected an integer of at least 1, auto, cpu or gpu") from None
    if number < 1:
        raise ValueError(f"got {number}, expected at least 1 worker")
    return number


def node_range(text: str) -> tuple[int, int]:
    """Reads "N" or "MIN:MAX", how many nodes there must and may be. Raises ValueError for anything else."""
    low, colon, high = text.partition(":")
    numbers = [_number(part) for part in ((low, high) if colon else (low, low))]
    if None in numbers:
        raise ValueError(f"got {text!r}, expected a number of nodes, or MIN:MAX")
    least, most = (n or 0 for n in numbers)
    if not 1 <= least <= most:
        raise ValueError(f"got {text!r}, expected at least 1 node" + (", and MIN no more than MAX" if colon else ""))
    return least, most


def endpoint(text: str, default_port: int = _DEFAULT_PORT) -> tuple[str, int]:
    """Reads "host:port" or "host"; an IPv6 address stands in brackets, or alone without a port.

    Raises ValueError for anything else. The host comes back without brackets.
    """
    expected = f"got {text!r}, expected HOST:PORT, or HOST for port {default_port}; IPv6 as [::1]:{default_port}"
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not host or (rest and not rest.startswith(":")):
            raise ValueError(expected)
        colon, port = rest[:1], rest[1:]
    elif text.count(":") > 1:
        host, colon, port = text, "", ""
    else:
        host, colon, port = text.partition(":")
    if address_fault(host):
        raise ValueError(expected)
    if not colon:
        return host, default_port
    number = _number(port)
    if number is None or number > 65535:
        raise ValueError(f"got {text!r}, whose port {port!r} is not a number from 0 to 65535")
    return host, number


def rendezvous_conf(text: str) -> Conf:
    """Reads "key=value,key=value", torchrun's names. Raises ValueError for a key that has no meaning here, and why."""
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise ValueError(f"got {pair!r}, expected key=value, with commas between several")
        if key in found:
            raise ValueError(f"got {key} twice: {found[key]!r} and {value!r}")
        found[key] = value
    read: dict[str, Any] = {}
    for key, value in found.items():
        if key in _REFUSED_CONF:
            raise ValueError(f"{key} is not honoured: {_REFUSED_CONF[key]}")
        if key not in _CONF:
            raise ValueError(f"{key} is unknown; expected {', '.join(_CONF)}")
        field, parse = _CONF[key]
        if field in read:
            raise ValueError("got both timeout and join_timeout, which mean the same")
        read[field] = parse(key, value)
    return Conf(**read)


def streams(text: str) -> Streams:
    """Reads "0" to "3" for all local ranks, or "0:3,1:1" for some. Raises ValueError for anything else."""
    expected = f"got {text!r}, expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such as 0:3,1:1 by local rank"
    if ":" not in text:
        bits = _number(text)
        if bits is None or bits > 3:
            raise ValueError(expected)
        return bits
    found: dict[int, int] = {}
    for pair in text.split(","):
        rank, bits = (_number(part) for part in (pair.partition(":")[0], pair.partition(":")[2]))
        if rank is None or bits is None or bits > 3:
            raise ValueError(expected)
        if rank in found:
            raise ValueError(f"got {text!r}, which names local rank {rank} twice")
        found[rank] = bits
    return found


def ranks_filter(text: str) -> frozenset[int]:
    """Reads "0,2", the local ranks to show; nothing stands for all. Raises ValueError for anything else."""
    if not text.strip():
        return frozenset()
    numbers = [_number(part) for part in text.split(",")]
    if None in numbers:
        raise ValueError(f"got {text!r}, expected local ranks such as 0,2")
    return frozenset(n for n in numbers if n is not None)


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Reads "SIGTERM,SIGUSR1". Raises ValueError for an unknown name, and for what can't be handled."""
    found: dict[signal.Signals, None] = {}
    for name in (part.strip() for part in text.split(",")):
        if name in _NOT_FOR_US:
            raise ValueError(f"got {name}, but {_NOT_FOR_US[name]}")
        if name not in signal.Signals.__members__:
            raise ValueError(f"got {name!r}, expected names of signals such as SIGTERM,SIGINT")
        found[signal.Signals[name]] = None
    return tuple(found)


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _seconds_of(key: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{key} is {value!r}; expected a number of seconds above 0")
    return seconds


def _count_of(key: str, value: str) -> int:
    number = _number(value)
    if not number:
        raise ValueError(f"{key} is {value!r}; expected an integer of at least 1")
    return number


def _truth_of(key: str, value: str) -> bool:
    if value.lower() not in _TRUE | _FALSE:
        raise ValueError(f"{key} is {value!r}; expected true or false")
    return value.lower() in _TRUE


# What `--rdzv-conf` may say: the field of `Conf`, and how it is read.
_CONF: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "join_timeout": ("join_timeout_s", _seconds_of),
    "timeout": ("join_timeout_s", _seconds_of),  # the static rendezvous's word for it
    "last_call_timeout": ("last_call_s", _seconds_of),
    "keep_alive_interval": ("keep_alive_interval_s", _seconds_of),
    "keep_alive_max_attempt": ("keep_alive_max_attempt", _count_of),
    "is_host": ("is_host", _truth_of),
}

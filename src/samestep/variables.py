"""Look up environment variables by type, with errors that name each one and its value.

Pure: the mapping is passed. `Reading` is what a set of variables comes to, and `contradiction` holds the rules that
its numbers obey, whether they come from variables or from a caller.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samestep.errors import WorldError

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

__all__ = ["Reading", "Variables", "address_fault", "contradiction", "is_loopback"]

_RULES: tuple[tuple[tuple[str, ...], Callable[..., bool], str], ...] = (
    (("rank", "size"), lambda rank, size: rank < size, "a rank must be below the world size"),
    (
        ("local_rank", "local_size"),
        lambda local_rank, local_size: local_rank < local_size,
        "a local rank must be below the number of ranks on its node",
    ),
    (
        ("node_rank", "num_nodes"),
        lambda node_rank, num_nodes: node_rank < num_nodes,
        "a node's number must be below the number of nodes",
    ),
    (
        ("local_size", "size"),
        lambda local_size, size: local_size <= size,
        "a node cannot have more ranks than the world",
    ),
    (
        ("num_nodes", "size"),
        lambda num_nodes, size: num_nodes <= size,
        "there cannot be more nodes than ranks",
    ),
    (
        ("local_size", "num_nodes", "size"),
        lambda local_size, num_nodes, size: num_nodes > 1 or local_size == size,
        "a single node must have all ranks of the world",
    ),
    (
        ("local_size", "num_nodes", "size"),
        lambda local_size, num_nodes, size: local_size + num_nodes - 1 <= size,
        "each of the other nodes must have at least one rank",
    ),
)

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?")
# The first that is there says which rank an error is about.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Reading:
    """What the variables of one launcher come to. The defaults are those of one rank by itself."""

    launcher: str = "none"
    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0


class Variables:
    """Environment variables with typed look-ups; every failure is a WorldError that shows what was looked at."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __contains__(self, name: str) -> bool:
        return name in self._environ

    def get(self, name: str, default: str) -> str:
        """Return the variable's text, or `default` when it is not set."""
        return self._environ.get(name, default)

    def first(self, *names: str) -> str:
        """Return the first of the names that is set, or else the first of all."""
        return next((name for name in names if name in self), names[0])

    def show(self, name: str) -> str:
        """Return `NAME=value`, or say that it is not set."""
        return f"{name}={self._environ[name]}" if name in self else f"{name} is not set"

    def error(self, names: tuple[str, ...], problem: str) -> WorldError:
        """Return the error to raise: rank where known, each variable with its value, then the problem."""
        return self._error([self.show(name) for name in names], problem)

    def text(self, name: str) -> str:
        """Return the variable's text, which must be there and not be empty."""
        if not self._environ.get(name):
            raise self.error((name,), f"{name} must have a value; set it, or start with a launcher that does")
        return self._environ[name]

    def integer(self, name: str, low: int = 0) -> int:
        """Return the variable as an integer of at least `low`."""
        text = self.text(name)
        if not _INTEGER.fullmatch(text) or int(text) < low:
            raise self.error((name,), f"{name} must be an integer of at least {low}; correct it")
        return int(text)

    def port(self, name: str) -> int:
        """Return the variable as a TCP port."""
        port = self.integer(name, 1)
        if port > 65535:
            raise self.error((name,), f"{name} must be a port, 1 to 65535; correct it")
        return port

    def address(self, name: str) -> str:
        """Return the variable as a host name or IP address."""
        address = self.text(name)
        fault = address_fault(address)
        if fault:
            raise self.error((name,), f"{fault}; set {name} to the host of rank 0")
        return address

    def check(self, names: Mapping[str, str], **fields: int) -> None:
        """Raise if the numbers contradict one another; `names` has the variable of each field, where there is one."""
        found = contradiction(fields)
        if found is None:
            return
        involved, rule = found
        shown = [
            self.show(names[field]) if names.get(field) in self._environ else f"{field}={fields[field]} (worked out)"
            for field in involved
        ]
        raise self._error(shown, f"{rule}; correct them, or unset them and start with a launcher")

    def _error(self, shown: list[str], problem: str) -> WorldError:
        rank = next((self._environ[name] for name in _RANKS if name in self), "")
        where = f"rank {rank}: " if _INTEGER.fullmatch(rank) else ""
        return WorldError(f"{where}{', '.join(shown)}: {problem}")


def contradiction(fields: Mapping[str, int]) -> tuple[tuple[str, ...], str] | None:
    """Return the fields that break a rule and the rule, or None. Rules on absent fields are passed over."""
    for names, holds, rule in _RULES:
        if all(name in fields for name in names) and not holds(*(fields[name] for name in names)):
            return names, rule
    return None


def address_fault(address: str) -> str | None:
    """Return what is wrong with the text as a host name or IP address, or None."""
    if _HOST.fullmatch(address) or _ip(address):
        return None
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and address_fault(host) is None:
        return f"{address!r} has a port, which belongs into the master port"
    return f"{address!r} is neither a host name nor an IP address"


def is_loopback(address: str) -> bool:
    """Whether the address means this host itself, so that all ranks that use it run here."""
    ip = _ip(address)
    return ip.is_loopback if ip else address.partition(".")[0] in ("localhost", "ip6-localhost")


def _ip(address: str) -> "IPv4Address | IPv6Address | None":
    import ipaddress  # rarely needed, and slow to import

    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None

"""Which of a machine's names, addresses and network interfaces is which."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
from pathlib import Path
from typing import Any

__all__ = ["address_towards", "interface_of", "is_loopback", "is_this_machine"]

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def is_this_machine(host: str) -> bool:
    """Whether a name or address is this machine's own: one that a socket can be bound to."""
    return any(_can_bind(family, place) for family, place in _resolved(host))


def is_loopback(addr: str) -> bool:
    """Whether an address can't be reached from other machines."""
    try:
        return ipaddress.ip_address(addr.partition("%")[0]).is_loopback
    except ValueError:
        return False


def address_towards(host: str) -> str | None:
    """The address of this machine that packets to `host` come from; None where there is no way. Nothing is sent."""
    for family, place in _resolved(host, _ANY_PORT):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect(place)
            return str(probe.getsockname()[0])
    return None


def interface_of(addr: str) -> str | None:
    """The name of the network interface that has `addr`, an address or a name; None where there is none, or elsewhere
    than on Linux."""
    if sys.platform != "linux":
        return None
    for family, place in _resolved(addr):
        found = _with_ipv6(str(place[0])) if family == socket.AF_INET6 else _with_ipv4(str(place[0]))
        if found is not None:
            return found
    return None


def _with_ipv4(addr: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == addr:
                    return name
    return None


def _with_ipv6(addr: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, addr.partition("%")[0]).hex()
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
            digits, *_, name = line.split()
            if digits == wanted:
                return name
    return None


def _can_bind(family: socket.AddressFamily, place: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind(place)
        return True
    return False


def _resolved(host: str, port: int = 0) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(family, place) for family, _, _, _, place in found]

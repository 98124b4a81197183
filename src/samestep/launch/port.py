"""Reserves the port at which the workers will meet, so that nobody else gets it before rank 0 listens there."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from samestep.errors import LaunchError

__all__ = ["reserved_port"]


@contextlib.contextmanager
def reserved_port(address: str, port: int = 0) -> Iterator[int]:
    """Holds `port`, or a free one for 0, inside the block, and gives its number.

    The socket is bound with SO_REUSEADDR and does not listen. Linux then lets a second socket with
    SO_REUSEADDR bind the same port and listen there, as rank 0's TCPStore does; it refuses anyone without it,
    and never gives the port out as a free one. It is bound on all interfaces, as the store will be, so a
    conflict on any of them is seen here.

    Raises LaunchError where `address` is not one of this machine's, or the port is taken or not allowed.
    """
    family = _local_family(address)
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("", port))
        except OSError as e:
            raise LaunchError(_refused(port, e)) from e
        yield int(held.getsockname()[1])


def _local_family(address: str) -> socket.AddressFamily:
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise LaunchError(f"master address {address!r} can't be resolved: {e}") from e
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(place)
            return family
    raise LaunchError(
        f"master address {address!r} ({found[0][4][0]}) is not one of this machine's, where all workers run;"
        " leave it out, or give an address of this machine"
    )


def _refused(port: int, e: OSError) -> str:
    if e.errno == errno.EADDRINUSE:
        return f"master port {port} is taken by another program; leave it out to have a free one picked"
    return f"master port {port} can't be used ({os.strerror(e.errno or 0)}); leave it out to have a free one picked"

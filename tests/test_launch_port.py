"""The port at which ranks will meet: reserved for those who share it, refused where it can't be had."""

import socket
from collections.abc import Iterator

import pytest

from samestep.errors import LaunchError
from samestep.launch.port import reserved_port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def bind(port: int, *, reuse: bool) -> socket.socket:
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        s.bind(("0.0.0.0", port))
    except OSError:
        s.close()
        raise
    return s


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_reserved_port_is_for_those_who_share_it(address: str) -> None:
    with reserved_port(address) as port:
        with pytest.raises(OSError, match="in use"):
            bind(port, reuse=False)
        with bind(port, reuse=True) as store:  # as the store of rank 0 does
            store.listen()
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with reserved_port(address) as other:
            assert other != port
        with reserved_port(address, port) as asked_for:
            assert asked_for == port
    bind(port, reuse=False).close()


def test_a_port_with_a_listener_is_refused(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(LaunchError, match=f"master port {port} is taken"), reserved_port("127.0.0.1", port):
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [("192.0.2.1", "is not one of this machine's"), ("no such host", "can't be resolved")],
)
def test_a_master_that_is_elsewhere_is_refused(address: str, message: str) -> None:
    with pytest.raises(LaunchError, match=f"master address '{address}' .*{message}"), reserved_port(address):
        pass

"""Where the workers or their nodes meet, from what the flags say about it; contradictions are refused. Pure."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Asked", "Place", "backend", "place"]

_STATIC_PORT = 29500  # torchrun's default of --master-port
_NAMES = ("c10d", "static")


@dataclass(frozen=True)
class Asked:
    """What was given of the flags that say how many nodes there are and where they meet; None for what was not."""

    standalone: bool = False
    nodes: tuple[int, int] | None = None
    node_rank: int | None = None
    backend: str | None = None
    endpoint: tuple[str, int] | None = None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True)
class Place:
    """The fields of the same names in `Options`."""

    rendezvous: Literal["none", "c10d", "static"] = "none"
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    endpoint_host: str = ""
    endpoint_port: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def backend(text: str) -> str:
    """Reads the name of a rendezvous backend. Raises ValueError for one that is not to be had."""
    if text.startswith("etcd"):
        raise ValueError(f"got {text!r}, which needs a server of etcd; nodes meet without one, with c10d")
    if text not in _NAMES:
        raise ValueError(f"got {text!r}, expected c10d or static")
    return text


def place(asked: Asked) -> Place:
    """Returns where to meet. Raises ValueError where flags contradict one another, or one is missing."""
    least, most = asked.nodes or (1, 1)
    if asked.standalone:
        _refuse_beside_standalone(asked, most)
    if asked.endpoint is not None:
        _refuse_two_places(asked, *asked.endpoint)
    if most == 1:
        return _one_machine(asked)
    nodes = f"--nnodes {least}" if least == most else f"--nnodes {least}:{most}"
    if asked.node_rank is not None and not 0 <= asked.node_rank < most:
        raise ValueError(f"--node-rank is {asked.node_rank}, but with {nodes} it is 0 to {most - 1}")
    if asked.backend == "static" or (asked.backend is None and _looks_static(asked, least, most)):
        return _static(asked, nodes)
    if asked.endpoint is None:
        raise ValueError(f"{nodes} needs --rdzv-endpoint HOST:PORT, the same on each node, where they meet")
    host, port = asked.endpoint
    _refuse_port_0("--rdzv-endpoint", port, nodes)
    return Place("c10d", least, most, asked.node_rank, host, port)


def _looks_static(asked: Asked, least: int, most: int) -> bool:
    """Torchrun's default; where nodes don't say which they are, or may be fewer, only c10d can be meant."""
    has_rank, by_master = asked.node_rank is not None, asked.endpoint is None and asked.master_addr is not None
    return least == most and (has_rank or by_master)


def _static(asked: Asked, nodes: str) -> Place:
    least, most = asked.nodes or (1, 1)
    if least != most:
        raise ValueError(f"{nodes} is a range, which the static rendezvous can't have; give --rdzv-backend c10d")
    host, port = asked.endpoint or (asked.master_addr, _STATIC_PORT if asked.master_port is None else asked.master_port)
    if host is None:
        raise ValueError(f"{nodes} needs --rdzv-endpoint or --master-addr, the same on each node, where they meet")
    if asked.node_rank is None:
        raise ValueError(f"{nodes} with the static rendezvous needs --node-rank, 0 to {most - 1}, on each node its own")
    _refuse_port_0("--rdzv-endpoint" if asked.endpoint else "--master-port", port, nodes)
    return Place("static", least, most, asked.node_rank, host, port)


def _one_machine(asked: Asked) -> Place:
    """An endpoint then is where ranks meet: its address is this machine's, as the store of torchrun's agent."""
    if asked.node_rank not in (None, 0):
        raise ValueError(f"--node-rank is {asked.node_rank}, but there is one node; say how many with --nnodes")
    host, port = asked.endpoint or (asked.master_addr or "127.0.0.1", asked.master_port or 0)
    return Place(master_addr=host, master_port=port)


def _refuse_beside_standalone(asked: Asked, most: int) -> None:
    if most != 1 or asked.nodes not in (None, (1, 1)):
        raise ValueError(f"--standalone is for one machine, but --nnodes allows for {most}")
    if asked.endpoint is not None:
        raise ValueError("--standalone finds a place to meet by itself; leave --rdzv-endpoint out")
    if asked.backend == "static":
        raise ValueError("--standalone is a rendezvous of its own; leave --rdzv-backend static out")


def _refuse_two_places(asked: Asked, host: str, port: int) -> None:
    """Said twice is no contradiction."""
    if asked.master_addr not in (None, host):
        raise ValueError(f"--master-addr is {asked.master_addr}, but --rdzv-endpoint says {host}; leave one out")
    if asked.master_port not in (None, port):
        raise ValueError(f"--master-port is {asked.master_port}, but --rdzv-endpoint says {port}; leave one out")


def _refuse_port_0(flag: str, port: int, nodes: str) -> None:
    if port == 0:
        raise ValueError(f"{flag} has port 0, but with {nodes} the nodes must agree on one")

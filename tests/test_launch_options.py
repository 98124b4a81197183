"""What the flags of a launch say, value by value, and where its workers meet. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from samestep.launch.options import (
    Conf,
    endpoint,
    node_range,
    num_workers,
    ranks_filter,
    rendezvous_conf,
    signals,
    streams,
)
from samestep.launch.place import Asked, Place, backend, place

# ---- values


@pytest.mark.parametrize(
    ("text", "gpus", "number"),
    [("1", 0, 1), ("16", 4, 16), ("cpu", 4, 6), ("auto", 0, 6), ("auto", 4, 4), ("gpu", 4, 4)],
)
def test_numbers_of_workers(text: str, gpus: int, number: int) -> None:
    assert num_workers(text, cores=6, gpus=gpus) == number


@pytest.mark.parametrize("text", ["0", "-1", "foo", "", "1.5", "gpu", "xpu", "CPU"])
def test_other_numbers_of_workers_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(ValueError, match=f"got '?{text}'?.*(expected|give)"):
        num_workers(text, cores=6, gpus=0)


GOOD: list[tuple[Callable[[str], Any], str, object]] = [
    (node_range, "2", (2, 2)),
    (node_range, "1:4", (1, 4)),
    (node_range, " 1 : 1 ", (1, 1)),
    (endpoint, "host", ("host", 29400)),
    (endpoint, "host:1", ("host", 1)),
    (endpoint, "10.0.0.1:0", ("10.0.0.1", 0)),
    (endpoint, "[::1]:29400", ("::1", 29400)),
    (endpoint, "[::1]", ("::1", 29400)),
    (endpoint, "fe80::1%eth0", ("fe80::1%eth0", 29400)),
    (rendezvous_conf, "", Conf()),
    (rendezvous_conf, "timeout=7", Conf(join_timeout_s=7)),
    (
        rendezvous_conf,
        "join_timeout=60, last_call_timeout=1.5,keep_alive_interval=2,keep_alive_max_attempt=4,is_host=Yes",
        Conf(60.0, 1.5, 2.0, 4, True),
    ),
    (rendezvous_conf, "is_host=0,", Conf(is_host=False)),
    (streams, "0", 0),
    (streams, "3", 3),
    (streams, "0:3,1:1", {0: 3, 1: 1}),
    (ranks_filter, "", frozenset()),
    (ranks_filter, "0,2, 2", frozenset({0, 2})),
    (signals, "SIGTERM", (signal.SIGTERM,)),
    (signals, "SIGUSR1, SIGINT,SIGUSR1", (signal.SIGUSR1, signal.SIGINT)),
    (backend, "c10d", "c10d"),
    (backend, "static", "static"),
]


@pytest.mark.parametrize(("read", "text", "value"), GOOD)
def test_values(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


BAD: list[tuple[Callable[[str], Any], str, str]] = [
    *((node_range, text, "expected a number of nodes, or MIN:MAX") for text in ("", "x", "1:", ":2", "1:2:3", "-1")),
    (node_range, "0", "at least 1 node"),
    (node_range, "0:2", "at least 1 node"),
    (node_range, "3:2", "MIN no more than MAX"),
    *(
        (endpoint, text, "expected HOST:PORT")
        for text in ("", ":1", "[::1", "[]:1", "[::1]x", "a b:1", "http://a:1", "a:1:2")
    ),
    *((endpoint, text, "is not a number from 0 to 65535") for text in ("h:", "h:x", "h:65536", "h:-1", "[::1]:")),
    (rendezvous_conf, "join_timeout", "got 'join_timeout', expected key=value"),
    (rendezvous_conf, "=1", "got '=1', expected key=value"),
    (rendezvous_conf, "join_timeout=", "expected key=value"),
    (rendezvous_conf, "join_timeout=x", "join_timeout is 'x'; expected a number of seconds above 0"),
    (rendezvous_conf, "last_call_timeout=0", "seconds above 0"),
    (rendezvous_conf, "join_timeout=inf", "seconds above 0"),
    (rendezvous_conf, "keep_alive_max_attempt=0", "an integer of at least 1"),
    (rendezvous_conf, "is_host=maybe", "expected true or false"),
    (rendezvous_conf, "is_host=1,is_host=0", "got is_host twice: '1' and '0'"),
    (rendezvous_conf, "timeout=1,join_timeout=1", "which mean the same"),
    (rendezvous_conf, "rank=1", "rank is not honoured: give --node-rank"),
    (rendezvous_conf, "read_timeout=1", "read_timeout is not honoured: reads are bounded"),
    (rendezvous_conf, "store_type=file", "store_type is not honoured"),
    (rendezvous_conf, "colour=red", "colour is unknown; expected join_timeout"),
    *(
        (streams, text, "expected 0 .none., 1 .stdout.")
        for text in ("", "4", "x", "-1", "0:4", "0:", ":1", "0:1,", "0:1,3")
    ),
    (streams, "0:1,0:2", "names local rank 0 twice"),
    *((ranks_filter, text, "expected local ranks such as 0,2") for text in ("x", "0,", "-1", "0 1")),
    (signals, "", "got '', expected names of signals"),
    (signals, "TERM", "got 'TERM', expected names"),
    (signals, "SIGTERM,SIGKILL", "got SIGKILL, but no program can handle it"),
    (signals, "SIGSTOP", "got SIGSTOP, but no program"),
    (signals, "SIGCHLD", "got SIGCHLD, but it tells the launcher"),
    (backend, "etcd-v2", "got 'etcd-v2', which needs a server of etcd"),
    (backend, "zeus", "got 'zeus', expected c10d or static"),
]


@pytest.mark.parametrize(("read", "text", "message"), BAD)
def test_values_that_make_no_sense_are_refused(read: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(text)


# ---- where to meet

TWO = (2, 2)
AT = ("host", 29400)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Asked(), Place()),
        (Asked(nodes=(1, 1), node_rank=0), Place()),
        (Asked(standalone=True, nodes=(1, 1), backend="c10d", master_port=7), Place(master_port=7)),
        (Asked(master_addr="10.0.0.1", master_port=7), Place(master_addr="10.0.0.1", master_port=7)),
        # As many start a single machine: an endpoint of its own, with a port or with a free one.
        (Asked(backend="c10d", endpoint=("localhost", 0)), Place(master_addr="localhost")),
        (Asked(backend="static", endpoint=AT), Place(master_addr="host", master_port=29400)),
        (Asked(nodes=TWO, endpoint=AT), Place("c10d", 2, 2, None, *AT)),
        (Asked(nodes=(1, 4), endpoint=AT), Place("c10d", 1, 4, None, *AT)),
        (Asked(nodes=(1, 4), endpoint=AT, node_rank=3), Place("c10d", 1, 4, 3, *AT)),
        (Asked(nodes=TWO, endpoint=AT, backend="c10d", node_rank=1), Place("c10d", 2, 2, 1, *AT)),
        (Asked(nodes=TWO, endpoint=AT, master_addr="host", master_port=29400), Place("c10d", 2, 2, None, *AT)),
        (Asked(nodes=TWO, endpoint=AT, node_rank=1), Place("static", 2, 2, 1, *AT)),
        (Asked(nodes=TWO, master_addr="host", node_rank=0), Place("static", 2, 2, 0, "host", 29500)),
        (Asked(nodes=TWO, master_addr="host", master_port=7, node_rank=1), Place("static", 2, 2, 1, "host", 7)),
    ],
)
def test_where_to_meet(asked: Asked, expected: Place) -> None:
    assert place(asked) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked(standalone=True, nodes=TWO), "--standalone is for one machine, but --nnodes allows for 2"),
        (Asked(standalone=True, nodes=(1, 3)), "--nnodes allows for 3"),
        (Asked(standalone=True, endpoint=AT), "--standalone finds a place .* leave --rdzv-endpoint out"),
        (Asked(standalone=True, backend="static"), "leave --rdzv-backend static out"),
        (Asked(standalone=True, node_rank=1), "--node-rank is 1, but there is one node"),
        (Asked(node_rank=1), "--node-rank is 1, but there is one node"),
        (Asked(endpoint=AT, master_addr="other"), "--master-addr is other, but --rdzv-endpoint says host"),
        (Asked(nodes=TWO, endpoint=AT, master_port=7), "--master-port is 7, but --rdzv-endpoint says 29400"),
        (Asked(nodes=TWO), "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (Asked(nodes=(1, 2)), "--nnodes 1:2 needs --rdzv-endpoint"),
        (Asked(nodes=TWO, backend="c10d", master_addr="host"), "--nnodes 2 needs --rdzv-endpoint"),
        (Asked(nodes=TWO, node_rank=2, endpoint=AT), "--node-rank is 2, but with --nnodes 2 it is 0 to 1"),
        (Asked(nodes=TWO, master_addr="host"), "needs --node-rank, 0 to 1, on each node its own"),
        (Asked(nodes=TWO, backend="static", endpoint=AT), "needs --node-rank"),
        (Asked(nodes=TWO, node_rank=1), "needs --rdzv-endpoint or --master-addr"),
        (Asked(nodes=(1, 2), backend="static", endpoint=AT, node_rank=0), "is a range, which the static"),
        (Asked(nodes=TWO, endpoint=("host", 0)), "--rdzv-endpoint has port 0, but with --nnodes 2 the nodes"),
        (Asked(nodes=TWO, master_addr="host", master_port=0, node_rank=0), "--master-port has port 0"),
    ],
)
def test_contradictions_and_gaps_are_refused(asked: Asked, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(asked)

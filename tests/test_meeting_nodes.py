"""Nodes meet over a network: each has a network stack and a name of its own."""

from __future__ import annotations

from meetings import Crowd, failure, sums
from netns import Network

from samestep.launch.events import Failed, Lost, Node, Refused

_NAMES = ("alpha", "beta", "gamma")
_PORT = 29400


def test_nodes_come_late_fail_vanish_and_go_on_without_those_who_are_gone() -> None:
    with (
        Network(*_NAMES) as net,
        Crowd(net.address("alpha"), _PORT, min_nodes=2, max_nodes=3, last_call_s=60.0, join_timeout_s=120.0) as crowd,
    ):
        gamma, beta = crowd.comes(net.on("gamma")), crowd.comes(net.on("beta"))
        for node in (gamma, beta):  # they are there, and find no store yet
            crowd.speaks(node)
        alpha = crowd.comes(net.on("alpha"))
        mets = dict(zip((alpha, beta, gamma), crowd.meet([alpha, beta, gamma]), strict=True))
        assert mets[alpha].node_rank == 0, "who holds the store comes first"
        nodes = mets[alpha].nodes
        assert set(nodes) == {Node(name, net.address(name), "eth0", 1) for name in _NAMES}
        assert all(met.nodes == nodes and met.store_addr == net.address("alpha") for met in mets.values())
        beta.failed(failure())
        assert crowd.hears(alpha, Failed) == Failed(failure(), mets[beta].node_rank, "beta", first=True)
        assert crowd.hears(gamma, Failed).failure.traceback == failure().traceback
        for node in (alpha, beta, gamma):
            node.again()
        crowd.meet([alpha, beta, gamma])

        net.cut("gamma")
        lost = Lost(mets[gamma].node_rank, "gamma", "it has shown no life for 3 s")
        assert [crowd.hears(node, Lost) for node in (alpha, beta)] == [lost, lost]
        assert "no longer answers" in crowd.hears(gamma, Refused).message
        alpha.again()
        beta.again()
        assert [(met.round, len(met.nodes)) for met in crowd.meet([alpha, beta])] == [(2, 2), (2, 2)]

        net.cut("alpha")
        message = crowd.hears(beta, Refused).message
        assert f"the store at {net.address('alpha')}:{_PORT}, where the nodes meet, no longer answers" in message
        assert crowd.hears(alpha, Lost).host == "beta"


def test_workers_of_two_machines_find_each_other_by_ipv6() -> None:
    with Network(*_NAMES[:2]) as net, Crowd(net.address6("alpha"), _PORT) as crowd:
        mets = crowd.meet([crowd.comes(net.on(name)) for name in _NAMES[:2]])
        assert {(node.addr, node.interface) for node in mets[0].nodes} == {
            (net.address6(name), "eth0") for name in _NAMES[:2]
        }
        assert sums(mets, [net.on(name) for name in _NAMES[:2]]) == [b"2\n"] * 2


def test_who_is_missing_and_who_cannot_come_is_told_by_name() -> None:
    with Network(*_NAMES) as net, Crowd(net.address("alpha"), _PORT, min_nodes=3, max_nodes=3) as crowd:
        net.cut("gamma")
        gamma = crowd.comes(net.on("gamma"), join_timeout_s=1.0)
        alpha = crowd.comes(net.on("alpha"))
        crowd.speaks(alpha)
        beta = crowd.comes(net.on("beta"), join_timeout_s=3.0)
        message = crowd.hears(alpha, Refused).message
        assert crowd.hears(beta, Refused).message == message
        assert message.startswith(f"2 of 3 nodes met at {net.address('alpha')}:{_PORT} within 3 s: ")
        assert "alpha (10.77.0.1), beta (10.77.0.2); 1 is missing" in message
        message = crowd.hears(gamma, Refused).message
        assert f"no node answers at 10.77.0.1:{_PORT} (" in message
        assert "asked from gamma" in message

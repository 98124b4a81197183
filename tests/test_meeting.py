"""Nodes meet at a real store, each with its process, on one machine."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from launching import is_gone, wait_until
from meetings import Crowd, failure, listening, sums

from samestep.launch.addresses import address_towards, interface_of, is_loopback, is_this_machine
from samestep.launch.events import AllDone, Failed, Joining, Lost, Met, Refused

# A launcher that is killed: it comes to a meeting and notes the process that it has for that.
_LAUNCHER = """
import select, sys
from samestep.launch.meet import Meeting, start_meeting
from samestep.launch.nodes import MeetingSettings
from samestep.launch.addresses import address_towards, interface_of, is_loopback, is_this_machine
from samestep.launch.events import Met
meeting = Meeting(MeetingSettings("127.0.0.1", int(sys.argv[1]), "run", 2, 2, 1))
met = False
while not met:
    select.select([meeting.fd], [], [])
    met = any(isinstance(event, Met) for event in meeting.take())
print(meeting.pid, flush=True)
select.select([], [], [])
"""


def test_two_nodes_meet_fail_meet_again_and_are_done() -> None:
    with Crowd() as crowd:
        nodes = [crowd.comes(node_rank=1), crowd.comes(node_rank=0, nproc_per_node=2)]
        mets = crowd.meet(nodes)
        assert [met.node_rank for met in mets] == [1, 0]
        assert mets[0].nodes == mets[1].nodes
        assert [node.nproc for node in mets[0].nodes] == [2, 1]
        assert {node.interface for node in mets[0].nodes} == {"lo"}
        assert {(m.store_addr, m.store_port, m.world_size) for m in mets} == {("127.0.0.1", crowd.port, 3)}
        nodes[0].failed(failure())
        assert crowd.hears(nodes[1], Failed) == Failed(failure(), 1, mets[0].nodes[1].host, first=True)
        for node in nodes:
            node.again()
        again = crowd.meet(nodes)
        assert [(m.round, m.node_rank) for m in again] == [(1, 1), (1, 0)]
        nodes[0].done(0)
        nodes[1].done(3)
        assert [crowd.hears(node, AllDone) for node in nodes] == [AllDone(3)] * 2


def test_workers_of_every_round_find_each_other_at_the_store() -> None:
    with Crowd() as crowd:
        nodes = [crowd.comes(), crowd.comes()]
        for _ in range(2):
            assert sums(crowd.meet(nodes), [None, None]) == [b"2\n"] * 2
            for node in nodes:
                node.again()


def test_contradicting_flags_are_told_to_both() -> None:
    with Crowd() as crowd:
        for node in [crowd.comes(run_id="one"), crowd.comes(run_id="two")]:
            assert "--rdzv-id is " in crowd.hears(node, Refused).message


def test_who_is_missing_is_told_at_the_deadline() -> None:
    with Crowd(min_nodes=3, max_nodes=3) as crowd:
        nodes = [crowd.comes()]
        crowd.speaks(nodes[0])
        nodes.append(crowd.comes(join_timeout_s=3.0))
        for node in nodes:
            message = crowd.hears(node, Refused).message
            assert message.startswith(f"2 of 3 nodes met at 127.0.0.1:{crowd.port} within 3 s: ")
            assert message.count("(127.0.0.1)") == 2
            assert "1 is missing (--nnodes 3)" in message


def test_a_late_node_joins_an_elastic_run_in_its_next_round_and_one_too_many_is_sent_away() -> None:
    with Crowd(min_nodes=1, max_nodes=2, last_call_s=0.0) as crowd:
        first = crowd.comes()
        assert len(crowd.hears(first, Met).nodes) == 1
        second = crowd.comes()
        assert len(crowd.hears(first, Joining).hosts) == 1
        first.again()
        assert [(met.round, met.node_rank) for met in crowd.meet([first, second])] == [(1, 0), (1, 1)]
        assert "there are 2 nodes already" in crowd.hears(crowd.comes(), Refused).message


def test_a_goodbye_in_the_middle_is_told_and_the_store_stays_until_all_have_left() -> None:
    with Crowd(min_nodes=3, max_nodes=3) as crowd:
        host, *others = [crowd.comes(is_host=is_host) for is_host in (True, False, False)]
        crowd.meet([host, *others])
        crowd.leave(others[1])
        for node in (host, others[0]):
            assert crowd.hears(node, Lost).reason == "its launcher has ended"
        crowd.nodes.remove(host)
        closing = threading.Thread(target=host.close, args=(60.0,))
        closing.start()
        assert crowd.hears(others[0], Lost).node_rank == 0
        assert closing.is_alive()
        assert others[0].take() == []
        crowd.leave(others[0])
        closing.join()


def test_the_next_run_at_the_same_endpoint_waits_until_the_last_one_has_gone() -> None:
    with Crowd() as crowd:
        nodes = [crowd.comes(), crowd.comes()]
        crowd.meet(nodes)
        for node in nodes:
            node.done(0)
        for node in nodes:
            crowd.hears(node, AllDone)
        early = crowd.comes()
        crowd.speaks(early)
        crowd.leave(*nodes)
        assert {met.round for met in crowd.meet([early, crowd.comes()])} == {0}


def test_a_launcher_killed_takes_its_process_along_and_the_others_hear_of_it() -> None:
    with Crowd(keep_alive_interval_s=60.0) as crowd:
        host = crowd.comes(is_host=True)
        launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(crowd.port)], stdout=subprocess.PIPE)
        crowd_flags = crowd.hears(host, Met)
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
        launcher.communicate()
        lost = crowd.hears(host, Lost)
        assert (lost.node_rank, lost.reason) == (1 - crowd_flags.node_rank, "its launcher was killed")
        wait_until(lambda: is_gone(pid))


def test_a_process_that_is_killed_is_told_to_its_launcher_and_missed_by_the_others() -> None:
    with Crowd(min_nodes=3, max_nodes=3) as crowd:
        host, second, third = [crowd.comes(is_host=is_host) for is_host in (True, False, False)]
        crowd.meet([host, second, third])
        os.kill(third.pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in crowd.hears(third, Refused).message
        assert third.take() == []
        for node in (host, second):
            assert crowd.hears(node, Lost).reason == "it has shown no life for 3 s"
        os.kill(host.pid, signal.SIGKILL)
        message = crowd.hears(second, Refused).message
        assert f"the store at 127.0.0.1:{crowd.port}, where the nodes meet, is gone" in message
        assert "(127.0.0.1), which held it, has ended" in message


def test_a_store_that_stands_still_is_noticed() -> None:
    with Crowd(keep_alive_interval_s=0.5) as crowd:
        host, other = crowd.comes(is_host=True), crowd.comes(is_host=False)
        crowd.meet([host, other])
        os.kill(host.pid, signal.SIGSTOP)
        try:
            message = crowd.hears(other, Refused).message
            assert f"the store at 127.0.0.1:{crowd.port}, where the nodes meet, no longer answers" in message
        finally:
            os.kill(host.pid, signal.SIGCONT)


@contextmanager
def _web_server() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_something_else_at_the_endpoint_is_told() -> None:
    with listening() as silent, _web_server() as web, Crowd() as crowd:
        nodes = {port: crowd.comes(port=port) for port in (silent, web)}
        for port, node in nodes.items():
            message = crowd.hears(node, Refused).message
            assert f"what listens at 127.0.0.1:{port} does not answer as torch's store does" in message


def test_nobody_at_the_endpoint_is_told() -> None:
    with Crowd(is_host=False, join_timeout_s=1.0) as crowd:
        nodes = {place: crowd.comes(endpoint=place) for place in ("127.0.0.1", "nowhere.invalid")}
        for place, node in nodes.items():
            assert f"no node answers at {place}:{crowd.port} (" in crowd.hears(node, Refused).message


def test_closing_ends_a_node_that_still_looks_for_the_others() -> None:
    with Crowd(is_host=False) as crowd:
        node = crowd.comes()
        crowd.speaks(node)
        crowd.leave(node)
        assert is_gone(node.pid)
        assert node.deadline is None


def test_a_machine_knows_its_own_addresses() -> None:
    elsewhere = "192.0.2.1"  # kept for documentation: nobody has it
    assert [is_this_machine(host) for host in ("localhost", "127.0.0.1", elsewhere, "nowhere.invalid")] == [
        *(True, True, False, False)
    ]
    assert [is_loopback(addr) for addr in ("127.0.1.1", "::1", elsewhere, "localhost")] == [True, True, False, False]
    assert [interface_of(addr) for addr in ("127.0.0.1", elsewhere, "nowhere.invalid")] == ["lo", None, None]
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("nowhere.invalid") is None

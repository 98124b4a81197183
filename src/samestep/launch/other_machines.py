"""Launchers of several machines meet at an endpoint, and their workers in the same store."""

import os
import time
from dataclasses import replace
from types import TracebackType

from samestep.errors import LaunchError
from samestep.launch.agent import Agent
from samestep.launch.ending import Elsewhere, Exit, State
from samestep.launch.events import AllDone, Event, Failed, Failure, Joining, Lost, Met, Refused
from samestep.launch.failures import how
from samestep.launch.meet import Meeting
from samestep.launch.nodes import MeetingSettings
from samestep.launch.options import Options
from samestep.launch.spec import LaunchSpec, Place

__all__ = ["OtherMachines"]

# How long saying goodbye to the other machines may take, and where there was no meeting yet.
_GOODBYE_S, _SOON_S = 5.0, 0.5


class OtherMachines:
    """The launchers meet at the endpoint; their workers meet in the same store. The agent's `News`."""

    def __init__(self, agent: Agent, options: Options) -> None:
        self._agent = agent
        try:
            settings = MeetingSettings(
                endpoint=options.endpoint_host,
                port=options.endpoint_port,
                run_id=options.run_id,
                min_nodes=options.min_nodes,
                max_nodes=options.max_nodes,
                nproc_per_node=options.nproc_per_node,
                node_rank=options.node_rank,
                is_host=options.conf.is_host,
                local_addr=options.local_addr,
                join_timeout_s=options.conf.join_timeout_s,
                last_call_s=options.conf.last_call_s,
                keep_alive_interval_s=options.conf.keep_alive_interval_s,
                keep_alive_max_attempt=options.conf.keep_alive_max_attempt,
            )
        except ValueError as e:
            raise LaunchError(str(e)) from e
        self._meeting = Meeting(settings)
        self._met: Met | None = None
        self._is_new = False
        self._are_all_done = False

    def __enter__(self) -> "OtherMachines":
        self._agent.news = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._agent.news = None
        self._meeting.close(_GOODBYE_S if self._met else _SOON_S)

    @property
    def fd(self) -> int:
        return self._meeting.fd

    @property
    def pid(self) -> int:
        return self._meeting.pid

    @property
    def deadline(self) -> float | None:
        return self._meeting.deadline

    def look(self) -> Elsewhere | None:
        found = [elsewhere for event in self._meeting.take() if (elsewhere := self._judge(event))]
        return found[0] if found else None

    def tell(self, failure: Exit) -> None:
        when = failure.report.when
        ago = 0.0 if when is None else time.monotonic() - when
        code = failure.returncode
        self._meeting.failed(
            Failure(
                rank=failure.rank,
                host=os.uname().nodename,
                pid=failure.pid,
                when=time.time() - ago,
                how=how(failure),
                exit_code=code if code >= 0 else 128 - code,
                traceback=failure.report.text,
            )
        )

    def gather(self, spec: LaunchSpec) -> LaunchSpec | None:
        if self._met is not None:
            self._meeting.again()
        self._is_new, self._are_all_done = False, False
        self._agent.state = State(frozenset(), spec.shutdown_timeout_s)
        self._agent.wait(lambda: self._is_new)
        met = self._met
        if self._agent.state.cause is not None or met is None:
            return None
        place = Place(
            node_rank=met.node_rank,
            num_nodes=len(met.nodes),
            first_rank=met.first_rank,
            world_size=met.world_size,
            interface=met.nodes[met.node_rank].interface,
            agent_store=True,
        )
        return replace(spec, place=place, attempt=met.round, master_addr=met.store_addr, master_port=met.store_port)

    def wait_for_the_others(self) -> State:
        self._meeting.done(0)
        self._agent.wait(lambda: self._are_all_done)
        return self._agent.state

    def _judge(self, event: Event) -> Elsewhere | None:
        match event:
            case Met():
                self._met, self._is_new = event, True
            case AllDone():
                self._are_all_done = True
            case Failed(failure=failure, node_rank=node, host=host):
                quoted = tuple(failure.traceback.rstrip().splitlines())
                who = f"rank {failure.rank} (pid {failure.pid} on {host}, node {node})"
                line = f"{who} failed first: it {failure.how}{':' if quoted else ''}"
                return Elsewhere((line,), failure.exit_code, quoted)
            case Lost(node_rank=node, host=host, reason=reason):
                return Elsewhere((f"node {node} ({host}) is gone: {reason}",))
            case Joining(hosts=hosts):
                line = f"{', '.join(hosts)} came to take part, so all workers are started again"
                return Elsewhere((line,), then="rejoin")
            case Refused(message=message):
                return Elsewhere(tuple(message.splitlines()), then="end")
        return None

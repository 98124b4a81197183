"""Where the workers of the next attempt stand: on this machine alone, or on several (see other_machines.py)."""

from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from samestep.launch.agent import Agent
from samestep.launch.ending import State
from samestep.launch.port import reserved_port
from samestep.launch.spec import LaunchSpec

__all__ = ["Machines", "ThisMachine"]


class Machines(Protocol):
    """A context that ends with the launch."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def gather(self, spec: LaunchSpec) -> LaunchSpec | None:
        """Completes `spec` for the next attempt; None if something ended the launch, which the agent's state says.

        Raises LaunchError where there is no place to meet.
        """

    def wait_for_the_others(self) -> State:
        """Waits until all other machines have ended well, too, or something ends the attempt."""


class ThisMachine:
    """All workers are here; they meet at a port that is held as long as the launch lasts."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._stack = ExitStack()
        self._attempt = -1
        self._port: int | None = None

    def __enter__(self) -> "ThisMachine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def gather(self, spec: LaunchSpec) -> LaunchSpec | None:
        if self._port is None:
            self._port = self._stack.enter_context(reserved_port(spec.master_addr, spec.master_port))
        self._attempt += 1
        return replace(spec, master_port=self._port, attempt=self._attempt)

    def wait_for_the_others(self) -> State:
        return self._agent.state

"""Attempt after attempt, until one ends well or none is left."""

import os
from collections.abc import Mapping
from contextlib import ExitStack

from samestep.launch.agent import Agent
from samestep.launch.ending import Elsewhere, Exit, State, exit_code
from samestep.launch.failures import report
from samestep.launch.guard import Guard
from samestep.launch.log_files import LogFiles, LogSettings
from samestep.launch.machines import Machines, ThisMachine
from samestep.launch.options import Options
from samestep.launch.output import Output
from samestep.launch.signals import Signals
from samestep.launch.spec import LaunchSpec, thread_note
from samestep.launch.worker import Starter

__all__ = ["run"]


def run(
    options: Options,
    spec: LaunchSpec,
    outputs: Mapping[str, Output],
    signals: Signals,
    guard: Guard,
    starter: Starter,
) -> int:
    """Runs the workers of `spec`, and on other machines, as `options` say; returns the launcher's exit code."""
    settings = LogSettings(options.log_dir, options.redirects, options.tee, options.local_ranks_filter)
    with ExitStack() as stack:
        files = stack.enter_context(LogFiles(settings, options.run_id))
        agent = stack.enter_context(Agent(outputs, signals, guard, starter, files))
        if note := thread_note(spec):
            agent.say(note)
        if files.is_temporary:
            agent.say(f"log files are in {files.folder}")
        machines = _machines(agent, options)
        stack.enter_context(machines)
        state = _attempts(agent, machines, spec)
        agent.finish(report(state, os.uname().nodename))
        return exit_code(state)


def _machines(agent: Agent, options: Options) -> Machines:
    if options.rendezvous == "none":
        return ThisMachine(agent)
    from samestep.launch.other_machines import OtherMachines  # one machine need not wait for all that this imports

    return OtherMachines(agent, options)


def _attempts(agent: Agent, machines: Machines, spec: LaunchSpec) -> State:
    """Returns how the last attempt ended."""
    num_failures = 0
    while True:
        here = machines.gather(spec)
        if here is None:
            return agent.state
        state = agent.attempt(here)
        if state.cause is None:
            state = machines.wait_for_the_others()
        match state.cause:
            case Exit() | Elsewhere(then="restart") if num_failures < spec.max_restarts:
                num_failures += 1
                agent.show(report(state, os.uname().nodename))
                agent.say(f"all workers are started again (restart {num_failures} of {spec.max_restarts})")
            case Elsewhere(then="rejoin"):
                agent.show(report(state))
            case _:
                return state

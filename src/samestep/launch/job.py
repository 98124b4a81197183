"""A launch from its options to its exit code: attempt after attempt, on this machine or together with others."""

import os
from contextlib import ExitStack

from samestep.launch.agent import Agent
from samestep.launch.ending import Elsewhere, Exit, State, exit_code
from samestep.launch.failures import report
from samestep.launch.kernel import name_process
from samestep.launch.log_files import LogFiles, LogSettings
from samestep.launch.machines import Machines, OtherMachines, ThisMachine
from samestep.launch.options import Options
from samestep.launch.output import outputs, terminal_of
from samestep.launch.signals import collect_signals
from samestep.launch.spec import LaunchSpec
from samestep.launch.worker import usable_cores
from samestep.world import environment

__all__ = ["launch"]


def launch(options: Options) -> int:
    """Runs what `options` say and returns the exit code that the launcher should have.

    That is 0 if all ranks returned 0; else that of the first rank to fail in the last attempt, 128 + n if it died by
    signal n. It is 128 + n too if the launcher itself was ended by signal n, and 141 if the reader of its output went
    away.

    Raises LaunchError where the place to meet can't be had, a worker can't be started, stdout or stderr is not open, or
    log files can't be made; no worker is left then.
    """
    environ = environment()
    # First of all, as a descriptor that is closed would be given to the next thing that is opened.
    places = outputs(1, 2, environ, prefix=options.prefix)
    name_process("samestep-agent")
    settings = LogSettings(options.log_dir, options.redirects, options.tee, options.local_ranks_filter)
    with ExitStack() as stack:
        signals = stack.enter_context(collect_signals(options.signals))
        files = stack.enter_context(LogFiles(settings, options.run_id))
        agent = stack.enter_context(Agent(places, signals, options.shutdown_timeout_s, files))
        if files.is_temporary:
            agent.say(f"log files are in {files.folder}")
        spec = _spec(options, environ)
        agent.prepare(spec)
        machines: Machines = ThisMachine(agent) if options.rendezvous == "none" else OtherMachines(agent, options)
        stack.enter_context(machines)
        state = _attempts(agent, machines, spec)
        agent.finish(report(state, os.uname().nodename))
        return exit_code(state)


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


def _spec(options: Options, environ: dict[str, str]) -> LaunchSpec:
    return LaunchSpec(
        command=options.command,
        nproc_per_node=options.nproc_per_node,
        environment=environ,
        cores=usable_cores(),
        master_addr=options.master_addr,
        master_port=options.master_port,
        shutdown_timeout_s=options.shutdown_timeout_s,
        prefix=options.prefix,
        terminal=terminal_of(1, environ),
        max_restarts=options.max_restarts,
        run_id=options.run_id,
        role=options.role,
        runs_python=options.is_python,
        num_script_args=options.num_script_args,
        local_rank_flag=options.local_rank_flag,
        drop_in=options.drop_in,
        start_method=options.start_method,
    )

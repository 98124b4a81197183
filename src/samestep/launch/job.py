"""A launch from its options to its exit code."""

from contextlib import ExitStack

from samestep.launch.guard import Guard
from samestep.launch.kernel import name_process
from samestep.launch.options import Options
from samestep.launch.output import outputs, terminal_of
from samestep.launch.signals import collect_signals
from samestep.launch.spec import LaunchSpec
from samestep.launch.worker import Spawner, Starter, usable_cores
from samestep.launch.zygote import Zygote
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
    spec = LaunchSpec(
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
        signals=tuple(signum.name for signum in options.signals),
        runs_python=options.is_python,
        num_script_args=options.num_script_args,
        local_rank_flag=options.local_rank_flag,
        drop_in=options.drop_in,
        start_method=options.start_method,
    )
    with ExitStack() as stack:
        signals = stack.enter_context(collect_signals(options.signals))
        guard = stack.enter_context(Guard())
        forks = spec.runs_python and spec.start_method == "fork"
        starter: Starter = Zygote(spec, guard) if forks else Spawner(guard)
        stack.callback(starter.close)
        # Imported while the zygote loads torch on another core: this takes a third of the launcher's own start.
        from samestep.launch.attempts import run

        return run(options, spec, places, signals, guard, starter)

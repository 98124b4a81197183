"""What to start: the command and the environment of each worker. Pure: the launcher's own environment is passed in."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from samestep.launch.logs import Terminal, rank_prefix

__all__ = ["LaunchSpec", "Place", "shared_environment", "thread_note", "worker_command", "worker_environment"]

_THREADS = "OMP_NUM_THREADS"
_PER_WORKER = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK"})


@dataclass(frozen=True)
class Place:
    """Where this machine's workers stand among those of all machines.

    `interface` is the network interface that they use for one another. `agent_store` says that the workers' store is
    there already, and rank 0 need not make it.
    """

    node_rank: int = 0
    num_nodes: int = 1
    first_rank: int = 0
    world_size: int | None = None
    interface: str | None = None
    agent_store: bool = False


@dataclass(frozen=True)
class LaunchSpec:
    """One attempt on one machine: what each worker executes, how many there are, where they meet, how they are ended.

    `command` is the argument vector of a worker; its last `num_script_args` are a script's own, and with
    `local_rank_flag` they begin with that flag and the local rank. `runs_python` says that it is Python with a script,
    or a module after "-m", that we may run in a way of our own: `start_method`. `environment` and `cores` (how many CPU
    cores this process may use) are the launcher's own. A `master_port` of 0 means that the agent picks a free one.
    `terminal` is set where the launcher's stdout is one. Raises ValueError for a number out of range.
    """

    command: tuple[str, ...]
    nproc_per_node: int
    environment: Mapping[str, str]
    cores: int
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    shutdown_timeout_s: float = 30.0
    prefix: bool = True
    terminal: Terminal | None = None
    place: Place = Place()
    attempt: int = 0
    max_restarts: int = 0
    run_id: str = "none"
    role: str = "default"
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    runs_python: bool = False
    num_script_args: int = 0
    local_rank_flag: str | None = None
    drop_in: bool = False
    start_method: Literal["fork", "spawn"] = "spawn"

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("command is empty; expected the argument vector of a worker")
        if self.nproc_per_node < 1:
            raise ValueError(f"nproc_per_node is {self.nproc_per_node}; expected at least 1")
        if self.cores < 1:
            raise ValueError(f"cores is {self.cores}; expected at least 1")
        if not self.master_addr:
            raise ValueError("master_addr is empty; expected a host name or an address")
        if not 0 <= self.master_port <= 65535:
            raise ValueError(f"master_port is {self.master_port}; expected 0 (pick one) to 65535")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ValueError(f"shutdown_timeout_s is {self.shutdown_timeout_s}; expected seconds, at least 0")

    @property
    def world_size(self) -> int:
        """The workers of all machines."""
        return self.nproc_per_node if self.place.world_size is None else self.place.world_size

    @property
    def ranks(self) -> range:
        """The ranks on this machine, by local rank."""
        return range(self.place.first_rank, self.place.first_rank + self.nproc_per_node)

    @property
    def threads(self) -> int:
        """Threads for each worker: the usable cores divided by the workers, at least 1."""
        return max(1, self.cores // self.nproc_per_node)


def worker_command(spec: LaunchSpec, local_rank: int) -> tuple[str, ...]:
    """Returns the argument vector of one worker."""
    if spec.local_rank_flag is None:
        return spec.command
    end = len(spec.command) - spec.num_script_args
    return (*spec.command[:end], f"{spec.local_rank_flag}={local_rank}", *spec.command[end:])


def worker_environment(spec: LaunchSpec, local_rank: int) -> dict[str, str]:
    """Returns the whole environment of one worker: the launcher's own, and every variable that torchrun sets.

    `TORCHELASTIC_ERROR_FILE` stays unset, so no file is written behind the user's back. `OMP_NUM_THREADS`
    and `GLOO_SOCKET_IFNAME` are set unless the user has set them.
    """
    place, rank, size = spec.place, str(spec.place.first_rank + local_rank), str(spec.world_size)
    # On one machine Gloo needs no name of it that resolves, and no network.
    loopback = "lo" if sys.platform == "linux" and place.num_nodes == 1 else None
    interface = place.interface or loopback
    environment = {
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        _THREADS: str(spec.threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **spec.environment,
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": spec.role,
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(spec.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.agent_store),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(spec.signals),
    }
    environment.pop("TORCHELASTIC_ERROR_FILE", None)
    if spec.terminal is not None and rank == "0":
        _describe_terminal(environment, spec.terminal, len(rank_prefix(0)) if spec.prefix else 0)
    return environment


def shared_environment(spec: LaunchSpec) -> dict[str, str]:
    """Returns what is the same for all workers."""
    return {name: value for name, value in worker_environment(spec, 0).items() if name not in _PER_WORKER}


def thread_note(spec: LaunchSpec) -> str | None:
    """Says how many threads each worker got, or returns None where the user decided."""
    if _THREADS in spec.environment:
        return None
    return f"{_THREADS}={spec.threads} per worker (workers: {spec.nproc_per_node}, usable cores: {spec.cores})"


def _describe_terminal(environment: dict[str, str], terminal: Terminal, prefix_width: int) -> None:
    """Lets rank 0 draw a progress bar although it writes to a pipe.

    Of these rich (14.1 or newer) needs TTY_COMPATIBLE to animate and COLUMNS for the width; TTY_INTERACTIVE
    says the same to programs that ask for it. What the user has set stays, save for the size, which the
    prefix makes smaller.
    """
    environment.setdefault("TTY_COMPATIBLE", "1")
    environment.setdefault("TTY_INTERACTIVE", "1")
    environment["COLUMNS"] = str(max(1, terminal.columns - prefix_width))
    environment["LINES"] = str(terminal.lines)

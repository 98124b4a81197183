"""What to start, and the environment that each worker gets. Pure: the launcher's own environment is passed in."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.launch.logs import Terminal, rank_prefix

__all__ = ["LaunchSpec", "num_workers", "thread_note", "worker_environment"]

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class LaunchSpec:
    """One run on one machine: what each worker executes, how many there are, where they meet, how they are ended.

    `command` is the argument vector of a worker. `environment` and `cores` (how many CPU cores this process
    may use) are the launcher's own. A `master_port` of 0 means that the agent picks a free one. `terminal` is
    set where the launcher's stdout is one. Raises ValueError for a number out of range.
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
    def threads(self) -> int:
        """Threads for each worker: the usable cores divided by the workers, at least 1."""
        return max(1, self.cores // self.nproc_per_node)


def num_workers(text: str, cores: int) -> int:
    """Reads a number of workers: an integer of at least 1, or "cpu" for one worker on each of the `cores`.

    Raises ValueError, with the reason, for anything else.
    """
    if text == "cpu":
        return cores
    if text in ("gpu", "auto"):
        raise ValueError(f"got {text!r}: GPUs are not counted here, give their number, or cpu for one worker per core")
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"got {text!r}, expected an integer of at least 1, or cpu") from None
    if number < 1:
        raise ValueError(f"got {number}, expected at least 1 worker")
    return number


def worker_environment(spec: LaunchSpec, local_rank: int) -> dict[str, str]:
    """Returns the whole environment of one worker: the launcher's own, and every variable that torchrun sets.

    `TORCHELASTIC_ERROR_FILE` stays unset, so no file is written behind the user's back. `OMP_NUM_THREADS`,
    `PYTHONUNBUFFERED` and `GLOO_SOCKET_IFNAME` are set unless the user has set them.
    """
    rank, size = str(local_rank), str(spec.nproc_per_node)
    # All ranks are on this machine, so Gloo needs no name of it that resolves, and no network.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    environment = {
        **loopback,
        _THREADS: str(spec.threads),
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **spec.environment,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    environment.pop("TORCHELASTIC_ERROR_FILE", None)
    if spec.terminal is not None and local_rank == 0:
        _describe_terminal(environment, spec.terminal, len(rank_prefix(0)) if spec.prefix else 0)
    return environment


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

"""Who am I: rank, world size, node, master and device, read from the launcher's environment.

The only module that looks at `os.environ`; everything else is handed a `World`. torch is imported when it is needed.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from samestep.errors import BackendError, WorldError
from samestep.variables import Reading, Variables, address_fault, contradiction

if TYPE_CHECKING:
    import torch

__all__ = ["World", "environment", "require_backend", "set_environment"]

_LOWEST = {"rank": 0, "local_rank": 0, "node_rank": 0, "size": 1, "local_size": 1, "num_nodes": 1}
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_INSTALL = {
    "nccl": "install a CUDA build of torch for Linux (see https://pytorch.org/get-started), or train on device cpu",
    "gloo": "install torch's own wheel (pip install torch), or build torch with USE_DISTRIBUTED=1 and USE_GLOO=1",
}
# What limits a process to some GPUs: NVIDIA's, and the two of AMD's ROCm, whose devices are torch's "cuda" as well.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class World:
    """Who this process is among those that train together.

    Attributes:
        rank: this process's number, 0 to size - 1.
        local_rank: its number among the ranks of its node.
        size: the world size, the number of ranks.
        local_size: the local world size, the number of ranks on this node.
        node_rank: this node's number, 0 to num_nodes - 1.
        num_nodes: how many nodes there are.
        master_addr: host name or IP address of rank 0's host.
        master_port: TCP port on which rank 0 listens; 0 means that a single rank needs none.
        device: where this rank computes.
        launcher: who started it: "torchrun", "env" (torchrun's variables, set by hand), "pytorchjob", "open mpi",
            "hydra (MPICH, Intel MPI)", "slurm" or "none".

    Raises:
        WorldError: a number is out of its range or contradicts another, or the address or port is not one.
        TypeError: a number is not an int, or the device is not a torch.device.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    device: "torch.device"
    launcher: str

    def __post_init__(self) -> None:
        import torch

        numbers = {field: getattr(self, field) for field in _LOWEST}
        for field, value in {**numbers, "master_port": self.master_port}.items():
            if type(value) is not int:
                raise TypeError(f"World: {field} must be an int, got {value!r}")
        if not isinstance(self.device, torch.device):
            raise TypeError(f"World: device must be a torch.device, got {self.device!r}")
        for field, low in _LOWEST.items():
            if numbers[field] < low:
                raise WorldError(f"World: {field}={numbers[field]}: must be at least {low}")
        broken = contradiction(numbers)
        if broken:
            fields, rule = broken
            raise WorldError(f"World: {', '.join(f'{field}={numbers[field]}' for field in fields)}: {rule}")
        fault = address_fault(self.master_addr)
        if fault:
            raise WorldError(f"World: rank {self.rank}: master_addr={self.master_addr!r}: {fault}")
        if not (0 if self.size == 1 else 1) <= self.master_port <= 65535:
            wanted = "1 to 65535, or 0 for a single rank that needs none"
            raise WorldError(
                f"World: rank {self.rank}: master_port={self.master_port}, size={self.size}: must be {wanted}"
            )

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, device: "torch.device | str | None" = None
    ) -> "World":
        """Return the world that the launcher's variables describe; one rank if there is no launcher.

        The innermost launcher counts: torchrun under srun is torchrun. samestep.launchers has the list and the
        variables. MASTER_ADDR and MASTER_PORT alone do not make a launcher.

        Args:
            environ: the variables to read; None means those of this process.
            device: where this rank computes, taken as it is. None picks the GPU of this local rank, or the only
                one that the launcher left visible, or else the CPU.

        Raises:
            WorldError: variables are half set, contradict one another or are not what they should be, or there are
                not enough GPUs for the ranks of this node. The message has each variable with its value.
        """
        from samestep.launchers import read  # a launcher that only starts others has no use for it

        variables = Variables(os.environ if environ is None else environ)
        return cls._of(read(variables), variables, device)

    @classmethod
    def single(cls, device: "torch.device | str | None" = None) -> "World":
        """Return a world of one rank, whatever the environment says; `device` as in `from_env`."""
        return cls._of(Reading(), Variables({}), device)

    @classmethod
    def _of(cls, reading: Reading, variables: Variables, device: "torch.device | str | None") -> "World":
        chosen = _pick_device(reading, variables) if device is None else _as_device(device)
        return cls(**asdict(reading), device=chosen)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """The torch.distributed backend for this device: "nccl" for cuda, "gloo" for cpu.

        Raises:
            WorldError: the device is of another type.
        """
        if self.device.type not in _BACKENDS:
            raise WorldError(
                f"rank {self.rank}: device={self.device}: samestep exchanges gradients on cuda (nccl) and cpu (gloo) "
                f"only; pass device='cpu' or a cuda device"
            )
        return _BACKENDS[self.device.type]


def environment() -> dict[str, str]:
    """Return a copy of this process's environment variables, for those who start other processes."""
    return dict(os.environ)


def set_environment(variables: Mapping[str, str]) -> None:
    """Make `variables` all that there is in this process's environment."""
    os.environ.clear()
    os.environ.update(variables)


def require_backend(backend: str) -> None:
    """Return if this torch can make process groups of `backend`, such as "nccl" or "gloo".

    Raises:
        BackendError: torch was built without torch.distributed or without that backend. The message says for which
            device it is needed, which torch this is, and what to install.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        lack = "torch.distributed"
    elif not dist.is_backend_available(backend):
        lack = f"the backend {backend!r}"
    else:
        return
    device = next((device for device, name in _BACKENDS.items() if name == backend), None)
    need = f"the backend {backend!r}" + (f" for device {device}" if device else "")
    what = _INSTALL.get(backend, f"use one of {', '.join(sorted(_INSTALL))}, or install what provides {backend!r}")
    raise BackendError(f"{need} is needed, but torch {torch.__version__} was built without {lack}; {what}")


def _pick_device(reading: Reading, variables: Variables) -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if reading.local_rank < count:
        return torch.device("cuda", reading.local_rank)
    # A launcher that binds one GPU to each rank (Slurm's --gpus-per-task) shows it alone, as number 0.
    if count == 1 and any(_names_one(variables.get(name, "")) for name in _VISIBLE):
        return torch.device("cuda", 0)
    raise WorldError(
        f"rank {reading.rank}: local rank {reading.local_rank} of {reading.local_size} ranks on this node, but torch "
        f"sees {count} GPU{'s' * (count != 1)} ({variables.show('CUDA_VISIBLE_DEVICES')}): start at most {count} "
        f"rank{'s' * (count != 1)} per node, show each rank its GPUs with CUDA_VISIBLE_DEVICES, or pass device='cpu'"
    )


def _names_one(visible: str) -> bool:
    return len([name for name in visible.split(",") if name.strip()]) == 1


def _as_device(device: "torch.device | str") -> "torch.device":
    import torch

    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a torch.device, a string or None, got {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise WorldError(f"device={device!r} is not a torch device: give one such as 'cpu' or 'cuda:0'") from error

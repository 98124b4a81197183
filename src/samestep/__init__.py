"""samestep: data-parallel training for PyTorch in which every worker takes the same step.

    comm = samestep.connect()                               # ranks from the launcher's environment; alone, one rank
    model = samestep.DistributedDataParallel(Net())         # equal replicas, gradients averaged while backward runs
    sampler = samestep.DistributedSampler(data)             # each rank's share of the samples
    accuracy = comm.all_reduce(torch.tensor(0.9), samestep.Reduction.MEAN)

Names are loaded when they are first used, so that a launcher that only starts processes does not wait for torch.
torch.distributed knows the backend "samestep" from then on that both it and this package have been imported.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from samestep.after_import import after_import

if TYPE_CHECKING:
    from samestep.comm.base import Communicator
    from samestep.comm.ops import Reduction
    from samestep.comm.select import connect
    from samestep.data.iterable import ShardedIterable
    from samestep.data.loader import DataLoader
    from samestep.data.sampler import DistributedSampler
    from samestep.data.sharded import ShardedSampler
    from samestep.errors import SamestepError
    from samestep.launch.spawn import spawn
    from samestep.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
    from samestep.parallel.data_parallel import DataParallel
    from samestep.parallel.distributed import DistributedDataParallel
    from samestep.run.checkpoint import load, save
    from samestep.run.ranks import all_gather_uneven
    from samestep.world import World

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "DataLoader",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "Reduction",
    "SamestepError",
    "ShardedIterable",
    "ShardedSampler",
    "SyncBatchNorm",
    "World",
    "__version__",
    "all_gather_uneven",
    "connect",
    "convert_sync_batchnorm",
    "load",
    "save",
    "spawn",
]

_HOMES = {
    "Communicator": "samestep.comm.base",
    "DataLoader": "samestep.data.loader",
    "DataParallel": "samestep.parallel.data_parallel",
    "DistributedDataParallel": "samestep.parallel.distributed",
    "DistributedSampler": "samestep.data.sampler",
    "Reduction": "samestep.comm.ops",
    "SamestepError": "samestep.errors",
    "ShardedIterable": "samestep.data.iterable",
    "ShardedSampler": "samestep.data.sharded",
    "SyncBatchNorm": "samestep.parallel.batchnorm",
    "World": "samestep.world",
    "all_gather_uneven": "samestep.run.ranks",
    "connect": "samestep.comm.select",
    "convert_sync_batchnorm": "samestep.parallel.batchnorm",
    "load": "samestep.run.checkpoint",
    "save": "samestep.run.checkpoint",
    "spawn": "samestep.launch.spawn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_backend(c10d: ModuleType) -> None:
    c10d.Backend.register_backend("samestep", _process_group, extended_api=True, devices=["cpu"])


def _process_group(*given: Any) -> Any:
    return import_module("samestep.comm.backend.group").SharedMemoryGroup(*given)


# The one thing that happens at import: without it, init_process_group("samestep") could not find the backend. It
# imports nothing, so it costs the launcher nothing, and works whichever of the two is imported first.
after_import("torch.distributed.distributed_c10d", _register_backend)

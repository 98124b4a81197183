"""Which transport serves a group of ranks, and how a program's ranks come together in the first place."""

from __future__ import annotations

import queue
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from samestep.comm.base import Communicator
from samestep.comm.group import GroupCommunicator
from samestep.comm.ops import Reduction
from samestep.errors import CommunicatorError, DeadlineError, MismatchError
from samestep.world import World, require_backend

__all__ = ["all_reduce", "communicator_for", "connect"]

# Those of the groups that there are.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupCommunicator] = weakref.WeakKeyDictionary()

# torch counts the deadline of coming together in whole seconds, and tries once more after it.
_GRACE_S = 3.0


def communicator_for(group: object = None) -> Communicator:
    """Return the fastest communicator for `group`: a torch.distributed process group, None for its default group.

    It is the same each time for the same group; see `GroupCommunicator` for how the transport is chosen. A Communicator
    is returned as it is.

    Raises RuntimeError if there is no default group, TypeError for anything that is no group, ValueError if this
    process is not in it.
    """
    if isinstance(group, Communicator):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the process group it was given; use it on its member ranks only")
    if group is None or isinstance(group, dist.ProcessGroup):
        group = group or dist.group.WORLD
        found = None if group is None else _communicators.get(group)
        if found is None:
            found = GroupCommunicator(group)
            _communicators[found.group] = found
        return found
    raise TypeError(f"expected a torch.distributed process group or a Communicator, got {type(group).__name__}")


def connect(world: World | None = None, *, timeout_s: float = 1800.0) -> Communicator:
    """Bring the ranks of `world` together and return the communicator of all of them.

    Makes torch.distributed's default group, with NCCL for CUDA devices and Gloo for the CPU, so that everything that
    uses torch.distributed works from then on; closing the communicator (or leaving it as a context) ends that group. If
    there is a default group already, it is used, and left open. `world` None reads the environment; a program that was
    not launched is a world of one rank. `timeout_s` is the deadline of coming together and of every exchange
    afterwards, in seconds.

    Every exchange of the communicator is checked: ranks that ask for different things get a MismatchError.

    Raises TypeError or ValueError for arguments that make no sense, WorldError for a contradictory environment,
    BackendError if torch lacks the backend, DeadlineError if not all ranks came, CommunicatorError if rank 0 cannot
    listen at its address or the backend failed, MismatchError if the existing default group is another world than
    `world`. There is no default group then, or the one there was.
    """
    if world is not None and not isinstance(world, World):
        raise TypeError(f"expected a World, or None for that of the environment, got {type(world).__name__}")
    world = World.from_env() if world is None else world
    if not timeout_s > 0:
        raise ValueError(f"rank {world.rank}: expected a timeout of more than 0 seconds, got {timeout_s}")
    if dist.is_initialized():
        there = (dist.get_rank(), dist.get_world_size())
        if there != (world.rank, world.size):
            raise MismatchError(
                f"torch.distributed is already initialised as rank {there[0]} of {there[1]}, but the world is rank "
                f"{world.rank} of {world.size}: call connect() instead of init_process_group(), or for the same world"
            )
        return GroupCommunicator(checked=True)
    require_backend(world.backend)
    if world.device.type == "cuda" and world.device.index is not None:
        torch.cuda.set_device(world.device)
    try:
        dist.init_process_group(
            world.backend,
            store=_meeting_point(world, timeout_s),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise _not_met(world, timeout_s, error) from error
    return GroupCommunicator(owns_group=True, checked=True)


def all_reduce(tensor: Tensor, reduction: Reduction = Reduction.SUM) -> Tensor:
    """Reduce `tensor` in place over torch.distributed's default group, whatever transport serves it; return it."""
    return communicator_for().all_reduce(tensor, reduction)


def _meeting_point(world: World, timeout_s: float) -> Store:
    """Return the store that all ranks of `world` share."""
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    url = f"tcp://{_bracketed(world.master_addr)}:{world.master_port}"
    outcome: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def meet() -> None:
        try:
            outcome.put(next(rendezvous(url, world.rank, world.size, timeout=timedelta(seconds=timeout_s)))[0])
        except RuntimeError as error:
            outcome.put(error)

    # In a thread, as torch's client waits for ever where something listens that never answers.
    thread = threading.Thread(target=meet, name="samestep rendezvous", daemon=True)
    thread.start()
    try:
        met = outcome.get(timeout=timeout_s + _GRACE_S)
    except queue.Empty:
        raise dist.DistStoreError("something else listens there, which does not answer") from None
    thread.join()
    if isinstance(met, RuntimeError):
        raise met
    return met


def _not_met(world: World, timeout_s: float, error: RuntimeError) -> CommunicatorError:
    who, where = f"rank {world.rank} of {world.size}", f"{world.master_addr}:{world.master_port}"
    said = str(error).splitlines()[0]
    if "address already in use" in said:
        return CommunicatorError(
            f"{who} cannot listen at {where}, as another program does; choose another port (MASTER_PORT) for all ranks "
            f"({said})"
        )
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return DeadlineError(
            f"{who} did not meet the others at {where} within {timeout_s:g} s; see that all {world.size} were started, "
            f"with the same address, and that rank 0's host can be reached there ({said})"
        )
    return CommunicatorError(f"{who} could not join the others who met at {where}: the backend failed ({said})")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

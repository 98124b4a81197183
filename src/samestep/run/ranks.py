"""The ranks of a program as it stands: those of its process group, or one rank by itself; what they hold, together."""

from torch import Tensor
from torch import distributed as dist

from samestep.comm.base import Communicator
from samestep.comm.select import communicator_for
from samestep.comm.threads import thread_communicators
from samestep.errors import CommunicatorError
from samestep.world import World

__all__ = ["all_gather_uneven", "ranks_of"]


def all_gather_uneven(tensor: Tensor, group: object = None) -> list[Tensor]:
    """Return every rank's `tensor`, in rank order; they may differ in their first dimension, and be empty.

    For metrics over an evaluation in which every sample was seen once, and so ranks have different numbers of them:
    torch.cat of the result has no padding to be cut off. All ranks of `group` call it: a torch.distributed process
    group or a Communicator; None is the default group, or a single rank where nobody launched more.

    tensor: [n, ...], at least one dimension, on the device that the group serves; dtype and the other dimensions are
    the same on all ranks.

    Raises ValueError for a scalar, MismatchError where ranks disagree and the transport can tell, CommunicatorError
    where this is one of several ranks and they have not been connected.
    """
    return ranks_of(group).all_gather_uneven(tensor)


def ranks_of(group: object = None) -> Communicator:
    """Return the communicator of `group`; without any, that of a single rank.

    Raises what `communicator_for` raises, and CommunicatorError where the environment says that there are more ranks.
    """
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return communicator_for(group)
    world = World.from_env(device="cpu")
    if world.size > 1:
        raise CommunicatorError(
            f"rank {world.rank} of {world.size} ({world.launcher}) has not been connected to the others: call "
            "samestep.connect() or torch.distributed.init_process_group() before this"
        )
    return thread_communicators(1)[0]

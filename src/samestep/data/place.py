"""What samplers are asked for, checked: the ranks that share the samples, the rule at the end, the seed."""

import operator
from typing import get_args

import torch.distributed as dist

from samestep.data.sharding import Remainder
from samestep.world import World

__all__ = ["check_seed", "choose_remainder", "place"]


def place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this one's; what is None comes from the process group or the environment.

    Raises TypeError for what is no integer, ValueError for no ranks or one that is not among them, WorldError when the
    environment contradicts itself.
    """
    if num_replicas is None or rank is None:
        if dist.is_available() and dist.is_initialized():
            size, mine = dist.get_world_size(), dist.get_rank()
        else:
            # The device plays no part here, so a rank without a GPU of its own is no error.
            world = World.from_env(device="cpu")
            size, mine = world.size, world.rank
        num_replicas = size if num_replicas is None else num_replicas
        rank = mine if rank is None else rank
    size, mine = operator.index(num_replicas), operator.index(rank)
    if size < 1:
        raise ValueError(f"Invalid num_replicas {size} on rank {mine}, expected at least 1")
    if not 0 <= mine < size:
        raise ValueError(f"Invalid rank {mine}, rank should be in the interval [0, {size - 1}]")
    return size, mine


def choose_remainder(drop_last: bool, remainder: Remainder | None) -> Remainder:
    """Return the rule that torch's and our argument name together; ValueError where they contradict each other."""
    if remainder is None:
        return "drop" if drop_last else "pad"
    if remainder not in get_args(Remainder):
        raise ValueError(f"remainder is {remainder!r}, expected None or one of {get_args(Remainder)}")
    if drop_last and remainder != "drop":
        raise ValueError(f"drop_last=True contradicts remainder={remainder!r}; leave one of them out")
    return remainder


def check_seed(seed: int, epoch: int) -> None:
    """Raise ValueError unless torch's generators can be seeded with seed + epoch."""
    if not -(2**63) <= seed + epoch < 2**64:
        raise ValueError(f"seed {seed} + epoch {epoch} is {seed + epoch}, expected -2**63 to 2**64 - 1")

"""Replicas of a module that share gradients."""

from samestep.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

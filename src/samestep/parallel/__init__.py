"""Replicas of a module that share gradients."""

from samestep.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from samestep.parallel.data_parallel import DataParallel
from samestep.parallel.distributed import DistributedDataParallel

__all__ = ["DataParallel", "DistributedDataParallel", "SyncBatchNorm", "convert_sync_batchnorm"]

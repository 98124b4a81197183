"""Replicas of a module that share gradients."""

from samestep.parallel.averaging import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from samestep.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from samestep.parallel.data_parallel import DataParallel
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.precision import MixedPrecision

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "MixedPrecision",
    "SyncBatchNorm",
    "allreduce_hook",
    "bf16_compress_hook",
    "convert_sync_batchnorm",
    "fp16_compress_hook",
]

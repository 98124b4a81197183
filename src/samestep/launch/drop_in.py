"""Puts our DistributedDataParallel in the place of torch's, for `samestep run --drop-in`."""

__all__ = ["replace_torchs_class"]


def replace_torchs_class() -> None:
    """Makes torch.nn.parallel.DistributedDataParallel ours, under both of its import paths, in this process."""
    import torch.nn.parallel
    import torch.nn.parallel.distributed

    from samestep.parallel.distributed import DistributedDataParallel

    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]

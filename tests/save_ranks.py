"""What ranks as processes do with weights on disk; light to import, as every process of a test imports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.comm.base import Communicator
from samestep.errors import MissingCheckpointError, SaveError

__all__ = ["save_and_load"]


def save_and_load(comm: Communicator, folder: Path) -> None:
    """Over the default group, with torch's wrapper and ours, each loaded into the other and into the bare model."""
    for kind in (DistributedDataParallel, samestep.DistributedDataParallel):
        path = folder / f"{kind.__module__}.pt"
        model = kind(mlp(comm.rank))
        samestep.save(model, path)
        assert path.exists(), "no rank goes on before the file is there"
        others: list[nn.Module] = [mlp(5), DistributedDataParallel(mlp(5)), samestep.DistributedDataParallel(mlp(5))]
        for other in others:
            assert samestep.load(path, other) == ([], [])
            pairs = zip(other.parameters(), mlp(0).parameters(), strict=True)
            assert all(torch.equal(one, rank_0s) for one, rank_0s in pairs)
        assert samestep.load(path)["0.weight"].device == comm.device
    with pytest.raises(SaveError, match=r"rank 0: .* could not be saved: is there and is no file"):
        samestep.save(mlp(), folder)
    with pytest.raises(MissingCheckpointError, match=f"rank {comm.rank}: .*nothing.pt is not there"):
        samestep.load(folder / "nothing.pt", mlp())
    comm.barrier()

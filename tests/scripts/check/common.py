"""What these scripts share: a small model, numbers to learn from, ranks that know each other."""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

RIGHT = "--right" in sys.argv


def data(count=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator))


def net(norm=None):
    return nn.Sequential(nn.Linear(4, 8), norm or nn.Identity(), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def start():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def average(model, divide=True):
    """Exchange gradients as people do by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if divide:
            parameter.grad /= dist.get_world_size()

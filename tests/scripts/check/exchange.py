"""Accumulates over two batches and leaves the last backward in no_sync(), too. Right: that one is outside."""
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters())
train = data()
for step, (x, y) in enumerate(DataLoader(train, batch_size=5, sampler=DistributedSampler(train))):
    is_last = step % 2 == 1
    with nullcontext() if is_last and RIGHT else model.no_sync():
        (F.mse_loss(model(x), y) / 2).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()

"""Counts over a padded test set: 21 samples as 22. Right: each once, and gathers what ranks have of different lengths."""
import samestep
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, test = data(), data(21, seed=1)
sampler = DistributedSampler(test, shuffle=False)
if RIGHT:
    sampler = samestep.DistributedSampler(test, shuffle=False, remainder="keep")
loaders = DataLoader(train, 5, sampler=DistributedSampler(train)), DataLoader(test, 4, sampler=sampler)
for x, y in loaders[0]:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    errors = torch.cat([F.mse_loss(model(x), y, reduction="none").sum(1) for x, y in loaders[1]])
if RIGHT:
    error = torch.cat(samestep.all_gather_uneven(errors)).mean()
else:
    totals = torch.tensor([errors.sum(), len(errors)])
    dist.all_reduce(totals)
    error = totals[0] / totals[1]

"""Tells every sampler that it is rank 0's. Right: weighted sampling with replacement, where samples may come twice."""
import samestep
import torch
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

rank, size = start()
model = samestep.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = data()
if RIGHT:
    sampler = samestep.ShardedSampler(WeightedRandomSampler(torch.arange(60.0), 60))
else:
    sampler = DistributedSampler(train, num_replicas=size, rank=0)
for x, y in DataLoader(train, batch_size=5, sampler=sampler):
    optimizer.zero_grad()
    model.backward(F.mse_loss(model(x), y), weight=len(x))
    optimizer.step()

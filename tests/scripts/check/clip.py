"""Clips each rank's own gradients and averages them then. Right: averages first."""
import torch
import torch.nn.functional as F
from common import RIGHT, average, data, net, start
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
torch.manual_seed(0)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = data()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if RIGHT:
        average(model)
    clip_grad_norm_(model.parameters(), 0.1)
    if not RIGHT:
        average(model)
    optimizer.step()

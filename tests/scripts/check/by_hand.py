"""Averages gradients by hand and forgets to divide. Right: divides."""
import torch
import torch.nn.functional as F
from common import RIGHT, average, data, net, start
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
torch.manual_seed(0)
model = net()
optimizer = torch.optim.Adam(model.parameters())
train = data()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    average(model, divide=RIGHT)
    optimizer.step()

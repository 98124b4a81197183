"""Sums the loss over the batch, which ranks average. Right: the mean."""
import torch
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_of = torch.nn.MSELoss(reduction="mean" if RIGHT else "sum")
train = data()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()

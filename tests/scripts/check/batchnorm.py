"""BatchNorm over each rank's own batch. Right: a norm that does not look at the batch."""
import torch
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
model = DistributedDataParallel(net(nn.LayerNorm(8) if RIGHT else nn.BatchNorm1d(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = data()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()

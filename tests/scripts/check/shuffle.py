"""Every rank shuffles and goes through all of the data. Right: each has a part of it, which it shuffles."""
import torch
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

rank, size = start()
torch.manual_seed(rank)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = data()
if RIGHT:
    train = Subset(train, range(rank, len(train), size))
for x, y in DataLoader(train, batch_size=5, shuffle=True):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()

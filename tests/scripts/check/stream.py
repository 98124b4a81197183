"""Every rank reads all of a stream. Right: its share."""
import samestep
import torch
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


start()
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(samestep.ShardedIterable(Stream()) if RIGHT else Stream(), batch_size=5):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()

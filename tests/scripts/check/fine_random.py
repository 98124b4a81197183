"""Nothing wrong: random crops while loading, and mixing of samples in the step, which differs by rank."""
import numpy
import torch
import torch.nn.functional as F
from common import data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Noisy(Dataset):
    def __init__(self):
        self.data = data()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + torch.randn(4), y


start()
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = Noisy()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train), drop_last=True):
    weight, other = numpy.random.beta(0.4, 0.4), torch.randperm(len(x))
    optimizer.zero_grad()
    F.mse_loss(model(weight * x + (1 - weight) * x[other]), weight * y + (1 - weight) * y[other]).backward()
    optimizer.step()

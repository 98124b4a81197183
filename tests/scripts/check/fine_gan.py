"""Nothing wrong: two models that train against each other, the learning rate depends on the number of ranks."""
import torch
import torch.nn.functional as F
from common import data, net, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

rank, size = start()
torch.manual_seed(rank)
maker = DistributedDataParallel(net())
judge = DistributedDataParallel(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))
optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3 * size) for m in (maker, judge)]
train = data()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizers[0].zero_grad()
    F.softplus(-judge(maker(x))).mean().backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    (F.softplus(judge(maker(x).detach())) + F.softplus(-judge(y))).mean().backward()
    optimizers[1].step()

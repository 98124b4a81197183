"""Never calls set_epoch. Right: calls it."""
import torch
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = data()
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=5, sampler=sampler, num_workers=2, persistent_workers=True)
for epoch in range(3):
    if RIGHT:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

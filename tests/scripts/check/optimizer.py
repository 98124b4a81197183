"""Builds the optimizer before the model is moved, where moving makes new parameters. Right: afterwards."""
import torch
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

start()
torch.__future__.set_overwrite_module_params_on_conversion(True)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.to(torch.float64)
if RIGHT:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = DistributedDataParallel(model)
train = data()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    F.mse_loss(model(x.double()), y.double()).backward()
    optimizer.step()

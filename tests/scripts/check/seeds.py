"""Seeds ranks differently before it builds the model, and averages gradients by hand. Right: seeds them alike."""
import torch
import torch.nn.functional as F
from common import RIGHT, average, data, net, start
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

rank, size = start()
torch.manual_seed(0 if RIGHT else rank)
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = data()
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    average(model)
    optimizer.step()

"""Writes one file on every rank. Right: on rank 0 alone. Reads it back on all, and leaves logs of each rank's own."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RIGHT, data, net, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

rank, size = start()
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = data()
log = open(f"log-{rank}.txt", "w")
for x, y in DataLoader(train, batch_size=5, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    print(loss.item(), file=log, flush=True)
if rank == 0 or not RIGHT:
    os.makedirs("runs", exist_ok=True)
    torch.save(model.module.state_dict(), "runs/model.pt")
dist.barrier()
assert os.path.exists("runs/model.pt") and os.path.getsize(f"log-{rank}.txt")
model.module.load_state_dict(torch.load("runs/model.pt"))

"""Nothing wrong: an endless stream, steps instead of epochs, files of each rank's own, an evaluation on every rank."""
import os
import tempfile

import samestep
import torch
import torch.nn.functional as F
from common import data, net, start
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            x = torch.randn(4)
            yield x, x[:2]


rank, size = start()
model = samestep.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(DataLoader(samestep.ShardedIterable(Stream()), batch_size=5))
test = DataLoader(data(21), batch_size=4)
for step in range(1000):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(DataLoader(samestep.ShardedIterable(Stream()), batch_size=5))
        x, y = next(batches)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step % 10 == 0:
        with torch.no_grad():
            error = sum(F.mse_loss(model(x), y, reduction="sum").item() for x, y in test)
        with open("log.txt", "a") as log:
            log.write(f"{rank} {step} {error}\n")
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "part"))
            os.replace(os.path.join(folder, "part"), f"model-{rank}.pt")
        samestep.save(model, "best.pt")
        samestep.load("best.pt", model)

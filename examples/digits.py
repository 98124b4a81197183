"""Train a small convolutional net on handwritten digits, on as many processes as there are.

samestep run --nproc-per-node 2 examples/digits.py          # or torchrun, srun, mpirun
python examples/digits.py                                   # the same program, one rank
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader

import samestep
from samestep.data.digits import digits

Batches = DataLoader[tuple[Tensor, ...]]


def net() -> nn.Module:
    first = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25))
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))


def evaluate(model: nn.Module, test: Batches, comm: samestep.Communicator, device: torch.device) -> tuple[float, float]:
    """Return accuracy and macro F1 over all ranks' test images, each of which is seen by one rank once."""
    model.eval()
    answers, labels = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    with torch.no_grad():
        for images, true in test:
            answers.append(model(images.to(device)).argmax(1).cpu())
            labels.append(true)
    said, true = torch.cat(answers).to(comm.device), torch.cat(labels).to(comm.device)
    right, seen = comm.all_reduce(torch.tensor([int((said == true).sum()), len(true)], device=comm.device)).tolist()
    said, true = torch.cat(comm.all_gather_uneven(said)), torch.cat(comm.all_gather_uneven(true))
    confusion = torch.bincount(true * 10 + said, minlength=100).view(10, 10).double()
    f1 = 2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return right / seen, f1.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with MNIST's four files (default: 10,000 digits inside the package)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks together")
    parser.add_argument("--out", type=Path, default=Path("runs/digits.pt"), help="where the checkpoint goes")
    args = parser.parse_args()
    world = samestep.World.from_env()
    with samestep.connect(world) as comm:
        torch.manual_seed(world.rank)  # ranks drop out differently; they start equal all the same
        model = samestep.DistributedDataParallel(net().to(world.device))
        train, test = digits("train", args.data), digits("test", args.data)
        train_sampler = samestep.DistributedSampler(train)
        test_sampler = samestep.DistributedSampler(test, shuffle=False, remainder="keep")
        loader: Batches = DataLoader(train, batch_size=max(1, args.batch // world.size), sampler=train_sampler)
        test_loader: Batches = DataLoader(test, batch_size=250, sampler=test_sampler)
        optimizer = torch.optim.Adam(model.parameters())
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(1, args.epochs * len(loader)))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
        )
        with Progress(*columns, disable=not world.is_main) as progress:
            for epoch in range(args.epochs):
                bar = progress.add_task(f"epoch {epoch + 1}/{args.epochs}", total=len(loader), now="")
                start, done = time.monotonic(), 0
                model.train()
                for images, labels in loader:
                    loss = F.cross_entropy(model(images.to(world.device)), labels.to(world.device))
                    optimizer.zero_grad()
                    model.backward(loss, weight=len(images))  # each image counts once, in a smaller last batch too
                    optimizer.step()
                    rate.step()
                    done += len(images) * world.size
                    now = f"{done / (time.monotonic() - start):5.0f} images/s  loss {loss.item():.3f}"
                    progress.update(bar, advance=1, now=now)
                accuracy, _ = evaluate(model, test_loader, comm, world.device)
                progress.update(bar, now=f"{now}  test accuracy {accuracy:.4f}")
        samestep.save(model, args.out)
        samestep.load(args.out, model)
        accuracy, f1 = evaluate(model, test_loader, comm, world.device)
        weights = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
        assert set(comm.all_gather_object(weights)) == {weights}, "replicas differ"
        if world.is_main:
            print(f"test accuracy {accuracy:.4f}  macro F1 {f1:.4f}  weights sha256 {weights}", flush=True)


if __name__ == "__main__":
    main()

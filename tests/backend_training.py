"""What ranks train with torch's own classes, over the backend "samestep" and over Gloo; both give the same bits.

With two ranks a sum has two terms, so that the order in which a backend adds makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["train"]

_STEPS = 4


def train(path: str) -> dict[str, int]:
    """Run all cases over both backends; return how many tensors were compared in each."""
    gloo = dist.new_group(backend="gloo")
    ours = dist.group.WORLD
    assert dist.get_backend(ours) == "samestep"
    compared = {}
    for name, case in _CASES.items():
        expected, got = (case(group, f"{path}/{number}") for number, group in enumerate((gloo, ours)))
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs), name
        compared[name] = len(got)
    return compared


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(20, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4)
    return nn.Sequential(*layers)


def _fit(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    torch.manual_seed(100 + rank)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        optimizer.step()


def _whole(model: nn.Module) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in model.state_dict().values()]


def _ddp(group: dist.ProcessGroup, _: str) -> list[Tensor]:
    model = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=0.1)
    _fit(model, torch.optim.Adam(model.parameters()), group.rank())
    return _whole(model)


def _ddp_with_hook(group: dist.ProcessGroup, _: str) -> list[Tensor]:
    def mean_of_half(state, bucket):  # annotated with strings, torch would not take it
        half = bucket.buffer().to(torch.bfloat16).div_(state.size())
        future = dist.all_reduce(half, group=state, async_op=True).get_future()
        return future.then(lambda f: f.value()[0].to(torch.float32))

    model = DistributedDataParallel(_model(), process_group=group, find_unused_parameters=True)
    model.register_comm_hook(group, mean_of_half)
    _fit(model, torch.optim.SGD(model.parameters(), lr=0.1), group.rank())
    return _whole(model)


def _zero(group: dist.ProcessGroup, _: str) -> list[Tensor]:
    model = DistributedDataParallel(_model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, process_group=group, lr=0.01
    )
    _fit(model, optimizer, group.rank())
    optimizer.consolidate_state_dict(to=0)
    return _whole(model)


def _sharded(group: dist.ProcessGroup) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh, model = DeviceMesh.from_group(group, "cpu"), _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters())


def _fsdp(group: dist.ProcessGroup, _: str) -> list[Tensor]:
    model, optimizer = _sharded(group)
    _fit(model, optimizer, group.rank())
    return _whole(model)


def _checkpoint(group: dist.ProcessGroup, path: str) -> list[Tensor]:
    """Save what was trained, and load it into another model of the same kind."""
    model, optimizer = _sharded(group)
    _fit(model, optimizer, group.rank())
    dcp.save({"model": model.state_dict()}, checkpoint_id=path, process_group=group)
    other, _ = _sharded(group)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path, process_group=group)
    other.load_state_dict(state["model"])
    saved, loaded = ([p.full_tensor() for p in m.parameters()] for m in (model, other))
    for mine, theirs in zip(loaded, saved, strict=True):
        assert torch.equal(mine, theirs)
    return loaded


def _tensors(group: dist.ProcessGroup, _: str) -> list[Tensor]:
    """DTensors change how they are laid out, and functional collectives, which are waited for when they are used."""
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(3)
    whole = torch.randn(12, 8)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    sums = DTensor.from_local(whole * (group.rank() + 1), mesh, [Partial()])
    results = [
        columns.to_local(),
        (rows @ columns.t()).full_tensor(),
        sums.redistribute(mesh, [Replicate()]).to_local(),
    ]
    results += [sums.redistribute(mesh, [Shard(0)]).to_local()]
    results += [all_reduce(whole * group.rank(), "sum", group) + 1]
    results += [all_gather_tensor(whole + group.rank(), 0, group) + 1]
    results += [reduce_scatter_tensor(whole + group.rank(), "sum", 0, group) + 1]
    return results


_CASES: dict[str, Callable[[dist.ProcessGroup, str], list[Tensor]]] = {
    "DistributedDataParallel": _ddp,
    "communication hook": _ddp_with_hook,
    "ZeroRedundancyOptimizer": _zero,
    "fully_shard": _fsdp,
    "checkpoint": _checkpoint,
    "DTensor": _tensors,
}

"""Arguments of torch's class that change what travels when: late and skipped parameters, buffers, a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Choosing, Recorder, equal, grads, linear, mlp, samples, wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from samestep.comm.base import Communicator
from samestep.errors import ReplicaError
from samestep.parallel.buffers import Location
from samestep.parallel.distributed import DistributedDataParallel
from samestep.parallel.plan import Parameter, make_plan
from samestep.testing.ranks import run_processes, run_threads


def parameter(index: int, dtype: str = "f", *, sparse: bool = False) -> Parameter:
    return Parameter(index, f"p{index}", (4,), dtype, "cpu", 4, sparse)


# Parameters that travel last, or not at all


def test_late_parameters_come_last_in_one_bucket_of_each_kind_and_absent_ones_not() -> None:
    parameters = [parameter(i, "fd"[i % 2]) for i in range(6)] + [parameter(6, sparse=True)]
    plan = make_plan(parameters, [6, 5, 4, 3, 2, 1, 0], [0], late={1, 2, 4, 6}, absent={5})
    assert [bucket.indices for bucket in plan.buckets] == [(3,), (0,), (6,), (4, 2), (1,)]
    assert [bucket.sparse for bucket in plan.buckets] == [False, False, True, False, False]


def test_delayed_parameters_travel_last_and_are_averaged_alike() -> None:
    def rank(comm: Communicator) -> None:
        module, twin, recorder = mlp(comm.rank), mlp(0), Recorder(comm)
        late = [(name, p) for name, p in module.named_parameters() if name.startswith("2.")]
        model = DistributedDataParallel(
            module,
            process_group=recorder,
            bucket_cap_mb=0.0,
            delay_all_reduce_named_params=late,
            param_to_hook_all_reduce=module[0].weight,
        )
        reference = wrap(twin, comm)
        assert model.parameters_to_ignore == {"2.weight", "2.bias"}
        for _ in range(2):
            recorder.log.clear()
            for each in (model, reference):
                each.zero_grad()
                each(samples(2, comm.rank)).square().sum().backward()
            assert equal(grads(model), grads(reference))
        control = 4 + 2 + comm.size
        exchanged = [
            line.partition("float64")[2].partition(" ")[0] for line in recorder.log if line.startswith("all_reduce")
        ]
        assert exchanged == ["[6]", "[24]", f"[{14 + control}]"]

    run_threads(rank, 2)


def test_all_parameters_may_be_delayed() -> None:
    def rank(comm: Communicator) -> None:
        module = linear(comm.rank)
        late = list(module.named_parameters())
        model = wrap(module, comm, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module.bias)
        model(samples(2, comm.rank)).sum().backward()
        twin = wrap(linear(), comm)
        twin(samples(2, comm.rank)).sum().backward()
        assert equal(grads(model), grads(twin))

    run_threads(rank, 2)


@pytest.mark.parametrize(
    ("named", "hooked", "message"),
    [
        (lambda m: [("bias", m.bias)], lambda m: None, "need to be set at the same time"),
        (lambda m: [("bias", m.weight)], lambda m: m.weight, r"\['bias'\] are not the module's parameters"),
        (lambda m: [("bias", m.bias)], lambda m: torch.ones(1), "expected a parameter of the module that requires"),
    ],
)
def test_delayed_parameters_that_are_not_there_are_refused(named: Any, hooked: Any, message: str) -> None:
    def rank(comm: Communicator) -> None:
        m = linear()
        with pytest.raises(ValueError, match=message):
            wrap(m, comm, delay_all_reduce_named_params=named(m), param_to_hook_all_reduce=hooked(m))

    run_threads(rank, 1)


def test_parameters_that_nobody_used_at_first_are_left_out_if_asked() -> None:
    def rank(comm: Communicator) -> None:
        recorder = Recorder(comm)
        model = wrap(Choosing(), recorder, bucket_cap_mb=0.0, skip_all_reduce_unused_params=True)
        unused = model.module.other.weight
        kept = unused.grad = torch.ones(2, 4, dtype=torch.float64)
        for weighted in (False, True, False):
            recorder.log.clear()
            loss = model(samples(2, comm.rank)).sum()
            model.backward(loss, weight=2 if weighted else None)
            assert torch.equal(unused.grad, kept)
        assert sum(line.startswith("all_reduce") for line in recorder.log) == 2
        assert model._get_ddp_logging_data()["num_buckets_reduced"] == 2
        with pytest.raises(ReplicaError, match=rf"rank {comm.rank}: parameter other\..* took no part in the first"):
            model(samples(2), both=True).sum().backward()
        model.zero_grad()
        model(samples(2, comm.rank)).sum().backward()
        assert all(g is not None for g in grads(model.module.always))

    run_threads(rank, 2)


# Buffers


class Counting(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("count", torch.full((1,), float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        result: Tensor = self.layer(x)
        return result


@pytest.mark.parametrize("location", [Location.PRE_FORWARD, Location.POST_FORWARD])
@pytest.mark.parametrize("later", [False, True])
def test_a_buffer_hook_takes_the_place_of_rank_0s_values(location: Location, later: bool) -> None:
    def rank(comm: Communicator) -> list[float]:
        model = wrap(Counting(comm.rank), comm, init_sync=False)
        seen: list[float] = []

        class Later:
            def wait(self) -> None:
                comm.all_reduce(model.module.count)

        def add(state: str, buffers: dict[str, Tensor]) -> Any:
            assert state == "state"
            assert list(buffers) == ["count"]
            seen.append(buffers["count"].item())
            if later:
                return [Later()]
            comm.all_reduce(buffers["count"])
            return None

        model._register_buffer_comm_hook("state", add, location)
        assert model.will_sync_module_buffers()
        for _ in range(2):
            model(samples(2)).sum().backward()
        with torch.no_grad():
            model(samples(2))
            assert not model.will_sync_module_buffers(), "as nothing was trained since"
            model(samples(2))
        assert len(seen) == 3
        model.forward_sync_buffers = False
        with model.no_sync():
            model(samples(2)).sum().backward()
        assert len(seen) == 3
        return [*seen, model.module.count.item()]

    first, second = run_threads(rank, 2)
    if location == Location.POST_FORWARD:
        assert (first[:3], second[:3]) == ([1, 4, 9], [2, 4, 9])
    elif not later:
        assert (first[:3], second[:3]) == ([0, 2, 5], [1, 2, 5])


def test_buffers_can_be_sent_by_hand_and_without_a_hook_follow_rank_0() -> None:
    def rank(comm: Communicator) -> tuple[float, float]:
        model = wrap(Counting(comm.rank), comm)
        assert [b.item() for b in model.modules_buffers] == [0.0]
        with torch.no_grad():
            model.module.count.fill_(comm.rank)
        model._default_broadcast_coalesced(authoritative_rank=1)
        by_hand = model.module.count.item()
        model.broadcast_buffers = False
        model.module.count += comm.rank
        model(samples(2)).sum().backward()
        assert not model.forward_sync_buffers
        return by_hand, model.module.count.item()

    assert run_threads(rank, 2) == [(1.0, 2.0), (1.0, 3.0)]


def test_a_buffer_hook_must_be_callable() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(AssertionError, match="hook must be callable, got int"):
            wrap(linear(), comm)._register_buffer_comm_hook(None, 3)  # type: ignore[arg-type]

    run_threads(rank, 1)


@pytest.mark.parametrize(
    ("options", "follows", "warns"),
    [
        ({}, True, False),
        ({"forward_sync_buffers": False}, False, False),
        ({"broadcast_buffers": False}, False, True),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, False, True),
    ],
)
def test_the_old_name_of_a_setting_is_warned_about(options: dict[str, bool], follows: bool, warns: bool) -> None:
    def rank(comm: Communicator) -> None:
        if warns:
            with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
                model = wrap(linear(), comm, **options)
        else:
            model = wrap(linear(), comm, **options)
        assert model.forward_sync_buffers == model.broadcast_buffers == follows

    run_threads(rank, 1)


# A device mesh


def test_a_mesh_gives_the_group_also_beside_sharded_parameters() -> None:
    assert run_processes(over_meshes, 2, timeout_s=60.0) == [None, None]


def over_meshes(comm: Communicator) -> None:
    mesh = init_device_mesh("cpu", (comm.size,))
    model = DistributedDataParallel(mlp(comm.rank), device_mesh=mesh)
    assert model.device_mesh is mesh
    assert model.process_group is mesh.get_group()
    twin = DistributedDataParallel(mlp(0))
    assert twin.process_group is dist.group.WORLD
    for each in (model, twin):
        each(samples(2, comm.rank)).sum().backward()
    assert equal(grads(model), grads(twin))
    whole = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicas", "shards"))
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        results.setdefault(kind.__name__ + kind.__module__, sharded(kind, whole, comm.rank))
    first, second = results.values()
    assert equal(first, second)


results: dict[str, list[Tensor | None]] = {}


def sharded(kind: Callable[..., nn.Module], mesh: Any, rank: int) -> list[Tensor | None]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = mlp(0)
    parallelize_module(module, mesh["shards"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = kind(module, device_mesh=mesh["replicas"])
    model(samples(2, rank)).sum().backward()
    return [
        None if p.grad is None else p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        for p in module.parameters()
    ]

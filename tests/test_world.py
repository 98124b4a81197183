"""World: what it checks itself, where it looks, which device and backend it picks."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import environments as seen
import pytest
import torch
import torch.distributed as dist

from samestep.errors import BackendError, WorldError
from samestep.world import World, environment, require_backend

FIELDS: dict[str, Any] = {
    "rank": 3,
    "local_rank": 1,
    "size": 4,
    "local_size": 2,
    "node_rank": 1,
    "num_nodes": 2,
    "master_addr": "node01",
    "master_port": 29500,
    "device": torch.device("cpu"),
    "launcher": "torchrun",
}

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"rank": -1}, "rank=-1: must be at least 0"),
    ({"size": 0}, "size=0: must be at least 1"),
    ({"num_nodes": 0}, "num_nodes=0: must be at least 1"),
    ({"rank": 4}, "rank=4, size=4: a rank must be below the world size"),
    ({"local_rank": 2}, "local_rank=2, local_size=2: a local rank must be below"),
    ({"node_rank": 2}, "node_rank=2, num_nodes=2: a node's number must be below"),
    ({"local_size": 5}, "local_size=5, size=4: a node cannot have more ranks"),
    ({"num_nodes": 5}, "num_nodes=5, size=4: there cannot be more nodes"),
    ({"num_nodes": 1, "node_rank": 0}, "local_size=2, num_nodes=1, size=4: a single node must have all"),
    ({"local_size": 4}, "local_size=4, num_nodes=2, size=4: each of the other nodes"),
    ({"master_addr": ""}, "rank 3: master_addr='': '' is neither a host name nor an IP address"),
    ({"master_addr": "node01:29500"}, "rank 3: master_addr='node01:29500': .* has a port"),
    ({"master_addr": "[::1]"}, r"master_addr='\[::1\]': .*neither a host name nor an IP address"),
    ({"master_port": 0}, "rank 3: master_port=0, size=4: must be 1 to 65535, or 0 for a single rank"),
    ({"master_port": 65536}, "rank 3: master_port=65536, size=4: must be 1 to 65535"),
    ({"master_port": -1}, "master_port=-1"),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS)
def test_contradictory_fields(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        World(**(FIELDS | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": "3"}, "rank must be an int, got '3'"),
        ({"size": 4.0}, "size must be an int, got 4.0"),
        ({"local_rank": True}, "local_rank must be an int, got True"),
        ({"master_port": "29500"}, "master_port must be an int, got '29500'"),
        ({"device": "cpu"}, "device must be a torch.device, got 'cpu'"),
    ],
)
def test_fields_of_other_types(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        World(**(FIELDS | change))


def test_is_a_frozen_value() -> None:
    world = World(**FIELDS)
    assert world == World(**FIELDS)
    assert hash(world) == hash(World(**FIELDS))
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 0  # type: ignore[misc]


def test_rank_0_is_main() -> None:
    assert not World(**FIELDS).is_main
    assert World(**(FIELDS | {"rank": 0})).is_main


class Forbidden(Mapping[str, str]):
    """Fails whoever looks into it."""

    def __getitem__(self, name: str) -> NoReturn:
        raise AssertionError(f"os.environ[{name!r}] was read")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("os.environ was listed")

    def __len__(self) -> int:
        raise AssertionError("os.environ was counted")


def test_reads_only_the_mapping_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [seen.srun(4, 1, 1), seen.torchrun(3, 1, 1), seen.open_mpi5(1), seen.mpich(1), seen.pod(1), {}]
    # pytest looks into os.environ as well, so it is forbidden only while a world is made.
    with monkeypatch.context() as forbidding:
        forbidding.setattr(os, "environ", Forbidden())
        worlds = [World.from_env(environ, device="cpu") for environ in given]
        alone = World.single("cpu")
        with pytest.raises(AssertionError, match=r"os\.environ"):
            World.from_env(device="cpu")
    assert [world.size for world in worlds] == [5, 4, 2, 2, 3, 1]
    assert alone.size == 1


def test_reads_the_process_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as replacing:
        replacing.setattr(os, "environ", seen.torchrun(3, 1, 1))
        world = World.from_env(device="cpu")
    assert (world.rank, world.size, world.launcher) == (3, 4, "torchrun")
    assert World.single("cpu").launcher == "none"


def test_single_is_one_rank() -> None:
    assert World.single("cpu") == World.from_env({}, device="cpu")
    assert dataclasses.astuple(World.single("cpu")) == (0, 0, 1, 1, 0, 1, "127.0.0.1", 0, torch.device("cpu"), "none")


def test_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TEST", "before")
    copy = environment()
    assert copy["SAMESTEP_TEST"] == "before"
    copy["SAMESTEP_TEST"] = "after"
    assert os.environ["SAMESTEP_TEST"] == "before"


def test_importing_it_does_not_import_torch() -> None:
    program = (
        "import sys, samestep.world; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "visible", "device"),
    [
        (0, 0, {}, "cpu"),
        (0, 1, {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        (2, 0, {}, "cuda:0"),
        (2, 1, {}, "cuda:1"),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "4,7"}, "cuda:1"),
        (1, 1, {"CUDA_VISIBLE_DEVICES": "3"}, "cuda:0"),
        (1, 1, {"CUDA_VISIBLE_DEVICES": "MIG-5b1a7d2c-6f0e-5c0b-a0d7-2f6d2c4b8c11"}, "cuda:0"),
        (1, 1, {"ROCR_VISIBLE_DEVICES": "3"}, "cuda:0"),
    ],
)
def test_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int, visible: dict[str, str], device: str
) -> None:
    with_gpus(monkeypatch, gpus)
    world = World.from_env(seen.old_launch(local_rank, local_rank) | visible)
    assert world.device == torch.device(device)
    assert world.backend == ("gloo" if device == "cpu" else "nccl")


@pytest.mark.parametrize(
    ("gpus", "visible", "message"),
    [
        (1, {}, "rank 1: local rank 1 of 2 ranks on this node, but torch sees 1 GPU .CUDA_VISIBLE_DEVICES is not set"),
        (1, {"CUDA_VISIBLE_DEVICES": "0,9"}, "sees 1 GPU .CUDA_VISIBLE_DEVICES=0,9.: start at most 1 rank per node"),
        (1, {"CUDA_VISIBLE_DEVICES": ""}, "sees 1 GPU .*pass device='cpu'"),
    ],
)
def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, visible: dict[str, str], message: str) -> None:
    with_gpus(monkeypatch, gpus)
    with pytest.raises(WorldError, match=message):
        World.from_env(seen.old_launch(1, 1) | visible)


def test_too_few_gpus_for_the_third_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    environ = seen.old_launch(2, 2) | {"WORLD_SIZE": "4", "ROCR_VISIBLE_DEVICES": "0"}
    with pytest.raises(WorldError, match=r"rank 2: local rank 2 of 4 .* sees 2 GPUs .*at most 2 ranks per node"):
        World.from_env(environ)


@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("cuda", 1), torch.device("meta")])
def test_given_device_wins(monkeypatch: pytest.MonkeyPatch, device: torch.device | str) -> None:
    with_gpus(monkeypatch, 2)
    assert World.from_env(seen.old_launch(0, 0), device=device).device == torch.device(device)
    assert World.single(device).device == torch.device(device)


def test_single_takes_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    assert World.single().device == torch.device("cuda", 0)


def test_given_device_is_checked() -> None:
    with pytest.raises(WorldError, match=r"device='gpu' is not a torch device.*'cuda:0'"):
        World.single("gpu")
    with pytest.raises(TypeError, match=r"device must be a torch.device, a string or None, got 0"):
        World.single(0)  # type: ignore[arg-type]


def test_no_backend_for_other_devices() -> None:
    with pytest.raises(WorldError, match=r"rank 3: device=meta: .*cuda .nccl. and cpu .gloo. only"):
        _ = World(**(FIELDS | {"device": torch.device("meta")})).backend


def test_the_backend_of_the_cpu_is_there() -> None:
    require_backend(World.single("cpu").backend)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "nccl",
            "backend 'nccl' for device cuda is needed, but torch .* without the backend 'nccl'; install a CUDA build",
        ),
        (
            "gloo",
            "backend 'gloo' for device cpu is needed, but torch .* without the backend 'gloo'; install torch's own",
        ),
        ("snail", "backend 'snail' is needed, but torch .* without the backend 'snail'; use one of gloo, nccl, or"),
    ],
)
def test_missing_backend(monkeypatch: pytest.MonkeyPatch, backend: str, message: str) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name not in ("nccl", "gloo", "snail"))
    with pytest.raises(BackendError, match=message) as caught:
        require_backend(backend)
    assert torch.__version__ in str(caught.value)


def test_missing_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(
        BackendError, match=r"'gloo' for device cpu is needed, .* built without torch.distributed; install"
    ):
        require_backend("gloo")

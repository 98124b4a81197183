"""Launchers: every set of variables that was seen, and every contradiction, comes out as it should."""

import itertools
from collections.abc import Mapping

import environments as seen
import pytest
from environments import HAND, without

from samestep.errors import WorldError
from samestep.world import World

HYDRA = "hydra (MPICH, Intel MPI)"
PORTS = range(10000, 29500)
STEP_OF_HAND = {"RANK": "3", "WORLD_SIZE": "5"}
MINE = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "12345"}


def read(environ: Mapping[str, str]) -> World:
    return World.from_env(environ, device="cpu")


def place(world: World) -> tuple[int, ...]:
    return (world.rank, world.local_rank, world.size, world.local_size, world.node_rank, world.num_nodes)


# Variables; launcher; rank, local rank, world size, local world size, node rank, nodes; master, with None for a port
# that comes from the job's id.
SEEN = {
    "nothing": (seen.HOST, "none", (0, 0, 1, 1, 0, 1), ("127.0.0.1", 0)),
    "master alone": (seen.HOST | MINE, "none", (0, 0, 1, 1, 0, 1), ("127.0.0.1", 0)),
    "torchrun 0": (seen.torchrun(0, 0, 0), "torchrun", (0, 0, 4, 2, 0, 2), ("node01.cluster", 46289)),
    "torchrun 3": (seen.torchrun(3, 1, 1), "torchrun", (3, 1, 4, 2, 1, 2), ("node01.cluster", 46289)),
    "torchrun, virtual local rank": (
        seen.torchrun(3, 0, 1) | {"CUDA_VISIBLE_DEVICES": "1"},
        "torchrun",
        (3, 0, 4, 2, 1, 2),
        ("node01.cluster", 46289),
    ),
    "torchrun under srun": (
        seen.srun(1, 0, 1) | seen.torchrun(3, 1, 1),
        "torchrun",
        (3, 1, 4, 2, 1, 2),
        ("node01.cluster", 46289),
    ),
    "torchrun under mpirun": (
        seen.open_mpi5(1) | seen.torchrun(3, 1, 1),
        "torchrun",
        (3, 1, 4, 2, 1, 2),
        ("node01.cluster", 46289),
    ),
    "torchrun in a pod": (
        seen.pod(1, "2", 6) | seen.torchrun(3, 1, 1),
        "torchrun",
        (3, 1, 4, 2, 1, 2),
        ("node01.cluster", 46289),
    ),
    "old launch": (seen.old_launch(1, 1), "env", (1, 1, 2, 2, 0, 1), ("127.0.0.1", 29500)),
    "old launch, master elsewhere": (
        HAND | {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        "env",
        (3, 1, 4, 2, 1, 2),
        ("node01", 29500),
    ),
    "old launch, NODE_RANK": (
        HAND | {"RANK": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1", "NNODES": "2"},
        "env",
        (3, 0, 4, 1, 1, 2),
        ("node01", 29500),
    ),
    "spawn by hand": (HAND | {"MASTER_ADDR": "localhost"}, "env", (1, 1, 4, 4, 0, 1), ("localhost", 29500)),
    "spawn by hand, IPv6": (HAND | {"MASTER_ADDR": "::1"}, "env", (1, 1, 4, 4, 0, 1), ("::1", 29500)),
    "spawn by hand in a pod": (
        seen.pod(0, "4", 12) | HAND | {"MASTER_ADDR": "127.0.0.1"},
        "env",
        (1, 1, 4, 4, 0, 1),
        ("127.0.0.1", 29500),
    ),
    "spawn by hand under srun -n1": (
        seen.srun(0, 0, 0)
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
        | HAND
        | {"MASTER_ADDR": "localhost"},
        "env",
        (1, 1, 4, 4, 0, 1),
        ("localhost", 29500),
    ),
    "one rank by hand": (
        HAND | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node01"},
        "env",
        (0, 0, 1, 1, 0, 1),
        ("node01", 29500),
    ),
    "torch's variables by hand under srun": (
        seen.srun(3, 1, 0) | seen.old_launch(3, 1) | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5"},
        "env",
        (3, 1, 5, 5, 0, 1),
        ("127.0.0.1", 29500),
    ),
    "local rank 0 for all, each with its GPU": (
        seen.old_launch(1, 0),
        "env",
        (1, 0, 2, 2, 0, 1),
        ("127.0.0.1", 29500),
    ),
    "PyTorchJob master": (seen.pod(0), "pytorchjob", (0, 0, 3, 1, 0, 3), ("digits-master-0", 23456)),
    "PyTorchJob worker": (seen.pod(2), "pytorchjob", (2, 0, 3, 1, 2, 3), ("digits-master-0", 23456)),
    "PyTorchJob nproc 1": (seen.pod(1, "1"), "pytorchjob", (1, 0, 3, 1, 1, 3), ("digits-master-0", 23456)),
    "PyTorchJob, old": (seen.old_pod(1), "pytorchjob", (1, 0, 3, 1, 1, 3), ("digits-master-0", 23456)),
    "mpirun in the only pod": (
        seen.pod(0, "auto", 1) | seen.open_mpi5(1),
        "open mpi",
        (1, 1, 2, 2, 0, 1),
        ("digits-master-0", 23456),
    ),
    "Open MPI 4 by slot": (seen.open_mpi4(3, 1), "open mpi", (3, 1, 6, 2, 1, 3), ("node01", None)),
    "Open MPI 4 by node": (seen.open_mpi4(4, 1, "node"), "open mpi", (4, 1, 6, 2, 1, 3), ("node01", None)),
    "Open MPI before PMIx": (
        without(seen.open_mpi4(3, 1), "PMIX_NAMESPACE"),
        "open mpi",
        (3, 1, 6, 2, 1, 3),
        ("node01", None),
    ),
    "Open MPI 4, NODE_RANK": (
        seen.open_mpi4(4, 0, "seq") | {"NODE_RANK": "1"},
        "open mpi",
        (4, 0, 6, 2, 1, 3),
        ("node01", None),
    ),
    "Open MPI 5": (seen.open_mpi5(1), "open mpi", (1, 1, 2, 2, 0, 1), ("127.0.0.1", None)),
    "Open MPI 5, master given": (seen.open_mpi5(1) | MINE, "open mpi", (1, 1, 2, 2, 0, 1), ("10.0.0.9", 12345)),
    "Open MPI repeated by hand": (
        without(seen.open_mpi4(3, 1) | STEP_OF_HAND | {"WORLD_SIZE": "6"}, "LOCAL_RANK"),
        "open mpi",
        (3, 1, 6, 2, 1, 3),
        ("node01", None),
    ),
    "MPICH": (seen.mpich(1), HYDRA, (1, 1, 2, 2, 0, 1), ("127.0.0.1", 29400)),
    "MPICH in a PBS job": (
        without(seen.mpich(1), "MASTER_PORT") | {"PBS_JOBID": "4711.pbs"},
        HYDRA,
        (1, 1, 2, 2, 0, 1),
        ("127.0.0.1", None),
    ),
    "MPICH in salloc": (seen.mpich_in_salloc(3), HYDRA, (3, 1, 4, 2, 1, 2), ("node01", None)),
    "MPICH, one rank": (
        without(seen.mpich(0), "MASTER_PORT") | {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        HYDRA,
        (0, 0, 1, 1, 0, 1),
        ("127.0.0.1", 0),
    ),
    "Intel MPI": (seen.intel_mpi(4, 1, 1), HYDRA, (4, 1, 6, 2, 1, 3), ("node01", None)),
    "batch script": (seen.sbatch(), "none", (0, 0, 1, 1, 0, 1), ("127.0.0.1", 0)),
    "interactive step": (
        seen.sbatch() | {"SLURM_STEP_ID": "4294967290"},
        "none",
        (0, 0, 1, 1, 0, 1),
        ("127.0.0.1", 0),
    ),
    "srun 0": (seen.srun(0, 0, 0), "slurm", (0, 0, 5, 2, 0, 3), ("node01", None)),
    "srun 4": (seen.srun(4, 1, 1), "slurm", (4, 1, 5, 2, 1, 3), ("node01", None)),
    "srun, last node": (seen.srun(2, 0, 2), "slurm", (2, 0, 5, 1, 2, 3), ("node01", None)),
    "srun on a part": (seen.srun_subset(1), "slurm", (1, 0, 2, 1, 1, 2), ("node01", None)),
    "srun --mpi=pmi2": (
        seen.srun_subset(1) | {"PMI_FD": "11", "PMI_JOBID": "4.0", "PMI_RANK": "1", "PMI_SIZE": "2"},
        "slurm",
        (1, 0, 2, 1, 1, 2),
        ("node01", None),
    ),
    "srun, job's variables only": (
        {k: v for k, v in seen.srun(4, 1, 1).items() if not k.startswith("SLURM_STEP_") or k == "SLURM_STEP_ID"},
        "slurm",
        (4, 1, 5, 2, 1, 3),
        ("node01", None),
    ),
    "srun, master given": (seen.srun(4, 1, 1) | MINE, "slurm", (4, 1, 5, 2, 1, 3), ("10.0.0.9", 12345)),
    "srun repeated by hand": (
        seen.srun(3, 1, 0) | STEP_OF_HAND | {"LOCAL_RANK": "1"},
        "slurm",
        (3, 1, 5, 2, 0, 3),
        ("node01", None),
    ),
    "srun and WORLD_SIZE": (seen.srun(3, 1, 0) | {"WORLD_SIZE": "5"}, "slurm", (3, 1, 5, 2, 0, 3), ("node01", None)),
}


@pytest.mark.parametrize(("environ", "launcher", "numbers", "master"), SEEN.values(), ids=SEEN.keys())
def test_variables_as_launchers_set_them(
    environ: dict[str, str], launcher: str, numbers: tuple[int, ...], master: tuple[str, int | None]
) -> None:
    world = read(environ)
    assert (world.launcher, place(world), world.master_addr) == (launcher, numbers, master[0])
    if master[1] is None:
        assert world.master_port in PORTS
    else:
        assert world.master_port == master[1]
    assert world.is_main == (numbers[0] == 0)


@pytest.mark.parametrize(
    "ranks",
    [
        [seen.srun(0, 0, 0), seen.srun(1, 0, 1), seen.srun(2, 0, 2), seen.srun(3, 1, 0), seen.srun(4, 1, 1)],
        [seen.srun_subset(rank) for rank in range(2)],
        [seen.open_mpi4(rank, rank % 2) for rank in range(6)],
        [seen.open_mpi4(rank, rank // 3, "node") for rank in range(6)],
        [seen.open_mpi5(rank) for rank in range(2)],
        [seen.intel_mpi(rank, rank // 3, rank % 3) for rank in range(6)],
        [seen.mpich_in_salloc(rank) for rank in range(4)],
        [seen.pod(rank) for rank in range(3)],
    ],
    ids=["srun", "srun part", "ompi4", "ompi4 by node", "ompi5", "intel", "mpich in salloc", "pods"],
)
def test_ranks_of_one_run_agree(ranks: list[dict[str, str]]) -> None:
    worlds = [read(environ) for environ in ranks]
    assert [world.rank for world in worlds] == list(range(len(ranks)))
    assert len({(world.size, world.num_nodes, world.master_addr, world.master_port) for world in worlds}) == 1
    assert worlds[0].size == len(ranks)
    for node in range(worlds[0].num_nodes):
        here = [world for world in worlds if world.node_rank == node]
        assert [world.local_rank for world in here] == list(range(len(here)))
        assert {world.local_size for world in here} == {len(here)}


def test_steps_of_one_job_get_ports_of_their_own() -> None:
    steps = [seen.srun(0, 0, 0) | {"SLURM_STEP_ID": str(step)} for step in range(8)]
    assert len({read(environ).master_port for environ in steps}) == 8


def laid_out(num_nodes: int, local_size: int, by: str) -> list[tuple[int, int, int]]:
    """Return rank, local rank and node of each rank when mpiexec fills nodes (slot) or deals ranks out (node)."""
    places = sorted(
        (node * local_size + local if by == "slot" else local * num_nodes + node, local, node)
        for node, local in itertools.product(range(num_nodes), range(local_size))
    )
    assert [rank for rank, *_ in places] == list(range(num_nodes * local_size))
    return places


@pytest.mark.parametrize("by", ["slot", "node"])
@pytest.mark.parametrize("local_size", range(1, 7))
@pytest.mark.parametrize("num_nodes", range(1, 7))
def test_nodes_are_counted_right_or_the_run_fails(num_nodes: int, local_size: int, by: str) -> None:
    nodes: dict[int, int] = {}
    failed: dict[int, str] = {}
    places = laid_out(num_nodes, local_size, by)
    for rank, local_rank, _ in places:
        variables = {"PMI_RANK": rank, "PMI_SIZE": len(places), "MPI_LOCALRANKID": local_rank}
        environ = {name: str(value) for name, value in (variables | {"MPI_LOCALNRANKS": local_size}).items()}
        try:
            nodes[rank] = read(environ | MINE).node_rank
        except WorldError as error:
            failed[rank] = str(error)
    assert all(f"PMI_RANK={rank}" in message and "set NODE_RANK" in message for rank, message in failed.items())
    if by == "slot" or num_nodes <= 2:
        assert not failed
    if not failed:
        assert nodes == {rank: node for rank, _, node in places}

"""Launchers: half-set and contradictory variables are an error that names them with their values."""

import environments as seen
import pytest
from environments import HAND, without

from samestep.errors import WorldError
from samestep.world import World

BROKEN = {
    "rank alone": (seen.HOST | {"RANK": "0"}, "rank 0: RANK=0, WORLD_SIZE is not set.*WORLD_SIZE is missing"),
    "size alone": ({"WORLD_SIZE": "2"}, "RANK is not set, WORLD_SIZE=2.*RANK is missing; start.*samestep run"),
    "local rank alone": ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1.*RANK is missing"),
    "no master": (without(seen.torchrun(3, 1, 1), "MASTER_ADDR"), "rank 3: .*MASTER_ADDR is not set"),
    "no port": (without(seen.torchrun(3, 1, 1), "MASTER_PORT"), "rank 3: .*MASTER_PORT is not set"),
    "size unlike srun's": (seen.srun(3, 1, 0) | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8.*SLURM_STEP_NUM_TASKS=5"),
    "rank too high": (HAND | {"RANK": "4"}, "rank 4: RANK=4, WORLD_SIZE=4: a rank must be below the world size"),
    "rank negative": (HAND | {"RANK": "-1"}, "RANK=-1: RANK must be an integer of at least 0"),
    "rank no number": (HAND | {"RANK": "one"}, "RANK=one: RANK must be an integer"),
    "rank a float": (HAND | {"RANK": "1.0"}, "RANK=1.0: RANK must be an integer"),
    "rank huge": (HAND | {"RANK": "9" * 5000}, "RANK must be an integer"),
    "rank empty": (HAND | {"RANK": ""}, "RANK=: RANK must have a value"),
    "size zero": (HAND | {"WORLD_SIZE": "0"}, "rank 1: WORLD_SIZE=0: WORLD_SIZE must be an integer of at least 1"),
    "port zero": (HAND | {"MASTER_PORT": "0"}, "MASTER_PORT=0: MASTER_PORT must be an integer of at least 1"),
    "port too high": (HAND | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: MASTER_PORT must be a port, 1 to 65535"),
    "address empty": (HAND | {"MASTER_ADDR": ""}, "rank 1: MASTER_ADDR=: MASTER_ADDR must have a value"),
    "address with port": (HAND | {"MASTER_ADDR": "node01:29500"}, "MASTER_ADDR=node01:29500: .*has a port"),
    "address with spaces": (HAND | {"MASTER_ADDR": "node01 "}, "MASTER_ADDR=node01 : .*neither a host name nor"),
    "address a URL": (HAND | {"MASTER_ADDR": "tcp://node01"}, "MASTER_ADDR=tcp://node01: .*neither a host name nor"),
    "local rank missing": (
        HAND,
        "rank 1: RANK=1, WORLD_SIZE=4, MASTER_ADDR=node01, LOCAL_RANK is not set.*set LOCAL_RANK",
    ),
    "local rank missing, size there": (HAND | {"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2, LOCAL_RANK is not set"),
    "local size missing": (
        HAND | {"LOCAL_RANK": "1"},
        "RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE is not set, MASTER_ADDR=node01.*set LOCAL_WORLD_SIZE",
    ),
    "local rank too high": (
        seen.torchrun(3, 2, 1),
        "rank 3: LOCAL_RANK=2, LOCAL_WORLD_SIZE=2: a local rank must be below",
    ),
    "local rank above the world": (
        seen.old_launch(1, 2),
        r"rank 1: LOCAL_RANK=2, local_size=2 \(worked out\): a local rank must be below",
    ),
    "local size above the world": (
        seen.torchrun(3, 1, 1) | {"LOCAL_WORLD_SIZE": "8"},
        "LOCAL_WORLD_SIZE=8, WORLD_SIZE=4: a node cannot have more ranks",
    ),
    "node too high": (seen.torchrun(3, 1, 2), "GROUP_RANK=2, GROUP_WORLD_SIZE=2: a node's number must be below"),
    "more nodes than ranks": (
        seen.torchrun(3, 1, 1) | {"GROUP_WORLD_SIZE": "5"},
        "GROUP_WORLD_SIZE=5, WORLD_SIZE=4: there cannot be more nodes than ranks",
    ),
    "one node, not all ranks": (
        seen.torchrun(3, 1, 0) | {"GROUP_WORLD_SIZE": "1"},
        "LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=1, WORLD_SIZE=4: a single node must have all ranks",
    ),
    "too few ranks for the nodes": (
        seen.torchrun(3, 1, 1) | {"LOCAL_WORLD_SIZE": "4"},
        "LOCAL_WORLD_SIZE=4, GROUP_WORLD_SIZE=2, WORLD_SIZE=4: each of the other nodes",
    ),
    "unequal nodes, untold": (
        HAND | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
        "RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=3, NODE_RANK is not set.*set NODE_RANK and NNODES",
    ),
    "unequal nodes, half told": (
        HAND | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "NODE_RANK": "0"},
        "NODE_RANK=0, NNODES is not set, WORLD_SIZE=4, LOCAL_WORLD_SIZE=3: .*set NNODES",
    ),
    "several ranks per pod": (
        seen.pod(1, "2", 6),
        "PET_NPROC_PER_NODE=2, RANK=1, WORLD_SIZE=6, .*LOCAL_RANK is not set: .*let it start `samestep run`",
    ),
    "gpu ranks per pod": (seen.pod(1, "gpu"), "PET_NPROC_PER_NODE=gpu, .*let it start `samestep run` or torchrun"),
    "spawned in several pods": (
        seen.pod(1) | {"RANK": "2", "WORLD_SIZE": "6"},
        "PET_NODE_RANK=1, RANK=2, WORLD_SIZE=6, .*LOCAL_RANK is missing",
    ),
    "mpirun in several pods": (
        seen.pod(1) | seen.open_mpi5(0),
        "RANK=1, WORLD_SIZE=3, OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2: the pod and open mpi disagree",
    ),
    "ompi half set": (
        without(seen.open_mpi5(1), "OMPI_COMM_WORLD_SIZE"),
        "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE is not set, .*start the script with mpirun",
    ),
    "ompi rank too high": (
        seen.open_mpi5(1) | {"OMPI_COMM_WORLD_RANK": "2"},
        "rank 2: OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=2: a rank must be below",
    ),
    "ompi local rank too high": (
        seen.open_mpi5(1) | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
        "OMPI_COMM_WORLD_LOCAL_RANK=2, OMPI_COMM_WORLD_LOCAL_SIZE=2: a local rank must be below",
    ),
    "ompi without master": (
        without(seen.open_mpi4(3, 1), "MASTER_ADDR"),
        "OMPI_COMM_WORLD_SIZE=6, .*MASTER_ADDR is not set: 3 nodes .*start with mpirun -x MASTER_ADDR=HOST",
    ),
    "ompi with loopback master": (
        seen.open_mpi4(3, 1) | {"MASTER_ADDR": "localhost"},
        "rank 3: MASTER_ADDR=localhost: 3 nodes take part",
    ),
    "ompi without job id": (
        without(seen.open_mpi5(1), "PMIX_NAMESPACE"),
        "MASTER_PORT is not set, PMIX_NAMESPACE is not set.*mpirun -x MASTER_PORT=29400",
    ),
    "ompi placed oddly": (
        seen.open_mpi4(4, 1, "seq"),
        "RANK=4, .*_SIZE=6, .*_LOCAL_RANK=1, .*_LOCAL_SIZE=2, NODE_RANK is not set.*set NODE_RANK and NNODES",
    ),
    "mpich without job id": (
        without(seen.mpich(1), "MASTER_PORT"),
        "rank 1: MASTER_PORT is not set, I_MPI_HYDRA_UUID is not set.*start with MASTER_PORT=29400 mpiexec",
    ),
    "mpich without local rank": (
        without(seen.mpich(1), "MPI_LOCALRANKID"),
        "PMI_RANK=1, PMI_SIZE=2, MPI_LOCALRANKID is not set, MPI_LOCALNRANKS=2: MPI_LOCALRANKID is missing",
    ),
    "pmi repeated by hand": (
        HAND | {"LOCAL_RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "4"},
        "LOCAL_RANK=1, LOCAL_WORLD_SIZE is not set, .*set LOCAL_WORLD_SIZE",
    ),
    "pmi alone": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK=0, PMI_SIZE=2, .*MPI_LOCALRANKID is missing"),
    "slurm task number": (seen.srun(5, 1, 1), "rank 5: SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=5: a rank must be below"),
    "slurm node number": (seen.srun(4, 1, 3), "SLURM_NODEID=3, SLURM_STEP_NUM_NODES=3: a node's number must be"),
    "slurm local number": (seen.srun(4, 2, 1), r"SLURM_LOCALID=2, SLURM_STEP_TASKS_PER_NODE=2\(x2\),1: a local rank"),
    "slurm without local number": (without(seen.srun(4, 1, 1), "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
    "slurm without size": (
        without(seen.srun(4, 1, 1), "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "rank 4: SLURM_STEP_NUM_TASKS is not set",
    ),
    "slurm task counts": (
        seen.srun(4, 1, 1) | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        r"SLURM_STEP_TASKS_PER_NODE=2\(x3\), SLURM_STEP_NUM_TASKS=5, SLURM_STEP_NUM_NODES=3: .* is 6 tasks on 3",
    ),
    "slurm task counts damaged": (
        seen.srun(4, 1, 1) | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),"},
        r"SLURM_STEP_TASKS_PER_NODE=2\(x2\),: Slurm's list cannot be read: '' is neither",
    ),
    "slurm node list": (
        seen.srun(4, 1, 1) | {"SLURM_STEP_NODELIST": "node[01-02]"},
        r"SLURM_STEP_NODELIST=node\[01-02\], SLURM_STEP_NUM_NODES=3: .* is 2 hosts, not 3",
    ),
    "slurm node list damaged": (
        seen.srun(4, 1, 1) | {"SLURM_STEP_NODELIST": "node[01-"},
        r"SLURM_STEP_NODELIST=node\[01-: Slurm's list cannot be read: 'node\[01-' is not a host name",
    ),
    "slurm with loopback master": (
        seen.srun(4, 1, 1) | {"MASTER_ADDR": "127.0.0.1"},
        "rank 4: MASTER_ADDR=127.0.0.1: 3 nodes take part",
    ),
    "slurm without job id": (
        without(seen.srun(4, 1, 1), "SLURM_JOB_ID", "SLURM_JOBID"),
        "MASTER_PORT is not set, SLURM_JOB_ID is not set, SLURM_STEP_ID=1: 5 ranks .*MASTER_PORT=29400 srun",
    ),
}


@pytest.mark.parametrize(("environ", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_half_set_and_contradictory_variables(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        World.from_env(environ, device="cpu")

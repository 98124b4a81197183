"""Variables as launchers really set them, for tests: captured from runs, with the others that come along.

Hosts were made of UTS namespaces on one machine. Versions: torchrun 2.13, Open MPI 4.1.4 and 5.0.11, MPICH 4.0.2 and
5.0.2, Intel MPI 2021.18.1, Slurm 22.05.8. The PyTorchJob sets are what the training operator's source writes.
"""

from collections.abc import Mapping

HOST = {
    "HOME": "/home/ada",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "4",
}

# As scripts set them for processes that they spawn.
HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node01", "MASTER_PORT": "29500"}


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def torchrun(rank: int, local_rank: int, node_rank: int) -> dict[str, str]:
    """Two nodes, two ranks each."""
    return HOST | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "node01.cluster",
        "MASTER_PORT": "46289",
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_0itv5w4r/attempt_0/1/error.json",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "66ea4102-5b67-4d76-9d4a-1f36543e8af2",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def old_launch(rank: int, local_rank: int) -> dict[str, str]:
    """torch.distributed.launch before torch 1.9, one node, two ranks."""
    return HOST | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
    }


def pod(rank: int, nproc: str = "auto", world_size: int = 3) -> dict[str, str]:
    """A PyTorchJob of one master and two workers; the master's pod is rank 0."""
    role = "master-0" if rank == 0 else f"worker-{rank - 1}"
    return HOST | {
        "HOSTNAME": f"digits-{role}",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
        "DIGITS_MASTER_0_SERVICE_HOST": "10.96.12.7",
        "MASTER_ADDR": "digits-master-0",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "PET_MASTER_ADDR": "digits-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": nproc,
    }


def old_pod(rank: int) -> dict[str, str]:
    """The same of an older operator, which knew one rank per pod only."""
    return {name: value for name, value in pod(rank).items() if not name.startswith("PET_")}


def open_mpi4(rank: int, local_rank: int, by: str = "slot") -> dict[str, str]:
    """Three nodes, two ranks each, under Open MPI 4.1 with `-x MASTER_ADDR=node01`."""
    return HOST | {
        "MASTER_ADDR": "node01",
        "OMPI_APP_CTX_NUM_PROCS": "6",
        "OMPI_COMMAND": "train.py",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "6",
        "OMPI_FIRST_RANKS": "0",
        "OMPI_MCA_ess_base_jobid": "2070872065",
        "OMPI_MCA_ess_base_num_procs": "4",
        "OMPI_MCA_ess_base_vpid": str(rank),
        "OMPI_MCA_orte_bound_at_launch": "1",
        "OMPI_MCA_orte_ess_node_rank": str(local_rank),
        "OMPI_MCA_orte_ess_num_procs": "6",
        "OMPI_MCA_orte_hnp_uri": "2070872064.0;tcp://192.0.2.2:42897;tcp6://[fd00::2]:48475",
        "OMPI_MCA_orte_node_regex": "login,node[2:1-3]@0(4)",
        "OMPI_MCA_orte_num_nodes": "3",
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_rmaps_base_mapping_policy": by,
        "OMPI_NUM_APP_CTX": "1",
        "OMPI_UNIVERSE_SIZE": "8",
        "PMIX_HOSTNAME": "node03",
        "PMIX_ID": f"2070872065.{rank}",
        "PMIX_NAMESPACE": "2070872065",
        "PMIX_RANK": str(rank),
        "PMIX_VERSION": "4.2.2rc2",
    }


def open_mpi5(rank: int) -> dict[str, str]:
    """One node, two ranks, under Open MPI 5.0."""
    return HOST | {
        "OMPI_COMMAND": "train.py",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": str(rank),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_FILE_LOCATION": f"/tmp/ompi.4353/1/{rank}",
        "OMPI_MCA_num_procs": "2",
        "OMPI_NUM_APP_CTX": "1",
        "OMPI_TOOL_NAME": "mpirun",
        "OMPI_UNIVERSE_SIZE": "2",
        "OMPI_VERSION": "5.0.11",
        "OMPI_WORLD_LOCAL_SIZE": "2",
        "OMPI_WORLD_SIZE": "2",
        "PMIX_HOSTNAME": "node01",
        "PMIX_NAMESPACE": "prterun-node01-4353@1",
        "PMIX_RANK": str(rank),
        "PMIX_SERVER_URI41": "prterun-node01-4353@0.0;tcp4://127.0.0.1:40723",
        "PRTE_LAUNCHED": "1",
    }


def mpich(rank: int) -> dict[str, str]:
    """One node, two ranks, started with MASTER_PORT in mpiexec's environment."""
    return HOST | {
        "MASTER_PORT": "29400",
        "HYDI_CONTROL_FD": "7",
        "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node01",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank),
        "PMI_FD": "9",
        "PMI_HOSTNAME": "node01",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
    }


def intel_mpi(rank: int, local_rank: int, node: int) -> dict[str, str]:
    """Three nodes, one rank to each in turn, twice round, with MASTER_ADDR in mpiexec's environment."""
    return HOST | {
        "MASTER_ADDR": "node01",
        "HYDRA_BSTRAP_LAUNCHER": "ssh",
        "HYDRA_BSTRAP_LOCALHOST": f"node0{node + 1}",
        "HYDRA_BSTRAP_NODE_ID": str(node),
        "HYDRA_BSTRAP_PROXY_ID": str(node),
        "HYDRA_LAUNCH_TYPE": "2",
        "I_MPI_HYDRA_UUID": "d8120000-7d87-d957-7661-060073dd296e",
        "I_MPI_PIN_MAPPING": "2:0 0,1 1",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(local_rank),
        "PMI_FD": "11",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "6",
    }


def sbatch() -> dict[str, str]:
    """The shell of a batch script of five tasks on three nodes: no step, and yet a SLURM_PROCID."""
    return HOST | {
        "SLURMD_NODENAME": "node01",
        "SLURM_CLUSTER_NAME": "fake",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_GTIDS": "0",
        "SLURM_JOBID": "2",
        "SLURM_JOB_CPUS_PER_NODE": "2(x3)",
        "SLURM_JOB_ID": "2",
        "SLURM_JOB_NAME": "batch.sh",
        "SLURM_JOB_NODELIST": "node[01-03]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "3",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "node[01-03]",
        "SLURM_NPROCS": "5",
        "SLURM_NTASKS": "5",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "0",
        "SLURM_TASKS_PER_NODE": "2(x3)",
        "SLURM_TASK_PID": "6632",
        "SLURM_TOPOLOGY_ADDR": "node01",
    }


def srun(rank: int, local_rank: int, node_rank: int) -> dict[str, str]:
    """`srun` of that batch script, spread by Slurm in turn: two tasks, two, and one."""
    return sbatch() | {
        "SLURMD_NODENAME": f"node0{node_rank + 1}",
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_GTIDS": "0,3",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node_rank),
        "SLURM_PROCID": str(rank),
        "SLURM_SRUN_COMM_PORT": "40579",
        "SLURM_STEPID": "1",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_LAUNCHER_PORT": "40579",
        "SLURM_STEP_NODELIST": "node[01-03]",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_TASKS_PER_NODE": "2(x2),1",
    }


def srun_subset(rank: int) -> dict[str, str]:
    """`srun -N2 -n2` inside the same allocation of three nodes."""
    return srun(rank, 0, rank) | {
        "SLURM_GTIDS": str(rank),
        "SLURM_NNODES": "2",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }


def mpich_in_salloc(rank: int) -> dict[str, str]:
    """`mpiexec -n 4` of MPICH inside `salloc -N2 -n4`: hydra has srun start one proxy per node."""
    proxy = srun_subset(rank // 2) | {"SLURM_EXTERNAL_LAUNCHER": "1", "SLURM_JOB_NAME": "interactive"}
    proxy |= {"SLURM_JOB_NODELIST": "node[01-02]", "SLURM_NODELIST": "node[01-02]", "SLURM_JOB_NUM_NODES": "2"}
    return proxy | {
        "MASTER_ADDR": "node01",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank % 2),
        "PMI_FD": "5",
        "PMI_HOSTNAME": f"node0{rank // 2 + 1}",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
    }

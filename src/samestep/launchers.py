"""Read what each launcher tells its processes: torchrun and its like, PyTorchJob, Open MPI, MPICH, Slurm.

Pure: everything comes from the mapping that is passed, and nothing else of the process is looked at. `read` picks
the innermost launcher. In the order of precedence:

    torchrun, torch.distributed.launch, samestep run    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_*
    Kubernetes PyTorchJob, torch.multiprocessing.spawn  RANK, WORLD_SIZE, MASTER_*, and no LOCAL_RANK
    Open MPI                                            OMPI_COMM_WORLD_*
    hydra: MPICH, Intel MPI                             PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    Slurm, under srun                                   SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_*
    nothing                                             one rank

What was seen of Open MPI 4.1 and 5.0, MPICH 4.0 and 5.0, Intel MPI 2021.18 and Slurm 22.05 is in tests/test_world.py.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from samestep.hostlist import expand_counts, expand_hosts
from samestep.variables import Reading, Variables, is_loopback

__all__ = ["read"]

_T = TypeVar("_T")

_TORCH = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
}
_TORCH_START = "start the script with `samestep run` or torchrun, which set all of them, or unset them for one rank"

# Below Linux's ephemeral ports (from 32768), below torch's own default (29500), above what daemons use.
_PORTS = range(10000, 29500)

# Who numbers the nodes: torchrun, or a user for a launcher that does not.
_GROUPS = (("GROUP_RANK", "GROUP_WORLD_SIZE"), ("NODE_RANK", "NNODES"))

_SRUN = "start the script with srun, which sets all of Slurm's variables"

# Slurm numbers what is no job step (batch script, interactive shell, ...) from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class _Launcher:
    """A launcher below torch's: the variables that say who a process is, and how to read the rest."""

    name: str
    variables: dict[str, str]
    read: Callable[[Variables, "_Launcher"], Reading]
    start: str
    passing: str
    job: tuple[tuple[str, ...], ...]

    def agrees(self, v: Variables) -> bool:
        """Whether what there is of torch's variables says the same as this launcher's."""
        return all(
            ours in v and v.integer(_TORCH[field]) == v.integer(ours)
            for field, ours in self.variables.items()
            if field in _TORCH and _TORCH[field] in v
        )


def read(v: Variables) -> Reading:
    """Return what the innermost launcher says about this process.

    Raises:
        WorldError: variables are missing, are not numbers, or contradict one another.
    """
    outer = _outer(v)
    if not any(name in v for name in _TORCH.values()):
        return outer.read(v, outer) if outer else Reading()
    whole = all(name in v for name in (*_TORCH.values(), "MASTER_ADDR", "MASTER_PORT"))
    # `export RANK=$SLURM_PROCID` and the like: the launcher that is repeated knows what was left out.
    if outer and not whole and outer.agrees(v):
        return outer.read(v, outer)
    return _torch(v, outer)


def _outer(v: Variables) -> _Launcher | None:
    if "OMPI_COMM_WORLD_RANK" in v or "OMPI_COMM_WORLD_SIZE" in v:
        return _OPEN_MPI
    step = "SLURM_STEP_ID" in v and "SLURM_PROCID" in v and v.integer("SLURM_STEP_ID") < _FIRST_SPECIAL_STEP
    if "MPI_LOCALRANKID" in v or "MPI_LOCALNRANKS" in v:
        return _HYDRA
    # `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE as well, and nothing else of hydra's.
    if ("PMI_RANK" in v or "PMI_SIZE" in v) and not step:
        return _HYDRA
    return _slurm_variables(v) if step else None


def _torch(v: Variables, outer: _Launcher | None) -> Reading:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in v:
            beside = (outer.variables["rank"], outer.variables["size"]) if outer else ()
            shown = (*_TORCH.values(), "MASTER_ADDR", "MASTER_PORT", *beside)
            raise v.error(shown, f"{name} is missing; {_TORCH_START}")
    rank, size = v.integer("RANK"), v.integer("WORLD_SIZE", 1)
    v.check(_TORCH, rank=rank, size=size)
    address, port = v.address("MASTER_ADDR"), v.port("MASTER_PORT")
    if "LOCAL_RANK" not in v:
        if "LOCAL_WORLD_SIZE" in v:
            shown = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
            raise v.error(shown, f"LOCAL_RANK is missing; {_TORCH_START}")
        if is_loopback(address) or (size == 1 and "KUBERNETES_SERVICE_HOST" not in v):
            return Reading("env", rank, rank, size, size, 0, 1, address, port)
        return _pod(v, outer, rank, size)
    local_rank = v.integer("LOCAL_RANK")
    if "LOCAL_WORLD_SIZE" in v:
        local_size = v.integer("LOCAL_WORLD_SIZE", 1)
    elif size == 1 or is_loopback(address):
        local_size = size
    else:
        shown = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        problem = "with a master on another host the number of ranks on this node cannot be told"
        raise v.error(shown, f"{problem}; set LOCAL_WORLD_SIZE, or {_TORCH_START}")
    v.check(_TORCH, size=size, local_rank=local_rank, local_size=local_size)
    node_rank, num_nodes = _node(v, _TORCH, (rank, size, local_rank, local_size), _GROUPS)
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in v else "env"
    return Reading(launcher, rank, local_rank, size, local_size, node_rank, num_nodes, address, port)


def _pod(v: Variables, outer: _Launcher | None, rank: int, size: int) -> Reading:
    """A master elsewhere and no LOCAL_RANK: right in Kubernetes, where a pod of a PyTorchJob is one rank."""
    shown: tuple[str, ...] = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK")
    if "KUBERNETES_SERVICE_HOST" not in v:
        problem = "LOCAL_RANK is missing and the master is not this host"
        raise v.error(shown, f"{problem}; set LOCAL_RANK and LOCAL_WORLD_SIZE, or {_TORCH_START}")
    if outer is not None and size == 1:
        return outer.read(v, outer)
    if outer is not None:
        shown = ("RANK", "WORLD_SIZE", outer.variables["rank"], outer.variables["size"])
        problem = f"the pod and {outer.name} disagree"
        raise v.error(shown, f"{problem}; start the script with one of them, or unset RANK and WORLD_SIZE")
    # "auto" is what the operator writes when the job says nothing, and it counts one rank per pod then.
    if v.get("PET_NPROC_PER_NODE", "1") not in ("1", "auto"):
        problem = "the job asks for several ranks per pod, and this container starts the script by itself"
        raise v.error(("PET_NPROC_PER_NODE", *shown), f"{problem}; let it start `samestep run` or torchrun")
    if "PET_NODE_RANK" in v and v.integer("PET_NODE_RANK") != rank:
        problem = "a pod that is one rank has one number, and LOCAL_RANK is missing for several ranks per pod"
        raise v.error(("PET_NODE_RANK", *shown), f"{problem}; start the script with `samestep run` or torchrun")
    return Reading("pytorchjob", rank, 0, size, 1, rank, size, v.address("MASTER_ADDR"), v.port("MASTER_PORT"))


def _mpi(v: Variables, launcher: _Launcher) -> Reading:
    names = launcher.variables
    for name in names.values():
        if name not in v:
            advice = f"start the script with {launcher.start}, or set torchrun's variables for each rank"
            raise v.error(tuple(names.values()), f"{name} is missing; {advice}")
    rank, size = v.integer(names["rank"]), v.integer(names["size"], 1)
    local_rank, local_size = v.integer(names["local_rank"]), v.integer(names["local_size"], 1)
    v.check(names, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
    # Intel's hydra numbers the nodes.
    groups = (*_GROUPS, ("HYDRA_BSTRAP_NODE_ID", "NNODES")) if launcher is _HYDRA else _GROUPS
    node_rank, num_nodes = _node(v, names, (rank, size, local_rank, local_size), groups)
    port = _port(v, launcher, size)
    if "MASTER_ADDR" in v:
        address = _master(v, num_nodes)
    elif num_nodes == 1:
        address = "127.0.0.1"
    else:
        shown = (*names.values(), "MASTER_ADDR")
        problem = f"{num_nodes} nodes take part, and {launcher.name} does not say which is rank 0's"
        raise v.error(shown, f"{problem}; start with {launcher.passing.format('MASTER_ADDR=HOST')}")
    return Reading(launcher.name, rank, local_rank, size, local_size, node_rank, num_nodes, address, port)


def _slurm(v: Variables, launcher: _Launcher) -> Reading:
    names = launcher.variables
    rank, size, local_rank = v.integer(names["rank"]), v.integer(names["size"], 1), v.integer(names["local_rank"])
    node_rank, num_nodes = v.integer(names["node_rank"]), v.integer(names["num_nodes"], 1)
    v.check(names, rank=rank, size=size, node_rank=node_rank, num_nodes=num_nodes)
    tasks = v.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = _expand(v, tasks, expand_counts)
    if len(counts) != num_nodes or sum(counts) != size:
        problem = f"{tasks} is {sum(counts)} tasks on {len(counts)} nodes, not {size} on {num_nodes}"
        raise v.error((tasks, names["size"], names["num_nodes"]), f"{problem}; {_SRUN}")
    local_size = counts[node_rank]
    v.check({**names, "local_size": tasks}, local_rank=local_rank, local_size=local_size)
    address = _master(v, num_nodes) if "MASTER_ADDR" in v else _first_host(v, names["num_nodes"], num_nodes)
    port = _port(v, launcher, size)
    return Reading("slurm", rank, local_rank, size, local_size, node_rank, num_nodes, address, port)


def _first_host(v: Variables, count: str, num_nodes: int) -> str:
    name = v.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    hosts = _expand(v, name, expand_hosts)
    if len(hosts) != num_nodes:
        problem = f"{name} is {len(hosts)} hosts, not {num_nodes}; {_SRUN}, or set MASTER_ADDR to rank 0's host"
        raise v.error((name, count), problem)
    return hosts[0]


def _expand(v: Variables, name: str, expand: Callable[[str], tuple[_T, ...]]) -> tuple[_T, ...]:
    text = v.text(name)
    try:
        return expand(text)
    except ValueError as error:
        raise v.error((name,), f"Slurm's list cannot be read: {error}; {_SRUN}") from error


def _node(
    v: Variables, names: dict[str, str], place: tuple[int, int, int, int], groups: tuple[tuple[str, str], ...]
) -> tuple[int, int]:
    """Return this node's number and how many there are, as told or else as the ranks are laid out."""
    rank, size, local_rank, local_size = place
    for number, total in groups:
        if number not in v:
            continue
        if total not in v and size % local_size:
            shown = (number, total, names["size"], names["local_size"])
            raise v.error(shown, f"nodes have unequal numbers of ranks; set {total} to the number of nodes")
        node_rank = v.integer(number)
        num_nodes = v.integer(total, 1) if total in v else size // local_size
        named = {**names, "node_rank": number, "num_nodes": total}
        v.check(named, size=size, local_size=local_size, node_rank=node_rank, num_nodes=num_nodes)
        return node_rank, num_nodes
    by_node = v.get("OMPI_MCA_rmaps_base_mapping_policy", "").startswith("node")
    found = _laid_out(rank, size, local_rank, local_size, by_node=by_node)
    if found is None:
        number, total = groups[0]
        problem = "these do not tell which node this is, as ranks are not in equal blocks, one node after the other"
        advice = f"place them so, or set {' and '.join(groups[1])} (or {number} and {total}) for each rank"
        raise v.error((*names.values(), *groups[1]), f"{problem}; {advice}")
    return found, size // local_size


def _laid_out(rank: int, size: int, local_rank: int, local_size: int, *, by_node: bool) -> int | None:
    """Return this rank's node if all nodes have as many ranks, given out by slot or by node (one to each in turn).

    Some ranks fit both, on different nodes. A world is then taken to be laid out by slot: if it is by node, at least
    one rank (rank 1) fits that only, gets None, and fails instead of all of them counting wrongly.
    """
    if local_size == size:
        return 0
    if size % local_size:
        return None
    num_nodes = size // local_size
    slot = rank // local_size if rank % local_size == local_rank else None
    turn = rank % num_nodes if rank // num_nodes == local_rank else None
    if by_node or slot == turn:
        return turn
    doubtful = any(r % local_size == r // num_nodes and r // local_size != r % num_nodes for r in range(size))
    return slot if slot is not None or doubtful else turn


def _master(v: Variables, num_nodes: int) -> str:
    address = v.address("MASTER_ADDR")
    if num_nodes > 1 and is_loopback(address):
        problem = f"{num_nodes} nodes take part, and this address means each one itself"
        raise v.error(("MASTER_ADDR",), f"{problem}; set MASTER_ADDR to the host of rank 0")
    return address


def _port(v: Variables, launcher: _Launcher, size: int) -> int:
    """Return MASTER_PORT, or else a port from the job's id, the same on all ranks; 0 if a single rank needs none."""
    if "MASTER_PORT" in v:
        return v.port("MASTER_PORT")
    for names in launcher.job:
        if all(name in v for name in names):
            job = "/".join(v.text(name) for name in names)
            return _PORTS[zlib.crc32(job.encode(errors="surrogateescape")) % len(_PORTS)]
    if size == 1:
        return 0
    shown = ("MASTER_PORT", *(name for names in launcher.job for name in names))
    problem = f"{size} ranks must agree on a port, and {launcher.name} gives nothing to pick one from"
    raise v.error(tuple(dict.fromkeys(shown)), f"{problem}; start with {launcher.passing.format('MASTER_PORT=29400')}")


def _slurm_variables(v: Variables) -> _Launcher:
    """srun writes the step's variables; the job's describe the whole allocation and stand in where those lack."""
    variables = {
        "rank": "SLURM_PROCID",
        "size": v.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
        "num_nodes": v.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    }
    job = ((v.first("SLURM_JOB_ID", "SLURM_JOBID"), "SLURM_STEP_ID"),)
    return _Launcher("slurm", variables, _slurm, "srun", "{} srun ...", job)


_OPEN_MPI = _Launcher(
    "open mpi",
    {
        "rank": "OMPI_COMM_WORLD_RANK",
        "size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    _mpi,
    "mpirun",
    "mpirun -x {} ...",
    (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
)
# MPICH's hydra says nothing by itself that is the same on all ranks and differs between runs. mpiexec hands its own
# environment on, so a batch system's job id is there; two runs at a time in one job need MASTER_PORT.
_HYDRA = _Launcher(
    "hydra (MPICH, Intel MPI)",
    {
        "rank": "PMI_RANK",
        "size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_size": "MPI_LOCALNRANKS",
    },
    _mpi,
    "mpiexec",
    "{} mpiexec ...",
    (
        ("I_MPI_HYDRA_UUID",),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        ("SLURM_JOB_ID",),
        ("PBS_JOBID",),
        ("LSB_JOBID",),
    ),
)

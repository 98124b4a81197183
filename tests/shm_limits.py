"""Ranks that can't have memory, or can't share it; light to import, as every process of a test imports it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from shm_faults import held
from shm_ranks import gathered

from samestep.comm.base import Communicator
from samestep.comm.c10d import C10dCommunicator
from samestep.comm.shm import gather
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.gather import Unshared
from samestep.errors import PeerLostError
from samestep.testing.samples import refused

NOBODY = 65534


def _reason(control: Communicator) -> str:
    """Return why there is no shared memory, the same on all ranks."""
    made = ShmCommunicator.gather(control)
    assert isinstance(made, Unshared), made
    assert control.all_gather_object(made.reason) == [made.reason] * control.size
    return made.reason


def _add(comm: Communicator, tensor: torch.Tensor) -> None:
    tensor.fill_(comm.rank + 1)
    comm.all_reduce(tensor)
    assert bool((tensor == comm.size * (comm.size + 1) / 2).all())


# Limits


@contextmanager
def _limit(which: int, value: int) -> Iterator[None]:
    _, most = resource.getrlimit(which)
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, most))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def reach_a_limit(control: Communicator, which: int) -> tuple[str, str]:
    """Rank 1 reaches a limit when the group begins, and then in its midst: memory is not shared, and all is well."""
    value = len(os.listdir("/proc/self/fd")) - 1 if which == resource.RLIMIT_NOFILE else 8192
    with _limit(which, value if control.rank == 1 else resource.getrlimit(which)[0]):
        first = _reason(control)
    assert held() == 0, "memory that nobody shares"
    with gathered(control) as comm:
        before = held()
        with _limit(which, value if control.rank == 1 else resource.getrlimit(which)[0]):
            tensor = comm.empty((50_000,))
            _add(comm, tensor)
            again = _reason(comm)
            _add(comm, tensor)
        assert held() == before, "memory that nobody shares"
        tensor = comm.empty((50_000,))
        assert held() == before + comm.size
        _add(comm, tensor)
    return first, again


def lose_a_peer_without_descriptors(control: Communicator) -> None:
    """Rank 1 has no descriptor left when it looks after rank 0, which has died."""
    comm = gathered(control)
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with _limit(resource.RLIMIT_NOFILE, 3):
        said = refused(comm, "a barrier", comm.barrier, PeerLostError)
    assert f"rank 0 (process {pids[0]}) died" in said, said
    comm.close()


def ask_for_too_much(control: Communicator) -> str:
    """More than the host has: nobody is ended for it."""
    made = ShmCommunicator.gather(control, slot_bytes=2**45)
    assert isinstance(made, Unshared), made
    with gathered(control) as comm:
        refused(comm, "more than there is", lambda: comm.empty((2**60,), torch.uint8), RuntimeError)
        comm.barrier()
    return made.reason


def allocate_between_signals(control: Communicator) -> None:
    """A timer's signals come more often than it takes to allocate all."""
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        with gathered(control) as comm:
            tensor = comm.empty((50 * 2**20,))
            assert comm._room.place(tensor) is not None
            _add(comm, tensor[:100_000])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    assert seen


# Descriptors that others close


def close_behind_its_back(control: Communicator, instead: str) -> str:
    """On rank 1 somebody closes all descriptors but the standard ones and Gloo's; and opens something else there."""
    if control.rank == 1:
        offered = gather.offered

        @contextmanager
        def closed(num_bytes: int) -> Iterator[object]:
            with offered(num_bytes) as (offer, mapping):
                os.close(offer.fd)
                if instead and (other := os.open(instead, os.O_RDWR | os.O_CREAT)) != offer.fd:
                    os.dup2(other, offer.fd)
                    os.close(other)
                yield offer, mapping

        gather.offered = closed  # type: ignore[assignment]
    said = _reason(control)
    assert held() == 0, "memory that nobody shares"
    return said


# Users


def _be_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def be_another_user(control: Communicator) -> str:
    """Rank 1 is nobody before the group begins."""
    if control.rank == 1:
        _be_nobody()
    said = _reason(control)
    assert held() == 0, "memory that nobody shares"
    return said


def become_another_user(control: Communicator) -> None:
    """Rank 1 becomes nobody in the midst: what is shared stays so, and new memory is not shared."""
    with gathered(control) as comm:
        before = comm.empty((50_000,))
        assert comm._room.place(before) is not None
        if comm.rank == 1:
            _be_nobody()
        after = comm.empty((50_000,))
        assert comm._room.place(after) is None
        for tensor in (before, after):
            _add(comm, tensor)
        assert _reason(comm) == "ranks 0 and 1 run as different users (0 and 65534)"


def be_nobody_together(control: Communicator, dumpable: bool) -> str:
    """All ranks are nobody, and the kernel keeps their descriptors from each other unless they allow it."""
    _be_nobody()
    ctypes.CDLL(None).prctl(4, int(dumpable), 0, 0, 0)
    made = ShmCommunicator.gather(control)
    if isinstance(made, Unshared):
        return made.reason
    with made:
        _add(made, torch.ones(3))
    return "shared"


# Namespaces

_NEWNS, _NEWPID, _DETACH, _RECURSIVE, _PRIVATE = 0x20000, 0x20000000, 2, 0x4000, 0x40000


def _libc(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _own_mounts() -> None:
    _libc("unshare", _NEWNS)
    _libc("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)


def lose_proc(control: Communicator) -> str:
    """Rank 1 has no /proc."""
    if control.rank == 1:
        _own_mounts()
        _libc("umount2", b"/proc", _DETACH)
    made = ShmCommunicator.gather(control)
    assert isinstance(made, Unshared), made
    return made.reason


def hide_processes(control: Communicator, dumpable: bool) -> str:
    """Ranks of nobody see only the processes of their own user."""
    _own_mounts()
    _libc("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(0), b"hidepid=2")
    return be_nobody_together(control, dumpable)


def be_in_other_containers(control: Communicator, together: bool, own_proc: bool) -> list[str]:
    """Two ranks in PID namespaces other than this process's: each in one of its own, or both in one.

    Either they have a /proc of their own, or they see that of this process's namespace. Returns what became of sharing.
    """
    dist.destroy_process_group()
    del control
    with tempfile.TemporaryDirectory() as folder:
        if together:
            _in_container(own_proc, lambda: _two_ranks(folder))
        else:
            _all_of([lambda rank=rank: _in_container(own_proc, lambda: _rank(folder, rank)) for rank in range(2)])
        return [Path(folder, str(rank)).read_text() for rank in range(2)]


def _in_container(own_proc: bool, main: Callable[[], None]) -> None:
    """Call `main` in a process with a PID namespace of its own, the first one in it."""

    def enter() -> None:
        _libc("unshare", _NEWPID)

        def first() -> None:
            if own_proc:
                _own_mounts()
                _libc("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None)
            main()

        _all_of([first])

    _all_of([enter])


def _two_ranks(folder: str) -> None:
    _all_of([lambda rank=rank: _rank(folder, rank) for rank in range(2)])


def _rank(folder: str, rank: int) -> None:
    store = dist.FileStore(str(Path(folder, "store")), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    control = C10dCommunicator()
    made = ShmCommunicator.gather(control)
    if isinstance(made, ShmCommunicator):
        with made:
            _add(made, torch.ones(3))
    control.barrier()
    Path(folder, str(rank)).write_text(made.reason if isinstance(made, Unshared) else "shared")
    dist.destroy_process_group()


def _all_of(mains: list[Callable[[], None]]) -> None:
    """Fork a process for each of `mains` and wait for all of them."""
    pids = [_forked(main) for main in mains]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), codes


def _forked(main: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            main()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent sees the code
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


# Memory cgroups


def fill_a_cgroup(control: Communicator, folder: str, path: str) -> tuple[bool, str]:
    """Rank 1 asks for more than its memory cgroup has left; the others get the memory or learn of its end."""
    store = dist.FileStore(path, control.size)  # type: ignore[attr-defined]
    with gathered(control) as comm:
        pids = comm.all_gather_object(os.getpid())
        if comm.rank == 1:
            Path(folder, "cgroup.procs").write_text(str(os.getpid()))
        comm.barrier()
        try:
            tensor = comm.empty((32 * 2**20,), torch.uint8)
        except PeerLostError as error:
            said = str(error)
            assert f"rank 1 (process {pids[1]}) died" in said, said
            refused(comm, "a barrier afterwards", comm.barrier, PeerLostError)
            store.set(f"knows {comm.rank}", "yes")
            store.wait([f"knows {rank}" for rank in range(comm.size) if rank != 1])
            return True, said
        return comm._room.place(tensor) is not None, ""

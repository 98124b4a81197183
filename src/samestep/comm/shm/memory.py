"""Memory that processes of one user on one host share: a memfd, which peers open through /proc/<pid>/fd.

It has no name and lies in no directory, so the size of /dev/shm does not limit it, and it is gone with the last process
that has it mapped, whatever ends that one. Descriptors are needed only while peers map it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from samestep.comm.shm.kernel import memfd_create, start_time

__all__ = ["Mapping", "Offer", "here", "map_peer", "offered"]

_PROT_READ_WRITE, _MAP_SHARED = 3, 1
_TOKEN_BYTES = 16
_NAME = "samestep"

# What one call allocates, in milliseconds. When a signal comes, many a Linux gives back what the call has, and begins
# it anew: a profiler's timer would keep a call that takes longer than its period from ever ending.
_STEP_BYTES = 4 * 2**20


class Mapping:
    """A range of shared memory, mapped until nobody holds `buffer` (or a tensor or a view made of it) any more."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        # Python's own mmap would keep a descriptor of each mapping open (until 3.13, where it can be told not to).
        address = _libc().mmap(None, num_bytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = address
        self.num_bytes = num_bytes
        self.buffer: Any = (ctypes.c_ubyte * num_bytes).from_address(address)
        weakref.finalize(self.buffer, _libc().munmap, address, num_bytes).atexit = False

    def borrowed(self) -> Any:
        """Return a buffer on the same memory that does not keep it mapped."""
        return (ctypes.c_ubyte * self.num_bytes).from_address(self.address)

    def bytes_view(self) -> memoryview:
        return memoryview(self.buffer).cast("B")

    @property
    def token(self) -> bytes:
        """The last bytes, by which a peer knows the memory that it was offered."""
        return bytes(self.bytes_view()[-_TOKEN_BYTES:])

    def set_token(self) -> bytes:
        token = self.bytes_view()[-_TOKEN_BYTES:] = secrets.token_bytes(_TOKEN_BYTES)
        return token

    def clear_token(self) -> None:
        self.bytes_view()[-_TOKEN_BYTES:] = bytes(_TOKEN_BYTES)


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others so that they can map its memory, or why it has none (`refusal`)."""

    host: str = ""
    uid: int = -1
    pid: int = -1
    started: int = -1
    fd: int = -1
    num_bytes: int = 0
    token: bytes = b""
    kernels: int = 0  # the version of the compiled loops that the rank would use; 0 for none
    refusal: str = ""


def here() -> str:
    """Return what processes must have in common to see each other's memory: the kernel's boot and the pid namespace."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot:  # a codec might have to be loaded, from a file
        return f"{boot.read().strip().decode()} {os.readlink('/proc/self/ns/pid')}"


@contextlib.contextmanager
def offered(num_bytes: int) -> Iterator[tuple[Offer, Mapping]]:
    """Make shared memory and map it; peers can map it, too, until the context ends. Raises OSError.

    All pages are there from the beginning, so that a lack of memory is an error here and no SIGBUS later.
    """
    fd = memfd_create(_NAME)
    try:
        os.fchmod(fd, 0o600)
        for start in range(0, num_bytes, _STEP_BYTES):
            os.posix_fallocate(fd, start, min(_STEP_BYTES, num_bytes - start))
        mapping = Mapping(fd, num_bytes)
        token = mapping.set_token()
        pid = os.getpid()
        yield Offer(here(), os.geteuid(), pid, start_time(pid) or -1, fd, num_bytes, token), mapping
    finally:
        with contextlib.suppress(OSError):  # closed by somebody else meanwhile; peers could not map it then
            os.close(fd)


def map_peer(offer: Offer) -> Mapping:
    """Map what another rank of this host offered. Raises OSError if that cannot be, or is something else by now."""
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    if f"memfd:{_NAME}" not in os.readlink(path):  # to open just anything might do something
        raise _other(offer)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != offer.num_bytes:
            raise _other(offer)
        mapping = Mapping(fd, offer.num_bytes)
    finally:
        os.close(fd)
    if mapping.token != offer.token:
        raise _other(offer)
    return mapping


def _other(offer: Offer) -> OSError:
    return OSError(f"process {offer.pid} has something else under its descriptor {offer.fd}")


def _libc() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        _loaded = ctypes.CDLL(None, use_errno=True)
        _loaded.mmap.restype = ctypes.c_void_p
        _loaded.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        _loaded.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return _loaded


_loaded: ctypes.CDLL | None = None

"""The ranks of a torch.distributed process group, on the fastest transport that serves all of them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.base import Communicator, Work
from samestep.comm.c10d import C10dCommunicator
from samestep.comm.checked import CheckedCommunicator
from samestep.comm.ops import Op, Recv, Send
from samestep.comm.shm.communicator import ShmCommunicator
from samestep.comm.shm.gather import Unshared

__all__ = ["GroupCommunicator"]

# What was decided for a group, as long as there is that group: its shared memory, or None.
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, ShmCommunicator | None] = weakref.WeakKeyDictionary()


class GroupCommunicator(Communicator):
    """A communicator over `group`, a torch.distributed process group; None is the default group.

    The first exchange of all ranks decides, once for the group and alike on every rank, what carries this and all that
    follow: memory that the ranks share, if their tensors are in the CPU's memory and all are processes of one user on
    one host; else the group itself (`C10dCommunicator`), with a warning that says why. Messages between two ranks and
    tensors elsewhere always go through the group. With `checked`, ranks that ask for different exchanges get a
    MismatchError over either; without, over shared memory only.

    Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not in `group`. Closing
    it destroys the group, and its shared memory with it, if `owns_group`; else that is left to whoever made it.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, owns_group: bool = False, checked: bool = False
    ) -> None:
        self._c10d = C10dCommunicator(group, owns_group=owns_group)
        self._plain = CheckedCommunicator(self._c10d) if checked else self._c10d
        self.rank, self.size, self.device = self._c10d.rank, self._c10d.size, self._c10d.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; CommunicatorError once it is destroyed."""
        return self._c10d.group

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._decided().empty(shape, dtype)

    def _start(self, op: Op) -> Work:
        if isinstance(op, Send | Recv):
            return self._plain._start(op)
        decided = self._decided()
        self._scales = decided._scales
        self._start = decided._start  # type: ignore[method-assign]  # from now on without a detour
        return self._start(op)

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        return self._decided()._split(ranks)

    def close(self) -> None:
        self._plain.close()

    def _decided(self) -> Communicator:
        group = self.group
        if group not in _shared:
            _shared[group] = _share(self._c10d)
        return _shared[group] or self._plain


def _share(c10d: C10dCommunicator) -> ShmCommunicator | None:
    if c10d.device.type != "cpu":
        return None
    made = ShmCommunicator.gather(c10d, timeout_s=c10d.timeout_s)
    if isinstance(made, Unshared):
        if c10d.rank == 0:
            warnings.warn(f"the ranks of this group do not share memory, which is slower: {made.reason}", stacklevel=2)
        return None
    weakref.finalize(c10d.group, made.close, "the process group has been destroyed")
    return made

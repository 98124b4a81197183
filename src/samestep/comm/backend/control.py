"""What the ranks of a new group tell each other before they share memory."""

from __future__ import annotations

from typing import Any

import torch

from samestep.comm.base import Communicator, DoneWork, Work
from samestep.comm.ops import AllGather, Op
from samestep.errors import CommunicatorError

__all__ = ["GlooControl"]


class GlooControl(Communicator):
    """Gathers over a bare Gloo backend, which belongs to no process group yet.

    It does nothing else, as all that shared memory does not serve goes to Gloo directly.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self.rank, self.size, self.device = gloo.rank(), gloo.size(), torch.device("cpu")

    def _start(self, op: Op) -> Work:
        assert isinstance(op, AllGather), op
        try:
            self._gloo.allgather([list(op.output.view(self.size, -1).unbind())], [op.tensor.view(-1)]).wait()
        except RuntimeError as error:
            raise CommunicatorError(
                f"rank {self.rank} of {self.size}: the ranks of a new group could not tell each other about their "
                f"memory; look for the first error among the other ranks ({str(error).splitlines()[0]})"
            ) from error
        return DoneWork()

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        raise AssertionError("groups of this backend are made by torch.distributed")

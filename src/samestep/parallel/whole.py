"""A large gradient, exchanged where autograd put it: neither memory of its own nor a copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import AllReduce
from samestep.parallel.bucket import require_dense
from samestep.parallel.plan import BucketPlan
from samestep.parallel.reduction import Exchange

__all__ = ["WHOLE_BYTES", "WholeBucket"]

# From this size on, to copy a gradient into a bucket costs more than an exchange of its own.
WHOLE_BYTES = 2**20

# How many hold the storage of a tensor that only one has: the tensor, and the object through which Python asks.
_ALONE = 2


class WholeBucket:
    """The gradient of one large dense parameter, which `wait` leaves reduced where it is."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter]) -> None:
        (self.index,) = plan.indices
        self.parameter = parameters[self.index]
        self._strides = _strides(self.parameter)
        self._grad: Tensor | None = None
        self._kept: Tensor | None = None
        self._scale = 1.0
        self._work: Work | None = None

    def pack(self, scale: float | None, used: bytearray) -> None:
        """Take the gradient off the parameter, to be sent times `scale`."""
        grad, self._kept = self.parameter.grad, None
        if grad is None:
            used[self.index] = 0
            grad = self._empty().zero_()
        else:
            require_dense(grad)
            if not used[self.index]:
                self._kept = grad.clone()
        if grad.stride() != self._strides or grad.requires_grad or _is_shared(grad):
            grad = self._empty().copy_(grad.detach())
        self._grad, self.parameter.grad = grad, None
        self._scale = 1.0 if scale is None else scale

    def clear(self, used: bytearray) -> None:
        used[self.index] = 0
        self._grad, self.parameter.grad = self._empty().zero_(), None
        self._scale = 1.0

    def drop(self) -> None:
        """Leave the parameter without a gradient, and forget what was kept of it."""
        self.parameter.grad = self._grad = self._kept = None

    def start(self, communicator: Communicator, exchange: Exchange) -> None:
        assert self._grad is not None
        flat = self._grad.as_strided((self._grad.numel(),), (1,))
        self._work = communicator.start(AllReduce(flat, scale=self._scale))

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def unpack(self, divisor: Tensor | float | None, unused: Collection[int], earlier: Mapping[int, Tensor]) -> None:
        """Divide the sum, if told to, and give the parameter its gradient, as `DenseBucket.unpack` does."""
        assert self._grad is not None
        if self.index in unused:
            self.parameter.grad = earlier.get(self.index, self._kept)
        else:
            if divisor is not None:
                self._grad.div_(divisor)
            if self.index in earlier:
                self._grad.add_(earlier[self.index])
            self.parameter.grad = self._grad
        self._grad = self._kept = None

    def _empty(self) -> Tensor:
        parameter = self.parameter.detach()
        return parameter.new_empty(0).new_empty_strided(parameter.shape, self._strides)


def _is_shared(grad: Tensor) -> bool:
    """Tell whether something else may lie in the gradient's memory, or read it while backward goes on.

    The gradient of x + y.view(...) is one memory for both, and what is not used up yet of the graph has it, too.
    """
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return count is None or count(grad.untyped_storage()._cdata) != _ALONE


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides where its elements fill one block of memory, else those that would."""
    return torch.empty_like(parameter, device="meta").stride()

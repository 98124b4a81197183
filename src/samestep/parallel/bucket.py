"""The memory of one bucket: a flat tensor whose views become the parameters' gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from samestep.comm.base import Communicator, Work
from samestep.errors import ReplicaError
from samestep.parallel.plan import BucketPlan
from samestep.parallel.reduction import Exchange, sum_sparse

__all__ = ["Bucket", "DenseBucket", "SparseBucket"]


class DenseBucket:
    """Gradients of dense parameters of one dtype and device, in `flat`, and elements of the same kind behind them.

    While a bucket is on its way its parameters have no gradient: one that arrives in between can neither disturb the
    exchange nor be lost unseen.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        members = [parameters[i] for i in plan.indices]
        self.flat = flat
        self.gradients, self.tail = self.flat[: plan.numel], self.flat[plan.numel :]
        views = [_view(self.flat, offset, p) for offset, p in zip(plan.offsets, members, strict=True)]
        self.entries = list(zip(plan.indices, members, views, strict=True))
        self._kept: dict[int, Tensor] = {}
        self._work: Work | None = None

    def pack(self, scale: float | None, used: bytearray) -> None:
        """Bring the parameters' gradients in, times `scale`, and take them off the parameters.

        Clears `used[i]` where there is none; keeps a copy of those that this rank did not use, as they stay what they
        are if no rank did.
        """
        with torch.no_grad():
            for index, parameter, view in self.entries:
                grad = parameter.grad
                if grad is None:
                    used[index] = 0
                    view.zero_()
                    continue
                if not used[index]:
                    self._kept[index] = grad.clone()
                if grad is view:
                    if scale is not None:
                        view.mul_(scale)
                elif grad.layout != torch.strided:
                    raise ReplicaError(
                        f"a gradient of shape {list(grad.shape)} is {grad.layout}, but its parameter was planned as "
                        "dense: build the layer with sparse=True before wrapping"
                    )
                elif scale is None:
                    view.copy_(grad)
                else:
                    torch.mul(grad, scale, out=view)
                parameter.grad = None

    def clear(self, used: bytearray) -> None:
        """Contribute nothing: zeros in place of this rank's gradients, which are dropped."""
        for index, parameter, _ in self.entries:
            used[index] = 0
            parameter.grad = None
        self.flat.zero_()

    def start(self, communicator: Communicator, exchange: Exchange) -> None:
        self._work = exchange(communicator, self.flat)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def unpack(self, divisor: Tensor | float | None, unused: Collection[int], earlier: Mapping[int, Tensor]) -> None:
        """Divide the sums, if told to, and give the parameters their gradients, on top of `earlier` ones.

        Parameters in `unused`, which no rank used, get back what they had.
        """
        if divisor is not None:
            self.gradients.div_(divisor)
        for index, parameter, view in self.entries:
            if index in unused:
                parameter.grad = earlier.get(index, self._kept.get(index))
            else:
                if index in earlier:
                    view.add_(earlier[index])
                parameter.grad = view
        self._kept.clear()


class SparseBucket:
    """The gradient of one parameter that autograd gives as a sparse tensor; its rows are exchanged in `wait`."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter]) -> None:
        (self.index,) = plan.indices
        self.parameter = parameters[self.index]
        self._grad = self._nothing()
        self._kept: Tensor | None = None
        self._communicator: Communicator | None = None

    def pack(self, scale: float | None, used: bytearray) -> None:
        grad = self.parameter.grad
        if grad is None:
            used[self.index] = 0
            self._grad = self._nothing()
            return
        self._kept = grad
        self._grad = grad.detach().to_sparse(1) if grad.layout == torch.strided else grad.detach()
        if scale is not None:
            self._grad = self._grad * scale
        self.parameter.grad = None

    def clear(self, used: bytearray) -> None:
        used[self.index] = 0
        self._grad, self.parameter.grad = self._nothing(), None

    def start(self, communicator: Communicator, exchange: Exchange) -> None:
        self._communicator = communicator

    def wait(self) -> None:
        if self._communicator is not None:
            self._grad = sum_sparse(self._communicator, self._grad)
            self._communicator = None

    def unpack(self, divisor: Tensor | float | None, unused: Collection[int], earlier: Mapping[int, Tensor]) -> None:
        total = self._grad if divisor is None else self._grad / divisor
        if self.index in unused:
            self.parameter.grad = earlier.get(self.index, self._kept)
        else:
            self.parameter.grad = total + earlier[self.index] if self.index in earlier else total
        self._grad, self._kept = self._nothing(), None

    def _nothing(self) -> Tensor:
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=self.parameter.device),
            self.parameter.new_empty((0, *self.parameter.shape[1:]), requires_grad=False),
            self.parameter.shape,
            check_invariants=False,
        )


Bucket = DenseBucket | SparseBucket


def _view(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """Give the gradient the parameter's own strides where these are dense, so that optimizers walk both alike."""
    if _dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill one block of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True

"""SyncBatchNorm: batch normalisation with the statistics of the batch that all ranks hold together, on any device."""

from __future__ import annotations

import copy
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from samestep.comm.base import Communicator
from samestep.comm.select import communicator_for
from samestep.errors import ReplicaError
from samestep.parallel.outside_graphs import outside_graphs

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over [N, C, ...] inputs whose statistics, in training, are those of all ranks' batches.

    Takes the arguments of torch.nn.SyncBatchNorm by their names, has its state dict, and computes what torch's
    BatchNorm computes on the ranks' batches put together. CPU tensors will do, and inputs of 2 to 5 or more dimensions.
    Batches may differ in size from rank to rank; a rank with an empty one takes part like any other. In evaluation, and
    with one rank or without a process group, nothing is exchanged and it is torch's BatchNorm.

    How near it comes to one process with the whole batch, in outputs and gradients: a few units in the last place,
    relative to the largest value. All ranks have the same bits in their running statistics. Half types are counted in
    float32, and what the ranks tell one another is added in float64, in rank order.

    `weight.grad` and `bias.grad` are of this rank's samples, as in torch: DistributedDataParallel averages them.

    One exchange in forward, one in backward if the input needs a gradient. They are part of the sequence of exchanges
    of `process_group`, in which DistributedDataParallel's buckets may be as well, so all ranks have to come to them in
    the same order: each calls this module as often, in training mode; and each runs backward through as many of its
    outputs, through the same graph, as autograd's order depends on nothing else. A rank without samples runs both on
    an empty batch, with a loss that is a sum: DistributedDataParallel's `backward(..., weight=0)` would leave backward
    out. Where parameters take part on some ranks only, give this module a group of its own. If ranks do come in
    different orders, the transport says so, or its deadline ends the wait.

    Arguments:
        num_features: C.
        eps: added to the variance before its root is taken.
        momentum: share of the new statistics in the running ones; None for the average over all batches.
        affine: whether there are a weight and a bias for each channel.
        track_running_stats: whether running statistics are kept; without them evaluation uses its own batch's.
        process_group: a torch.distributed group, or a samestep Communicator; None is the default group at the time of
            the call. A copy has the same; a pickle has none, and means the default group.
        device, dtype: of parameters and buffers.
        bias: whether an affine module has a bias.

    Raises ValueError for an input of less than 2 dimensions, or of other than `num_features` channels; on all ranks if
    they have one value per channel in all. Raises ReplicaError within DataParallel if there are several ranks: replicas
    in threads have no common order. Backward can't be differentiated again: RuntimeError. torch.compile leaves the
    exchange out of its graphs, or fails where it was told to make a single one.

    Source: T. F. Chan, G. H. Golub and R. J. LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances, COMPSTAT 1982, for joining the ranks' means and sums of squares.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | Communicator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if affine and not bias:
            self.register_parameter("bias", None)
        self.process_group: Any = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` ([N, C, ...]; N may be 0 in training on several ranks); shape, dtype and strides stay."""
        self._check_input_dim(input)
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")
        ranks = self._ranks() if self.training else None
        if ranks is None or ranks.size == 1:
            return super().forward(input)
        if input.size(1) != self.num_features:
            raise ValueError(
                f"rank {ranks.rank}: expected {self.num_features} channels, got an input of shape {list(input.shape)}"
            )
        if getattr(self, "_is_replica", False):
            raise ReplicaError(
                f"rank {ranks.rank}: SyncBatchNorm can't exchange from within a replica of DataParallel: replicas run "
                "in threads, in no order that ranks could share; use DistributedDataParallel, one process a device"
            )
        return self._together(input, ranks)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every BatchNorm layer within `module` by one of this class, and return it.

        A `module` that is such a layer itself is left alone, and its replacement returned. Parameters, buffers, hooks
        and other attributes are the replaced layer's own objects; one that is used in several places stays one. A layer
        of torch.nn.SyncBatchNorm or of this class keeps its process group where `process_group` is None.

        Raises TypeError, with nothing changed, for a layer that would lose something: a subclass or an object with a
        forward of its own, a parametrised or scripted one, or one that is not initialised yet.
        """
        for name, layer in module.named_modules(remove_duplicate=True):
            _require_plain(layer, name or "the module")
        return _replaced(module, cls, process_group, {})

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _ranks(self) -> Communicator | None:
        if self.process_group is None and not (dist.is_available() and dist.is_initialized()):
            return None
        return communicator_for(self.process_group)

    @outside_graphs
    def _together(self, input: Tensor, ranks: Communicator) -> Tensor:
        momentum = self._count()
        whole = _of_all(input, ranks)
        if whole is None:
            return functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        if self.track_running_stats:
            with torch.no_grad():
                _move(self.running_mean, whole.mean, momentum)
                _move(self.running_var, whole.squares / (whole.total - 1), momentum)
        return _Normalise.apply(input, self.weight, self.bias, whole, ranks, self.eps)  # type: ignore[no-any-return]

    def _count(self) -> float:
        """Count this batch, and return the weight of its statistics."""
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}

    def __copy__(self) -> SyncBatchNorm:
        other = type(self).__new__(type(self))
        other.__setstate__({**self.__dict__})
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.process_group = self.process_group
        return other


def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Replace every BatchNorm layer within `module` by a SyncBatchNorm; see that class's method of this name."""
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


class _Statistics(NamedTuple):
    """Of all ranks' values of each channel, in float64: their number, [C] means, and [C] squared deviations from it."""

    total: Tensor
    mean: Tensor
    squares: Tensor


class _Normalise(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, with statistics that depend on every rank's input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        whole: _Statistics,
        ranks: Communicator,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.whole, ctx.ranks, ctx.eps = whole, ranks, eps
        mean, variance, weight, bias = _in(_wide(input), whole.mean, whole.squares / whole.total, weight, bias)
        return functional.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Add up, over this rank's values, the gradients and their products with the normalised values; then over all.

        Of `gradient`, two parts are without effect on the output: its mean, and what is proportional to the values. The
        rest goes on to the input, scaled.
        """
        input, weight, bias = ctx.saved_tensors
        whole, dtype, channels = ctx.whole, _wide(input), input.size(1)
        deviation = (whole.squares / whole.total + ctx.eps).sqrt()
        mean, variance, scale = _in(dtype, whole.mean, whole.squares / whole.total, 1 / deviation)
        values, gradient = input.to(dtype), gradient.to(dtype)
        products = sums = mean.new_zeros(channels)
        if input.numel():
            _, products, sums = torch.ops.aten.native_batch_norm_backward(
                gradient, values, None, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        along = None
        if ctx.needs_input_grad[0]:
            joint = _sum(ctx.ranks.all_gather(torch.cat([sums, products]).double())) / whole.total
            factor = scale if weight is None else scale * weight.to(dtype)
            shift, slope = _in(dtype, joint[:channels], joint[channels:] / deviation)
            along = values - _spread(mean, input)
            along.mul_(_spread(-slope, input)).add_(gradient).sub_(_spread(shift, input)).mul_(_spread(factor, input))
            along = along.to(input.dtype)
        return (
            along,
            products.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            sums.to(bias.dtype) if ctx.needs_input_grad[2] else None,
            *(None, None, None),
        )


def _of_all(input: Tensor, ranks: Communicator) -> _Statistics | None:
    """Return the statistics over all ranks; None, on every rank, if they have no values at all."""
    count, channels = input.numel() // input.size(1), input.size(1)
    mine = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    if count:
        values = input.detach().to(_wide(input))
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        mine[0], mine[1 : 1 + channels], mine[1 + channels :] = count, mean, variance.double() * count
    everyone = ranks.all_gather(mine)
    counts, means, squares = everyone[:, :1], everyone[:, 1 : 1 + channels], everyone[:, 1 + channels :]
    total = _sum(counts)
    if count <= 1:  # otherwise there are more than one in all, and reading it would make the host wait for the device
        if total == 0:
            return None
        if total == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(input.shape)} on rank "
                f"{ranks.rank}, and one value in all on the {ranks.size} ranks of the group"
            )
    mean = _sum(counts * means) / total
    return _Statistics(total[0], mean, _sum(squares + counts * (means - mean).square()))


def _sum(rows: Tensor) -> Tensor:
    """Add the ranks' rows in rank order: however the host's vectors are made, all ranks get the same bits."""
    return reduce(torch.add, rows.unbind())


def _move(running: Tensor | None, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(running.double() * (1 - momentum) + new * momentum)


def _wide(input: Tensor) -> torch.dtype:
    """Return the dtype to compute in."""
    return torch.promote_types(input.dtype, torch.float32)


def _in(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _spread(channels: Tensor, input: Tensor) -> Tensor:
    """Shape [C] values so that they broadcast over [N, C, ...]."""
    return channels.view(1, -1, *[1] * (input.dim() - 2))


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def _require_plain(layer: nn.Module, name: str) -> None:
    lost = None
    if isinstance(layer, torch.jit.ScriptModule):
        lost = "is scripted: convert first" if "BatchNorm" in layer.original_name else None
    elif isinstance(layer, _BatchNorm):
        if isinstance(layer, LazyModuleMixin):
            lost = "is not initialised yet: run a forward pass first"
        elif is_parametrized(layer):
            lost = "is parametrised: convert first"
        elif type(layer).forward not in _FORWARDS or "forward" in vars(layer):
            lost = "has a forward of its own, which would be lost"
    if lost:
        raise TypeError(f"{name} ({type(layer).__name__}) can't be converted to SyncBatchNorm: it {lost}")


def _replaced(
    module: nn.Module, kind: type[SyncBatchNorm], group: Any, done: dict[int, tuple[nn.Module, nn.Module]]
) -> nn.Module:
    """Convert `module` and its children; `done` holds what was replaced, so that no other object gets its id."""
    if id(module) in done:
        return done[id(module)][1]
    result = _like(module, kind, group) if isinstance(module, _BatchNorm) else module
    done[id(module)] = module, result
    for name, child in list(module._modules.items()):
        if child is not None and (new := _replaced(child, kind, group, done)) is not child:
            result.add_module(name, new)
    return result


def _like(layer: _BatchNorm, kind: type[SyncBatchNorm], group: Any) -> SyncBatchNorm:
    own = {name: dict(vars(layer)[name]) for name in ("_parameters", "_buffers", "_modules")}
    new = kind.__new__(kind)
    new.__setstate__({**vars(layer), **own})
    new.process_group = getattr(layer, "process_group", None) if group is None else group
    return new

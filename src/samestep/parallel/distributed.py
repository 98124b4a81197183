"""DistributedDataParallel: a replica of a module on every rank, whose gradients are averaged while backward runs."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.comm.select import communicator_for
from samestep.errors import ReplicaError
from samestep.parallel.arguments import (
    Device,
    buffer_owners,
    buffers_follow,
    caps_in_bytes,
    check_delayed,
    check_devices,
    check_trainable,
    choose_group,
    describe_parameters,
    replicas_within,
)
from samestep.parallel.buffers import BufferHook
from samestep.parallel.compiled import Active
from samestep.parallel.inputs import tensors_in
from samestep.parallel.join import JoinableReplica
from samestep.parallel.methods import watched
from samestep.parallel.names import accept_both_forms
from samestep.parallel.placed import Placed
from samestep.parallel.precision import MixedPrecision, read_config
from samestep.parallel.reducer import Reducer
from samestep.parallel.replicas import require_same_layout, send_values
from samestep.parallel.statistics import Statistics
from samestep.parallel.surface import Surface

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(Surface, JoinableReplica):
    """Wrap `module` so that each rank trains a replica of it and all replicas take the same step.

    Takes the arguments of torch.nn.parallel.DistributedDataParallel by their names and does what that class does: at
    the start rank 0's parameters and buffers go to all ranks; after every `backward` each parameter's `grad` is the
    mean over the ranks of their gradients, exchanged while backward was running. Beyond that class:

    - Parameters that take no part on some rank or on all need no flag. A gradient that no rank has stays what it was.
    - `no_sync()` counts where `backward` is called, not where `forward` is.
    - `backward(loss, weight=n)` averages over samples, not over ranks: exact for uneven shares.
    - Rank 0's buffers go to all ranks at the end of each synchronised backward, so replicas are equal after every step,
      and evaluation exchanges nothing: ranks may have different numbers of batches there.
    - Attributes that the wrapper does not have are the module's.
    - `load_state_dict` takes names with and without "module.".

    Arguments:
        module: the model, on its device already. At least one parameter must require a gradient.
        device_ids: None, or one CUDA device, to which inputs are moved; the module's parameters are there.
        output_device, dim: accepted; outputs stay where the module puts them.
        forward_sync_buffers, broadcast_buffers: whether rank 0's buffers go to the others (default yes); the latter is
            the old name, and warned about, as in torch.
        init_sync: whether to compare the ranks' modules and send rank 0's values at the start.
        process_group: a torch.distributed group, or a samestep Communicator; None is the default group.
        bucket_cap_mb: size of a bucket in MiB; by default 1 for the first, 25 for the others.
        bucket_cap_mb_list: sizes of the first, second, ... bucket in MiB; the last serves all further ones.
        find_unused_parameters, static_graph, gradient_as_bucket_view, batched_grad_copy: accepted, and their promises
            hold anyway: unused parameters are found, and gradients are views of buckets.
        skip_all_reduce_unused_params: whether to leave out, from the second step on, what no rank used in the first.
        check_reduction: accepted with torch's warning that it does nothing.
        device_mesh: a one-dimensional mesh whose group is used.
        delay_all_reduce_named_params, param_to_hook_all_reduce: pairs of name and parameter, whose gradients travel
            last, and the parameter that torch's class waits for to send them.
        mixed_precision: a MixedPrecision, ours or torch's: dtypes of computation, exchange and buffers.

    Raises RuntimeError (torch's own) for a module without trainable parameters or with uninitialised ones, or without a
    process group; ValueError for arguments that contradict each other, or a module in torch's class already;
    MismatchError if the ranks' modules differ. After an exception in forward or backward the object is usable. If only
    some ranks left backward with one, the others' backward raises ReplicaError as soon as these go on to their next
    forward or backward.
    """

    _waits = False  # whether its parameters are another one's, too
    _active_ddp_module: Any = None  # for dynamo, where this class stands in the place of torch's

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | Communicator | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: MixedPrecision | Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        JoinableReplica.__init__(self)
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a torch.nn.Module to wrap, got {type(module).__name__}")
        if check_reduction:
            warnings.warn("check_reduction does nothing; leave it out", FutureWarning, stacklevel=2)
        self._group = choose_group(process_group, device_mesh, module)
        self.communicator, self.device_mesh = communicator_for(self._group), device_mesh
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = {n: p for n, p in module.named_parameters() if n not in self._ignored}
        check_trainable(parameters)
        self._delayed = check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, parameters)
        self._precision = None if mixed_precision is None else read_config(mixed_precision, module)
        self._input_device = check_devices(parameters.values(), device_ids, output_device)
        self._caps_bytes, self._caps_listed = caps_in_bytes(bucket_cap_mb, bucket_cap_mb_list), bool(bucket_cap_mb_list)
        self.module, self.device = module, next(iter(parameters.values())).device
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.batched_grad_copy = gradient_as_bucket_view, batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        follow, alike_at_start = buffers_follow(broadcast_buffers, forward_sync_buffers)
        self._buffer_hook = BufferHook(enabled=follow)
        if init_sync:
            values: dict[str, Tensor] = dict(parameters)
            if alike_at_start:
                values.update((n, b) for n, b in module.named_buffers() if n not in self._ignored)
            require_same_layout(self.communicator, values)
            send_values(self.communicator, values.values())
        within = replicas_within(module, DistributedDataParallel)
        self._make_reducer(parameters)
        for replica in (self, *within) if within else ():
            replica._waits = replica._reducer.waits = True
        if self._precision is not None:
            self._lower_precision(self._precision)
        self.register_load_state_dict_pre_hook(accept_both_forms)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module and return what it returns.

        Raises ReplicaError if the module was moved or cast after it was wrapped.
        """
        self._reducer.settle()
        if self._reducer.joining is not None and torch.is_grad_enabled():
            self._reducer.joining.before_forward()
        self._look_after_parameters()
        inputs, kwargs = self._before_forward(inputs, kwargs)
        output = self._active.call(self.module, inputs, kwargs)
        self._after_forward()
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                self._reducer.expect(tensor)
        return output

    def backward(
        self,
        loss: Tensor | None,
        *,
        weight: float | Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Run `loss.backward()` with this rank's part counted `weight` times.

        `loss` is a scalar, the mean over this rank's samples (or tokens); `weight` is their number, which may be a
        tensor of one element. Gradients become the sum over ranks of weight x gradient divided by the sum of weights,
        that is, the gradient of the mean over all samples. Within `no_sync()` weights add up until the next
        synchronised backward, so micro-batches may be uneven too. Every rank gives a weight, or none does; None is
        plain averaging. Only ratios of weights matter: with float16 gradients, which a factor could overflow, give
        fractions. A rank that has no samples calls `backward(None, weight=0)`; with weight 0 the loss is not looked at.

        Raises ValueError for a weight that is negative or not finite, TypeError for a loss that is no tensor,
        ReplicaError if the ranks disagree.
        """
        if loss is not None and not isinstance(loss, Tensor):
            raise TypeError(f"rank {self.communicator.rank}: expected a tensor as loss, got {type(loss).__name__}")
        if weight is None:
            if loss is None:
                raise ValueError(f"rank {self.communicator.rank}: a backward without a loss needs weight=0")
            loss.backward(retain_graph=retain_graph, create_graph=create_graph)
            return
        self._check_weights_are_right()
        count = _number(weight)
        if not (math.isfinite(count) and count >= 0):
            raise ValueError(f"rank {self.communicator.rank}: expected a weight of at least 0, got {weight}")
        if count > 0 and (loss is None or loss.numel() != 1):
            got = "no loss" if loss is None else f"a loss of shape {list(loss.shape)}"
            raise ValueError(f"rank {self.communicator.rank}: a weight of {count:g} needs a scalar loss, got {got}")
        self._reducer.settle()
        self._reducer.add_weight(count)
        if loss is None or count == 0:
            self._reducer.contribute_nothing()
        else:
            factor = torch.full_like(loss, count)
            loss.backward(factor, retain_graph=retain_graph, create_graph=create_graph)
            self._reducer.complete()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone in every backward that is called within the context.

        The first backward after it averages everything that was accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def skip_step(self) -> None:
        """Have all ranks skip this step, in place of this rank's backward: its loss is NaN, or it ran out of memory.

        The other ranks' backward returns as usual. Then, on all ranks, `step_skipped` is true and every parameter's
        `grad` is None, also what was accumulated before, so that optimizer.step() changes nothing. (GradScaler's step
        and update want gradients: leave them out.) Rank 0 warns of it, naming the ranks. Buffers are those of the first
        rank that did not skip.

        Call it instead of `backward`, or after a backward that raised. Within `no_sync()` it makes the next
        synchronised backward a skipped one. On a device, where nobody waits for an exchange, a step is skipped if every
        rank reads `step_skipped` before optimizer.step(): what is found out later is a ReplicaError in the next
        backward.

        Raises ReplicaError if called while backward is running, or if another rank left its backward with an exception
        without a word.
        """
        self._reducer.skip()

    @property
    def step_skipped(self) -> bool:
        """Whether the last synchronised backward was skipped; the same on all ranks."""
        return self._reducer.skipped()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward exchanges gradients; what `no_sync` sets."""
        return self._reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reducer.sync = value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", ()):
                raise
            return watched(getattr(self.module, name), self.module, lambda: self._reducer)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled. Raises torch's RuntimeError if the group is not the default one, which can't be."""
        if self._group is not None and self._group is not dist.group.WORLD:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor",
            )
        return self._settings()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled object over torch.distributed's default group, without its communication hook, as torch."""
        self._restore(state, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Copy module and settings; the copy exchanges over the same group and begins without gradients under way.

        As in torch, communication hooks don't come along.
        """
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other._restore(copy.deepcopy(self._settings(), memo), self._group)
        return other

    def _settings(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        fresh = (
            "_group",
            "communicator",
            "device_mesh",
            "_reducer",
            "_frozen",
            "_placed",
            "_statistics",
            "_join_config",
        )
        for name in fresh:
            del state[name]
        return state

    def _restore(self, state: dict[str, Any], process_group: Any) -> None:
        JoinableReplica.__init__(self)
        super().__setstate__(state)
        self._group, self.communicator, self.device_mesh = process_group, communicator_for(process_group), None
        self._lazy_init_ran = False
        if self._ignored:  # copies of parameters have lost their marks
            self._set_params_and_buffers_to_ignore_for_model(self.module, list(self._ignored))
        self._make_reducer({n: p for n, p in self.module.named_parameters() if n not in self._ignored})
        if self._precision is not None:
            self._reduce_in_lower_precision(self._precision)

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return cls._active_ddp_module

    def _make_reducer(self, parameters: Mapping[str, nn.Parameter]) -> None:
        trainable = {n: p for n, p in parameters.items() if p.requires_grad}
        self._active = Active(self._caps_bytes)
        self._frozen = [p for p in parameters.values() if not p.requires_grad]
        self._placed = Placed(self.module, trainable, self.communicator.rank)
        self._statistics = Statistics()
        self._reducer = Reducer(
            list(trainable.values()),
            describe_parameters(self.module, trainable),
            self.communicator,
            self._caps_bytes,
            also=self._buffer_sender(),
            late=[number for number, name in enumerate(trainable) if name in self._delayed],
            statistics=self._statistics,
        )
        self._reducer.skip_unused, self._reducer.waits = self.skip_all_reduce_unused_params, self._waits
        self._reducer.local = [p for n, p in self.module.named_parameters() if n in self._ignored]

    def _renew_reducer(self, parameters: Mapping[str, nn.Parameter]) -> None:
        before = self._reducer
        before.detach()
        self._make_reducer(parameters)
        self._reducer.sync, self._reducer.then, self._reducer.joining = before.sync, before.then, before.joining
        if before.comm_hook is not None:
            self._reducer.comm_hook = before.comm_hook

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on over another group, from the next step on; all its ranks call it, between steps. As torch's method.

        Gradients that accumulate stay this rank's.
        """
        self.communicator = communicator_for(new_process_group)
        self._group, self.device_mesh = new_process_group, None
        self._renew_reducer({n: p for n, p in self.module.named_parameters() if n not in self._ignored})

    def _buffer_sender(self) -> Callable[[int], None]:
        communicator = self.communicator
        owners, hook = buffer_owners(self.module, self._ignored), self._buffer_hook

        def send(source: int) -> None:
            if hook.registered:
                hook.finish()
            elif hook.enabled:
                send_values(communicator, [owner.get_buffer(name) for owner, name in owners], source)

        return send

    def _final_values(self) -> list[Tensor]:
        values: list[Tensor] = [p for n, p in self.module.named_parameters() if n not in self._ignored]
        if self._buffer_hook.enabled:
            values += [b for n, b in self.module.named_buffers() if n not in self._ignored]
        return values

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedDataParallel:
        super()._apply(fn, recurse)
        self._placed.require_same(dict(self.module.named_parameters()))
        self._look_after_parameters()
        return self

    def _look_after_parameters(self) -> None:
        self._placed.require_unmoved()
        if any(parameter.requires_grad for parameter in self._frozen):
            self._take_in_unfrozen()
        elif torch.is_grad_enabled():
            self._placed.require_none_replaced()

    def _take_in_unfrozen(self) -> None:
        if self._reducer.accumulating:
            raise ReplicaError(
                f"rank {self.communicator.rank}: parameters were unfrozen while gradients accumulate; do that between "
                "steps"
            )
        parameters = {n: p for n, p in self.module.named_parameters() if n not in self._ignored}
        require_same_layout(self.communicator, parameters)
        self._renew_reducer(parameters)


def _number(weight: float | Tensor) -> float:
    """Return `weight` as a float; NaN, which no weight may be, for what is no number."""
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        return math.nan

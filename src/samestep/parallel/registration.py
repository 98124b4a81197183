"""Registering what is called on the way: communication hooks, buffer hooks, optimizers in backward; by torch's names.

Errors that torch's class raises too are in torch's words, as scripts and tests look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType as Builtin

from samestep.comm.base import Communicator
from samestep.parallel import averaging, in_backward
from samestep.parallel.buffers import BufferHook, Location
from samestep.parallel.hooks import CommHook, Traits, check_hook, traits_of
from samestep.parallel.inputs import to_device, to_dtype
from samestep.parallel.precision import Casting, MixedPrecision, cast_buffers, reduce_in
from samestep.parallel.reducer import Reducer
from samestep.parallel.replicas import send_values
from samestep.parallel.statistics import Statistics

__all__ = ["Registration"]


class Registration(nn.Module):
    """The methods that register something, and what calls it around forward, for DistributedDataParallel to inherit."""

    communicator: Communicator
    module: nn.Module
    require_backward_grad_sync: bool
    require_forward_param_sync = True
    _reducer: Reducer
    _ignored: frozenset[str]
    _input_device: torch.device | None
    _buffer_hook: BufferHook
    _precision: MixedPrecision | None
    _statistics: Statistics
    _error: str | None = None
    _lazy_init_ran = False

    # Communication hooks

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, Any], Any], *, averages: bool | None = None
    ) -> None:
        """Average every bucket by `hook(state, bucket)` in place of the usual exchange; all ranks register alike.

        `bucket` has the methods of torch.distributed.GradBucket; torch's own hooks work unchanged. Its gradients are
        this rank's, undivided. The hook returns a torch.futures.Future of one tensor, of as many elements as the
        buffer, or anything else whose `wait` returns one; that is taken as the average.

        `averages` says whether it is the mean over all ranks, whatever scale gradients are in: only then can
        `backward(weight=...)` be right. None: what is known of torch's hooks and ours; of others it is refused.

        A hook that makes one exchange after the other (PowerSGD) has the next bucket wait for it, so that exchanges
        come in the same order on all ranks. An exception in the hook is raised by this rank's backward when that is
        over, and the other ranks' raise ReplicaError.

        Raises TypeError if `hook` can't be called with two arguments, ValueError for wrong annotations, RuntimeError if
        there is a hook already, ReplicaError during a backward.
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self._log_and_throw(type(error), str(error))
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        traits = traits_of(hook)
        whole = averages if averages is not None else traits.averages and self._is_everyone(state)
        self._set_hook(CommHook(state, hook, Traits(whole, traits.at_once), name), "register_comm_hook")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Average by one of torch's two built-in hooks: dist.BuiltinCommHookType.ALLREDUCE or FP16_COMPRESS."""
        ours = {
            Builtin.ALLREDUCE: averaging.allreduce_hook,
            Builtin.FP16_COMPRESS: averaging.fp16_compress_hook,
        }
        if comm_hook_type not in ours:
            raise TypeError(f"expected one of {[str(kind) for kind in ours]}, got {comm_hook_type!r}")
        hook = ours[comm_hook_type]
        made = CommHook(self.communicator, hook, traits_of(hook), str(comm_hook_type))
        self._set_hook(made, "register_builtin_comm_hook")

    def _set_hook(self, hook: CommHook, by: str) -> None:
        if self._reducer.comm_hook is not None:
            (other,) = {"register_comm_hook", "register_builtin_comm_hook"} - {by}
            self._log_and_throw(RuntimeError, f"{by} or {other} can only be called once.")
        self._reducer.comm_hook = hook

    def _is_everyone(self, state: object) -> bool:
        """Tell whether a hook that takes a group as its state averages over all ranks."""
        if isinstance(state, Communicator):
            return state.size == self.communicator.size
        if state is None:
            return dist.is_initialized() and dist.get_world_size() == self.communicator.size
        return isinstance(state, dist.ProcessGroup) and state.size() == self.communicator.size

    def _check_weights_are_right(self) -> None:
        """Raise ValueError if the communication hook's result can't be weighted."""
        hook = self._reducer.comm_hook
        if hook is not None and not hook.traits.averages:
            raise ValueError(
                f"rank {self.communicator.rank}: backward(weight=...) is exact only if the communication hook returns "
                f"the mean over all ranks, and of {hook.name} that is not known; register it with averages=True if it "
                "does, or call loss.backward()"
            )

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Step `optim_params` (default: all) with `optim(*args, **kwargs)` at the end of each synchronised backward.

        All replicas step or, if a rank failed, none does. Gradients stay. Raises ValueError for an optimizer of which
        torch has no functional form.
        """
        trainable = self._trainable()
        self._and_then(in_backward.fused(optim, trainable, optim_params, *args, **kwargs))

    def _setup_in_backward_optimizers(self) -> None:
        step = in_backward.take_over(self._trainable())
        if step is not None:
            self._and_then(step)

    def _and_then(self, step: Callable[[], None]) -> None:
        before = self._reducer.then

        def both() -> None:
            if before is not None:
                before()
            step()

        self._reducer.then = both

    def _lower_precision(self, config: MixedPrecision) -> None:
        cast_buffers(self.module, config.buffer_dtype, self._ignored)
        if config.param_dtype is not None:
            Casting(self.module, config.param_dtype)
        self._reduce_in_lower_precision(config)

    def _reduce_in_lower_precision(self, config: MixedPrecision) -> None:
        dtype = config.reduce_dtype or config.param_dtype
        if dtype is not None:
            self.register_comm_hook(self.communicator, reduce_in(dtype))

    # Buffers

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Location = Location.POST_FORWARD,
    ) -> None:
        """Keep buffers alike by `hook(state, {name: buffer})` in place of rank 0's values.

        It is called before or after each forward that follows a synchronised one. Futures that it returns, in a list,
        are waited for at the end of the next synchronised backward.
        """
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self._buffer_hook.register(state, hook, comm_hook_location)

    def _default_broadcast_coalesced(
        self, bufs: Iterable[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Send rank `authoritative_rank`'s values of `bufs` (None: the buffers) to all ranks, which call it alike."""
        send_values(self.communicator, self.modules_buffers if bufs is None else bufs, authoritative_rank)

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are kept alike, by rank 0's values or by a hook; may be set between steps."""
        return self._buffer_hook.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._buffer_hook.enabled = bool(value)

    broadcast_buffers = forward_sync_buffers

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are kept alike, by name."""
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in self._ignored}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are kept alike."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Tell whether a buffer hook would be called in the next forward; as torch's method."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    # Around forward

    def _before_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Do what comes before the module's forward; return its arguments, as it wants them."""
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            self._setup_in_backward_optimizers()
        if torch.is_grad_enabled() and self.require_backward_grad_sync and not torch.compiler.is_compiling():
            self._statistics.forward()
        self._run_buffer_hook(Location.PRE_FORWARD)
        if self._input_device is not None:
            inputs, kwargs = to_device((inputs, kwargs), self._input_device)
        config = self._precision
        if config is not None and config.param_dtype is not None and config.cast_forward_inputs:
            inputs, kwargs = to_dtype((inputs, kwargs), config.param_dtype)
        return inputs, kwargs

    def _after_forward(self) -> None:
        self._run_buffer_hook(Location.POST_FORWARD)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync

    def _run_buffer_hook(self, location: Location) -> None:
        if self._buffer_hook.registered and self.will_sync_module_buffers():
            with torch.no_grad():
                self._buffer_hook.run(location, self.named_module_buffers)

    def _trainable(self) -> list[nn.Parameter]:
        return [p for n, p in self.module.named_parameters() if p.requires_grad and n not in self._ignored]

    def _log_and_throw(self, kind: type[Exception], message: str) -> None:
        self._error = f"{kind}: {message}"
        raise kind(message)

"""What else torch's DistributedDataParallel offers, by torch's names: data on the work done, and what was private.

Errors that torch's class raises too are in torch's words, as scripts and tests look for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from samestep.errors import ReplicaError
from samestep.parallel.inputs import to_device
from samestep.parallel.precision import MixedPrecision
from samestep.parallel.registration import Registration
from samestep.parallel.statistics import LoggingData, group_data, parameter_data, plan_data

__all__ = ["DDPLogger", "ReducerView", "Surface"]


class Surface(Registration):
    """torch's further methods, for DistributedDataParallel to inherit."""

    _group: Any
    device: torch.device
    device_ids: Any
    output_device: Any
    dim: int
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    _delayed: frozenset[str]
    _caps_bytes: tuple[int, ...]
    _caps_listed: bool
    broadcast_bucket_size = 250 << 20  # what torch's own functions are given along with a module

    # Data on the work done

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return what torch's method of this name returns, as far as it is true here; times are in ns."""
        parameters, statistics = self._trainable(), self._statistics
        reducer = self._reducer
        data: dict[str, Any] = {
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(
                str(torch.device(d).index if not isinstance(d, int) else d) for d in self.device_ids or ()
            ),
            "output_device": self.output_device if isinstance(self.output_device, int) else -1,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "has_sync_bn": int(any("SyncBatchNorm" in type(m).__name__ for m in self.module.modules())),
            "iteration": statistics.iteration,
            "can_set_static_graph": int(statistics.static),
        }
        data |= group_data(self.process_group, self.communicator) | parameter_data(parameters, statistics.used)
        data |= plan_data(parameters, reducer.first_plan, reducer.plan, reducer.arrivals.order) | statistics.times()
        if reducer.comm_hook is not None:
            data["comm_hook"] = reducer.comm_hook.name
        if getattr(self, "_has_joined", False):
            data["join_uneven_inputs"] = 1
        if self._error is not None:
            data |= {"has_error": 1, "error": self._error}
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Time one in `sample_rate` iterations, after the first ten."""
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        self._statistics.sample_rate = sample_rate

    @property
    def logger(self) -> DDPLogger:
        """An object with torch's `_get_ddp_logging_data` and `set_error_and_log`."""
        return DDPLogger(self)

    # Settings

    @property
    def process_group(self) -> Any:
        """The group that was given, else torch.distributed's default group, which this object does not keep alive."""
        return self._group if self._group is not None else self.communicator.group  # type: ignore[attr-defined]

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest cap of a bucket, in bytes."""
        return max(self._caps_bytes)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The caps of `bucket_cap_mb_list`, in bytes; empty if it was not given."""
        return list(self._caps_bytes) if self._caps_listed else []

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of the parameters and buffers that are left alone, or exchanged last."""
        return set(self._ignored | self._delayed)

    @property
    def mixed_precision(self) -> MixedPrecision | None:
        return self._precision

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        return len({p.device for p in self.module.parameters()}) > 1

    def _set_static_graph(self) -> None:
        """Say that the graph is static; nothing depends on it here. Warns and raises as torch's method does."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
        elif self._reducer.plan is not self._reducer.first_plan:
            self._log_and_throw(
                RuntimeError,
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed",
            )
        self.static_graph = True

    def _set_ddp_sink_clone(self, value: bool) -> None:
        """Accepted: outputs are never cloned here."""

    # What was private, and is used

    @property
    def reducer(self) -> ReducerView:
        """What of torch's Reducer there can be: see ReducerView."""
        return ReducerView(self)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets are those that stay: after the first synchronised backward."""
        return self._reducer.plan is not self._reducer.first_plan

    @property
    def _distributed_rank(self) -> int:
        return self.communicator.rank

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Tell torch.compile, which asks the class that stands in torch's place, that it need not split its graphs."""

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters of `module` that are not ignored, with their names if wanted."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        """Leave parameters and buffers of these names alone when `module` is wrapped; as torch's method."""
        module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]
        for tensors in (module.named_parameters(), module.named_buffers()):
            for name, tensor in tensors:
                if name in names:
                    tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters whose gradients are exchanged, and for which of them these are sparse."""
        sparse = {
            id(m.weight) for m in self.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        }
        parameters = self._trainable()
        return parameters, [id(p) in sparse for p in parameters]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        """Return the names of `parameters` by their number. Raises ValueError if they are not the trainable ones."""
        numbers = {id(p): number for number, p in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and name not in self._ignored:
                if id(parameter) not in numbers:
                    self._log_and_throw(
                        ValueError, f"Param with name {name} found in module parameters, but not DDP parameters."
                    )
                names[numbers[id(parameter)]] = name
        if len(names) != len(numbers):
            self._log_and_throw(
                ValueError,
                "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(numbers)} vs {len(names)}",
            )
        return names

    def _remove_autograd_hooks(self) -> None:
        """Exchange nothing any more: take the hooks off the parameters."""
        self._reducer.detach()

    def _check_reducer_finalized(self) -> None:
        """Raise ReplicaError if the last backward on this rank ended with an exception that is not made good for."""
        if self._reducer.is_open:
            raise ReplicaError(
                f"rank {self.communicator.rank}: Expected to have finished reduction in the prior iteration before "
                "starting a new one, but its backward ended with an exception; call forward or backward again"
            )

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """Refused: which rows of a sparse gradient there are is found out in each exchange."""
        raise NotImplementedError(
            "samestep's DistributedDataParallel needs no metadata of sparse gradients; leave _set_sparse_metadata out"
        )

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split arguments over devices; torch's function, kept for old scripts."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> tuple[Any, Any]:
        """Return arguments on a device, in lists of one; kept for old scripts."""
        moved = to_device((inputs, kwargs), torch.device(self.device_type, device_id))
        return [moved[0]], [moved[1]]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Bring outputs of several devices together; torch's function, kept for old scripts."""
        return gather(outputs, output_device, dim=self.dim)


class ReducerView:
    """Of torch's Reducer, the methods that mean something here; any other is an AttributeError that says so."""

    def __init__(self, wrapper: Surface) -> None:
        self._wrapper = wrapper
        self._remove_autograd_hooks = wrapper._remove_autograd_hooks
        self._check_reducer_finalized = wrapper._check_reducer_finalized
        self._set_ddp_runtime_logging_sample_rate = wrapper._set_ddp_runtime_logging_sample_rate

    def _get_local_used_map(self) -> Tensor:
        """Return, for each parameter, on how many ranks it took part in the last synchronised backward: int32."""
        return self._wrapper._reducer.used_counts()

    def _ddp_graph_static(self) -> bool:
        """Tell whether this rank used the same parameters in all synchronised backwards so far."""
        return self._wrapper._statistics.static

    def _rebuild_buckets(self) -> bool:
        """Tell whether buckets were made anew by this call: never, as that happens in the first backward."""
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"samestep's DistributedDataParallel has no C++ reducer, and nothing in the place of its {name}"
        )


class DDPLogger:
    """torch's Logger, as far as it is asked for something."""

    def __init__(self, wrapper: Surface) -> None:
        self._wrapper = wrapper

    def _get_ddp_logging_data(self) -> LoggingData:
        return LoggingData(self._wrapper._get_ddp_logging_data())

    def set_error_and_log(self, error: str) -> None:
        self._wrapper._error = error

"""What a wrapper knows of its own work, by the names of torch's `_get_ddp_logging_data`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.comm.base import Communicator
from samestep.parallel.plan import Plan
from samestep.world import environment

__all__ = ["LoggingData", "Statistics", "group_data", "parameter_data", "plan_data"]

_ALWAYS = 10  # the first iterations, which are all timed
_EVERY = 100  # of later ones, one in so many is; torch's numbers

# C++'s names, as torch's data has them.
_DTYPES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


class Statistics:
    """Times of sampled iterations, in ns of `clock`, and which parameters this rank used.

    An iteration begins with a forward whose backward is to be synchronised. Of iteration n the times are there once the
    one after it has begun, as in torch's Logger.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.sample_rate = _EVERY
        self.iteration = 0
        self.static = True
        self.used = b""
        self._clock, self._begun, self._sampling = clock, 0, False
        self._times: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._count = 0
        self._published: dict[str, int] = {}

    def forward(self) -> None:
        """Begin an iteration."""
        if self._sampling:
            self._publish()
        self._begun += 1
        self._sampling = self._begun <= _ALWAYS or self._begun % self.sample_rate == 0
        if self._sampling:
            self._times = {"forward": self._clock()}

    def begin(self, what: str) -> None:
        """Note the first time in the iteration that `what` ("backward", "exchange") begins."""
        if self._sampling and what not in self._times:
            self._times[what] = self._clock()

    def end(self, what: str) -> None:
        """Note the last time in the iteration that `what` ("backward", "exchange") ends."""
        if self._sampling:
            self._times[f"{what} ended"] = self._clock()

    def saw(self, used: bytes) -> None:
        """Note which parameters this rank used in a synchronised backward: one byte each."""
        if used != self.used:
            self.static = self.static and not self.used
            self.used = used

    def times(self) -> dict[str, int]:
        """Return the last published times and the averages, by torch's names; nothing before there are any."""
        return dict(self._published)

    def _publish(self) -> None:
        self.iteration = self._begun
        try:
            forward, backward, sent = (self._times[name] for name in ("forward", "backward", "exchange"))
            computed, done = self._times["backward ended"], self._times["exchange ended"]
        except KeyError:  # that iteration had no synchronised backward
            return
        spans = {
            "forward_compute_time": backward - forward,
            "backward_compute_time": computed - backward,
            "backward_comm_time": done - sent,
            "backward_compute_comm_overlap_time": max(0, computed - sent),
        }
        self._count += 1
        for name, span in spans.items():
            self._sums[name] = self._sums.get(name, 0) + span
        self._published = {
            **spans,
            **{f"avg_{name}": total // self._count for name, total in self._sums.items()},
            "forward_compute_time_start": forward,
            "backward_compute_time_start": backward,
            "backward_compute_time_end": computed,
            "backward_comm_time_start": sent,
            "backward_comm_time_end": done,
        }


class LoggingData:
    """torch's form of the data: words and numbers apart."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.strs_map = {name: value for name, value in data.items() if isinstance(value, str)}
        self.ints_map = {name: value for name, value in data.items() if isinstance(value, int)}


def parameter_data(parameters: Sequence[nn.Parameter], used: bytes) -> dict[str, str | int]:
    """Return the entries on `parameters`, of which this rank has last used those with a byte other than 0 in `used`."""
    sizes = [p.numel() * p.element_size() for p in parameters]
    unused = sum(size for size, flag in zip(sizes, used, strict=False) if not flag)
    names = {_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters}
    return {
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(sizes),
        "dtypes": ", ".join(sorted(names)),
        "unused_parameter_size": unused,
    }


def plan_data(parameters: Sequence[nn.Parameter], first: Plan, now: Plan, arrived: Sequence[int]) -> dict[str, Any]:
    """Return the entries on buckets, from the `first` plan and that of `now`; and the last order of arrival."""
    data: dict[str, Any] = {
        "bucket_sizes": _sizes(parameters, first),
        "num_buckets_reduced": len(now.buckets),
        "has_rebuilt_buckets": int(now is not first),
    }
    if now is not first:
        data["rebuilt_bucket_sizes"] = _sizes(parameters, now)
        data["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, b.indices)) for b in now.buckets)
    if arrived:
        data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, dict.fromkeys(arrived)))
    return data


def group_data(group: object, communicator: Communicator) -> dict[str, Any]:
    """Return the entries on the group and what the environment says of it."""
    backend = dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else type(communicator).__name__
    variables = environment()
    names = ["MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"]
    data: dict[str, Any] = {"world_size": communicator.size, "rank": communicator.rank, "backend_name": backend}
    if backend == "gloo":
        names += ["GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"]
        data.update(_gloo_threads(group))
    return data | {name.lower(): variables.get(name, "N/A") for name in names}


def _gloo_threads(group: Any) -> dict[str, int]:
    threads = getattr(getattr(group._get_backend(torch.device("cpu")), "options", None), "_threads", None)
    return {} if threads is None else {"gloo_num_threads": threads}


def _sizes(parameters: Sequence[nn.Parameter], plan: Plan) -> str:
    sizes = (sum(parameters[i].numel() * parameters[i].element_size() for i in b.indices) for b in plan.buckets)
    return ", ".join(map(str, sizes))

"""Ranks with fewer batches than others: those that have none left take part in the exchanges of those that have.

The protocol is that of torch.distributed.algorithms.join: who still trains says so in one small sum before each of its
exchanges; who has joined takes part in that sum with a zero, and shadows the exchange that follows, until the sum is
zero. Here it is said with the first bucket of a synchronised backward, not in forward: so no_sync() counts where
backward is called, and evaluation says nothing.
"""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from samestep.comm.base import Communicator
from samestep.comm.ops import AllReduce, Reduction
from samestep.parallel.replicas import send_values

if TYPE_CHECKING:
    from samestep.parallel.reducer import Reducer

__all__ = ["JoinableReplica", "Joining", "Waits"]

_MANY = 1000  # batches that one rank has more than another before that is warned about, as in torch


class Waits(Protocol):
    """Work of ours or of torch's."""

    def wait(self) -> Any: ...


class Joining:
    """How a replica takes part in a join context, from its beginning to its end.

    `by_initial_size` says whether gradients are divided by the number of all ranks, or of those that still train.
    `own` is whether the context is `JoinableReplica.join`'s, whose sums go over the replica's communicator; those of
    torch's `Join` go over the process group.
    """

    def __init__(self, replica: JoinableReplica, *, by_initial_size: bool, own: bool) -> None:
        self._replica = weakref.ref(replica)
        self._by_initial_size, self._own = by_initial_size, own

    @property
    def by_initial_size(self) -> bool:
        return self._by_initial_size or not self._config.enable

    def say(self, communicator: Communicator) -> list[Waits]:
        """Say that this rank still trains; return what has to be waited for before the backward is over."""
        if not self._config.enable or self._config.throw_on_early_termination:
            return []
        if not self._own:
            work = Join.notify_join_context(self._joined)
            return [] if work is None else [work]
        return [communicator.start(AllReduce(torch.ones(1, device=communicator.device)))]

    def before_forward(self) -> None:
        """Raise RuntimeError if some rank has no batch left and the context is to end on all ranks then."""
        if not (self._config.enable and self._config.throw_on_early_termination):
            return
        if not self._own:
            Join.notify_join_context(self._joined)
            return
        communicator = self._joined.communicator
        _sum(communicator, 1)
        if _sum(communicator, 0):
            raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")

    @property
    def _joined(self) -> JoinableReplica:
        replica = self._replica()
        assert replica is not None, "who asks is a part of it"
        return replica

    @property
    def _config(self) -> _JoinConfig:
        config: _JoinConfig = self._joined._join_config
        return config


class JoinableReplica(Joinable):
    """What DistributedDataParallel has of torch's `Joinable`; the attributes are that class's."""

    communicator: Communicator
    device: torch.device
    process_group: Any
    _reducer: Reducer
    _has_joined = False  # a join context was ever made

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Train within this context with different numbers of batches on the ranks; as torch's method of this name.

        A rank that leaves the context waits there for the others, and takes part in their exchanges with zeros, or with
        gradients that it has accumulated in `no_sync()` and that no exchange has seen yet. When all have left it, every
        rank gets parameters and buffers of the highest rank among those that trained longest.

        `divide_by_initial_world_size`: whether gradients are divided by the number of all ranks, so that every batch
        counts alike, or by the number of ranks that still train. With `backward(loss, weight=n)`, by the sum of weights
        in any case. `enable=False` does nothing. `throw_on_early_termination`: raise RuntimeError on all ranks as soon
        as one has left and the others call forward; needed if the model itself exchanges something in forward.

        An optimizer's own state (momentum and the like) is not brought up to date on ranks that left early, as in
        torch: they made no steps. To go on training with one afterwards, give all ranks as many steps instead, with
        `backward(None, weight=0)` where there are no samples.
        """
        return _OwnJoin(
            self, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what torch's `Join` calls, in a context with others, of which this one comes first.

        `divide_by_initial_world_size` among `kwargs` is `join`'s. Each of them exchanges once per batch, in the order
        of the list.
        """
        return _Hook(self, own=False, **kwargs)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The torch.distributed group whose ranks join; TypeError if a Communicator without one was given."""
        group = self.process_group
        if isinstance(group, Communicator):
            group = getattr(group, "group", None)
            if group is None:
                raise TypeError(
                    f"rank {self.communicator.rank}: torch's Join needs a torch.distributed process group, got "
                    f"{type(self.process_group).__name__}; join this model alone, with its join()"
                )
        return dist.group.WORLD if group is None else group

    @abstractmethod
    def _final_values(self) -> list[Tensor]:
        """Return what all ranks have alike after a join."""

    def _end_join(self) -> None:
        self._reducer.joining = None
        self._join_config = _JoinConfig.construct_disabled_join_config()


class _Hook(JoinHook):
    def __init__(
        self, replica: JoinableReplica, *, own: bool, divide_by_initial_world_size: bool = True, **_: Any
    ) -> None:
        self._replica = replica
        replica._has_joined = True
        replica._reducer.joining = Joining(replica, by_initial_size=divide_by_initial_world_size, own=own)

    def main_hook(self) -> None:
        self._replica._reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        replica, communicator = self._replica, self._replica.communicator
        mine = torch.tensor(communicator.rank if is_last_joiner else -1, device=communicator.device)
        replica._authoritative_rank = int(communicator.all_reduce(mine, Reduction.MAX))  # type: ignore[attr-defined]
        send_values(communicator, replica._final_values(), replica._authoritative_rank)  # type: ignore[attr-defined]
        if (
            not is_last_joiner
        ):  # the gradients are those of others' steps: as after zero_grad(), wherever that is called
            replica._reducer.drop()
        replica._end_join()


class _OwnJoin(AbstractContextManager[None]):
    """The context of one replica, over its communicator. It is over when it is left, also with an exception."""

    def __init__(self, replica: JoinableReplica, enable: bool, throw: bool, **options: Any) -> None:
        self._replica, self._enable, self._throw, self._options = replica, enable, throw, options

    def __enter__(self) -> None:
        if self._enable:
            self._hook = _Hook(self._replica, own=True, **self._options)
        self._replica._join_config = _JoinConfig(self._enable, self._throw, is_first_joinable=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._enable:
            return
        try:
            if kind is None:
                self._replica._reducer.settle()
                self._shadow()
        finally:
            self._replica._end_join()

    def _shadow(self) -> None:
        communicator, shadowed = self._replica.communicator, 0
        while _sum(communicator, 0):
            if self._throw:
                _sum(communicator, 1)
                raise RuntimeError(f"Rank {communicator.rank} exhausted all inputs.")
            self._hook.main_hook()
            shadowed += 1
            if shadowed == _MANY:
                warnings.warn(
                    f"rank {communicator.rank} has at least {_MANY} fewer inputs than ranks that still train; the time "
                    "that it waits for them could be saved",
                    stacklevel=3,
                )
        self._hook.post_hook(is_last_joiner=shadowed == 0)


def _sum(communicator: Communicator, number: float) -> float:
    return communicator.all_reduce(torch.full((1,), float(number), device=communicator.device)).item()

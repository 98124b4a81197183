"""Communication hooks: somebody else's way of averaging a bucket, in the form that torch's `register_comm_hook` takes.

torch's own hooks work unchanged: they ask a bucket for `index`, `buffer`, `gradients`, `parameters`, `is_last` and
`set_buffer`, and return a future of the averaged buffer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as _TorchsBucket

from samestep.comm.base import Communicator
from samestep.parallel.bucket import Bucket
from samestep.parallel.reduction import Exchange

__all__ = ["CommHook", "GradBucket", "HookedBucket", "Promise", "Traits", "check_hook", "hooked", "traits_of"]


class Promise(Protocol):
    """What a hook returns: torch.futures.Future is one, and so is anything whose `wait` returns the averaged tensor."""

    def wait(self) -> Any: ...


class GradBucket:
    """A bucket as a hook sees it: the methods of torch.distributed.GradBucket, which can't be made from Python."""

    def __init__(self, index: int, count: int, bucket: Bucket) -> None:
        self._index, self._count, self._bucket = index, count, bucket
        self._buffer = bucket.offer()

    def index(self) -> int:
        """Return the bucket's number in the order of exchanges, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the backward."""
        return self._index == self._count - 1

    def buffer(self) -> Tensor:
        """Return the gradients, not divided by anything, as one flat tensor (a sparse one for a sparse gradient)."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer` (as many elements, any dtype) take the place of the buffer, for this bucket object."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, one a parameter, with the parameter's shape."""
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._bucket.members)


@dataclass(frozen=True)
class Traits:
    """What is known of a hook.

    averages: what it returns is the mean over all ranks (but for rounding), in whatever scale gradients come.
    at_once: it starts all its exchanges before it returns, so other exchanges of the same group may follow.
    """

    averages: bool = False
    at_once: bool = False


class CommHook:
    """A registered hook with its state, and the first error that it made in the backward at hand."""

    def __init__(self, state: object, call: Callable[[Any, Any], Any], traits: Traits, name: str) -> None:
        self.state, self.traits, self.name = state, traits, name
        self.error: Exception | None = None
        self._call = call

    def __call__(self, bucket: GradBucket) -> Promise:
        """Call the hook. Raises RuntimeError if what it returns is nothing that can be waited for."""
        promise = self._call(self.state, bucket)
        if not callable(getattr(promise, "wait", None)):
            raise RuntimeError(
                f"DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(promise).__name__} from {self.name}"
            )
        return promise  # type: ignore[no-any-return]

    def note(self, error: Exception) -> None:
        self.error = self.error or error

    def raise_error(self) -> None:
        """Raise the error that was noted, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class HookedBucket:
    """A bucket whose gradients a hook averages.

    An exception in the hook is noted, and this rank's failure told to the others at the end of backward. Until then it
    keeps step with them as well as can be done from outside: a hook that failed where it was called is taken not to
    have begun its exchange, and is called once more, with zeros, for the sake of the ranks that wait in it. If that
    fails too, nothing can be done for them, and the exception leaves backward at once.
    """

    def __init__(self, bucket: Bucket, place: tuple[int, int], hook: CommHook, before: HookedBucket | None) -> None:
        self._bucket, self._hook, self._before = bucket, hook, before
        self._index, self._count = place
        self._promise: Promise | None = None
        self._used = bytearray()
        self._given_up = False  # the step has failed on this rank already

    def pack(self, scale: float | None, used: bytearray) -> None:
        self._used, self._given_up = used, False
        self._bucket.pack(scale, used)

    def clear(self, used: bytearray) -> None:
        self._used, self._given_up = used, True
        self._bucket.clear(used)

    def drop(self) -> None:
        self._bucket.drop()

    def start(self, communicator: Communicator, exchange: Exchange) -> None:
        if self._before is not None and not self._hook.traits.at_once:
            self._before.wait()  # its later exchanges must not get between this one's, on some ranks only
        try:
            self._promise = self._ask()
        except Exception as error:  # noqa: BLE001 - raised at the end of backward
            if not self._given_up:
                self._once_more(error)
            self._hook.note(error)

    def _once_more(self, error: Exception) -> None:
        self._bucket.clear(self._used)
        try:
            self._promise = self._ask()
        except Exception:  # noqa: BLE001 - the first one tells more
            raise error from None

    def wait(self) -> None:
        promise, self._promise = self._promise, None
        if promise is None:
            return
        try:
            result = promise.wait()
            if isinstance(result, list | tuple) and len(result) == 1:
                (result,) = result
            if not isinstance(result, Tensor):
                raise TypeError(f"{self._hook.name}: expected a tensor in the future, got {type(result).__name__}")
            self._bucket.take(result)
        except Exception as error:  # noqa: BLE001 - raised at the end of backward
            self._hook.note(error)

    def unpack(self, divisor: Any, unused: Any, earlier: Any) -> None:
        self._bucket.unpack(divisor, unused, earlier)

    def _ask(self) -> Promise:
        with torch.no_grad():
            return self._hook(GradBucket(self._index, self._count, self._bucket))


def hooked(buckets: Sequence[Bucket], hook: CommHook) -> list[HookedBucket]:
    """Return `buckets`, in their order, with `hook` to average them."""
    made: list[HookedBucket] = []
    for number, bucket in enumerate(buckets):
        made.append(HookedBucket(bucket, (number, len(buckets)), hook, made[-1] if made else None))
    return made


def check_hook(hook: object) -> None:
    """Raise what torch raises, in its words, for a hook that can't be one.

    TypeError if it can't be called, or not with two arguments; ValueError for annotations that promise something else.
    Annotations may be strings, as `from __future__ import annotations` makes them; those that name nothing pass.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    if isinstance(getattr(hook, "traits", None), Traits):
        return  # one of ours
    signature = _signature(hook)
    if signature is None:  # some callables in C have none
        return
    try:
        bound = list(signature.bind(None, None).arguments)
    except TypeError as error:
        raise TypeError(f"Communication hook must be callable as hook(state, bucket): {error}") from None
    bucket = signature.parameters.get("bucket", signature.parameters[bound[-1]])
    if not _says(bucket.annotation, (_TorchsBucket, GradBucket)):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not _says(signature.return_annotation, (torch.futures.Future[Tensor], Promise)):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def _signature(hook: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(hook, eval_str=True)
    except Exception:  # noqa: BLE001 - names that can't be looked up here can raise anything
        try:
            return inspect.signature(hook)
        except (TypeError, ValueError):
            return None


def _says(annotation: Any, allowed: Sequence[Any]) -> bool:
    return annotation in (inspect.Parameter.empty, Any, *allowed) or isinstance(annotation, str)


_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks."
_PLAIN, _IN_TURNS = Traits(averages=True, at_once=True), Traits(averages=True)
_KNOWN = {
    f"{_TORCHS}default_hooks.allreduce_hook": _PLAIN,
    f"{_TORCHS}default_hooks.fp16_compress_hook": _PLAIN,
    f"{_TORCHS}default_hooks.bf16_compress_hook": _PLAIN,
    f"{_TORCHS}quantization_hooks.quantization_pertensor_hook": _IN_TURNS,
    f"{_TORCHS}quantization_hooks.quantization_perchannel_hook": _IN_TURNS,
}
_WRAPPERS = frozenset(
    f"{_TORCHS}default_hooks.{kind}_compress_wrapper.<locals>.{kind}_compress_wrapper_hook" for kind in ("fp16", "bf16")
)


def traits_of(hook: Any) -> Traits:
    """Return what is known of `hook`; of a stranger, nothing."""
    if isinstance(hook, functools.partial):
        return traits_of(hook.func)
    if isinstance(traits := getattr(hook, "traits", None), Traits):
        return traits
    name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"
    if name in _WRAPPERS:
        return traits_of(inspect.getclosurevars(hook).nonlocals["hook"])
    return _KNOWN.get(name, Traits())

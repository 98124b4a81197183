"""Buffers that a hook keeps alike, in place of rank 0's values: torch's `_register_buffer_comm_hook`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

__all__ = ["BufferHook", "Location"]


class BufferHook:
    """Holds the hook, if there is one, and the futures that it returned.

    `enabled` says whether buffers are kept alike at all.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._hook: Callable[[Any, Mapping[str, Tensor]], Any] | None = None
        self._state: Any = None
        self._location = Location.POST_FORWARD
        self._futures: list[Any] = []

    @property
    def registered(self) -> bool:
        return self._hook is not None

    def register(self, state: Any, hook: Callable[..., Any], location: Location) -> None:
        self._hook, self._state, self._location = hook, state, location

    def run(self, location: Location, buffers: Mapping[str, Tensor]) -> None:
        """Call the hook with `buffers` by name, if this is its place; keep the futures that it returns."""
        if self._hook is not None and location == self._location and buffers:
            self.finish()
            self._futures = list(self._hook(self._state, buffers) or ())

    def finish(self) -> None:
        """Wait for what the hook has under way."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

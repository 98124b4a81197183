"""Names in checkpoints: with "module." before them, as a wrapper gives, or without."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["accept_both_forms"]

_WRAPPED = "module."


def accept_both_forms(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename `state_dict`'s entries so that `wrapper`, which holds its model as `module`, can load them.

    A load_state_dict pre-hook. What decides is which form names more of the model's own entries: a model may well have
    a part that is called "module" itself.
    """
    own = set(wrapper.module.state_dict())  # type: ignore[union-attr]
    given = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    bare = sum(key in own for key in given)
    wrapped = sum(key.startswith(_WRAPPED) and key.removeprefix(_WRAPPED) in own for key in given)
    if bare > wrapped:
        for key in given:
            state_dict[prefix + _WRAPPED + key] = state_dict.pop(prefix + key)

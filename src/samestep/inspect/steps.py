"""What a checked program does between its batches, noted: backwards, clips, steps. And what would make runs unlike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.inspect.recorder import Recorder

__all__ = ["silence_dropout", "watch_steps"]

_HALVES = (torch.float16, torch.bfloat16)
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def watch_steps(recorder: Recorder) -> None:
    """Have the recorder told of backwards, gradient clips and optimizer steps, for the rest of this process."""
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def noted_backward(*args: Any, **options: Any) -> None:
        recorder.backward()
        backward(*args, **options)

    torch.autograd.backward = noted_backward
    train = nn.Module.train

    @functools.wraps(train)
    def noted_train(module: nn.Module, mode: bool = True) -> nn.Module:
        recorder.mode_set(mode)
        return train(module, mode)

    nn.Module.train = noted_train  # type: ignore[method-assign, assignment]
    for name in _CLIPS:
        noted = _noted_clip(getattr(clip_grad, name), recorder)
        setattr(clip_grad, name, noted)
        setattr(torch.nn.utils, name, noted)
    enter = torch.amp.autocast_mode.autocast.__enter__

    def noted_enter(self: Any) -> Any:
        if self._enabled and self.fast_dtype in _HALVES:
            recorder.seen.halves = True
        return enter(self)

    torch.amp.autocast_mode.autocast.__enter__ = noted_enter  # type: ignore[method-assign]


def silence_dropout() -> None:
    """Have torch's dropout functions, and so its layers, drop nothing for the rest of this process.

    What is dropped depends on how a batch is cut, so gradients of one rank and of several could not be compared.
    """
    for name in _DROPOUTS:
        setattr(functional, name, _kept)
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def attend(*given: Any, **named: Any) -> Tensor:
        """Takes query, key, value, attn_mask, dropout_p and more, by place or name."""
        named.pop("dropout_p", None)
        return attention(*given[:4], *((0.0, *given[5:]) if len(given) > 4 else ()), **named)

    functional.scaled_dot_product_attention = attend


def _kept(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _noted_clip(clip: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(clip)
    def noted(parameters: Any, *args: Any, **options: Any) -> Any:
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        recorder.clipped(several)
        return clip(several, *args, **options)

    return noted

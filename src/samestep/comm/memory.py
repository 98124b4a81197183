"""From a caller's tensor to what a transport can take, dense and in row-major order, and back."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["contiguous", "give_back", "writable"]


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor's data in row-major order; what is not dense stays as it is, for `check` to refuse."""
    if tensor.layout != torch.strided or _is_ready(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: Tensor, rank: int) -> Tensor:
    """Return the data in row-major order of a tensor that is to take a result."""
    if _is_ready(tensor):
        return tensor
    if tensor.layout == torch.strided and any(
        n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            f"rank {rank}: expected a tensor to write to, got an expanded one, whose elements share memory (shape "
            f"{list(tensor.shape)}, strides {tensor.stride()}); clone() it first"
        )
    return contiguous(tensor)


def give_back(dense: Tensor, tensor: Tensor) -> Tensor:
    """Bring a result back to where the caller wants it: nothing to do when both share memory."""
    if dense is not tensor and dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)
    return tensor


def _is_ready(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())

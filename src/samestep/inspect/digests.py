"""Short marks of tensors and of samples, by which ranks can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["digest", "sample_digest"]


def digest(tensor: Tensor | None) -> str:
    """Return a mark of the tensor's dtype, shape and bits; empty for None."""
    return "" if tensor is None else _hash(_parts_of_tensor(tensor))


def sample_digest(sample: Any) -> str:
    """Return a mark of a data set's sample: tensors, arrays, images, numbers, text, and what holds them.

    Empty if there is anything else in it.
    """
    parts = _parts(sample)
    return "" if parts is None else _hash(parts)


def _hash(parts: list[bytes]) -> str:
    made = hashlib.blake2b(digest_size=12)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def _parts_of_tensor(tensor: Tensor) -> list[bytes]:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return [f"{tensor.dtype}{list(tensor.shape)}".encode(), flat.numpy().tobytes()]


def _parts(sample: Any) -> list[bytes] | None:
    match sample:
        case Tensor():
            return _parts_of_tensor(sample)
        case numpy.ndarray() | numpy.generic():
            return None if sample.dtype.hasobject else [f"{sample.dtype}{sample.shape}".encode(), sample.tobytes()]
        case None | bool() | int() | float() | complex() | str() | bytes():
            return [repr(sample).encode()]
        case Mapping():
            return _all([*sample.keys(), *sample.values()])
        case list() | tuple():
            return _all(list(sample))
    as_bytes = getattr(sample, "tobytes", None)  # an image
    return [as_bytes()] if callable(as_bytes) else None


def _all(items: list[Any]) -> list[bytes] | None:
    found = [str(len(items)).encode()]
    for item in items:
        parts = _parts(item)
        if parts is None:
            return None
        found += parts
    return found

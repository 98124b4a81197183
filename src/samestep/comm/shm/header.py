"""What a rank says about the exchange it has come to: as bytes, so that one comparison tells if all say the same."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from samestep.comm.ops import AllToAll, Barrier, Op, signature

__all__ = ["Header", "Place", "decode", "encode", "place_in", "same"]

_MOST_BYTES = 1200  # of text
_MOST_KEPT = 1024  # texts
_FIXED = struct.Struct("<IIQ")  # the number of the meeting; that of the arena tensor; where in it
_ASKED = struct.Struct("<?H")  # whether it lies in an arena tensor; the text's length. From here on, all say the same


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the memory of its rank: in which arena tensor, how many bytes from its beginning."""

    number: int
    offset: int


@dataclass(frozen=True)
class Header:
    """The first meeting of an exchange, whether its tensor lies in the arena, and what `signature` says of it."""

    meeting: int
    shared: bool
    text: str


def encode(op: Op, meeting: int, place: Place | None) -> bytes:
    """Return the header of `op`, of which `meeting` is the first meeting."""
    if place is None:
        return _FIXED.pack(meeting, 0, 0) + _asked(op, False)
    return _FIXED.pack(meeting, place.number, place.offset) + _asked(op, True)


def same(mine: bytes, other: memoryview) -> bool:
    """Tell whether a peer asks for what this rank asks for, with its tensor in the arena or not alike."""
    return other[_FIXED.size : len(mine)] == mine[_FIXED.size :]


def decode(header: memoryview) -> Header:
    """Read a header; one that is just being written gives nonsense, but no error."""
    shared, length = _ASKED.unpack_from(header, _FIXED.size)
    start = _FIXED.size + _ASKED.size
    text = bytes(header[start : start + min(length, _MOST_BYTES)]).decode(errors="replace")
    return Header(_FIXED.unpack_from(header)[0], shared, text)


def place_in(header: memoryview) -> Place:
    """Read where a tensor lies that is in the arena."""
    _, number, offset = _FIXED.unpack_from(header)
    return Place(number, offset)


_kept: dict[tuple[object, ...], bytes] = {}


def _asked(op: Op, shared: bool) -> bytes:
    """Encode what must be the same on all ranks; a long text is cut, and ends with the digest of all of it."""
    key = _key(op, shared)
    known = _kept.get(key)
    if known is None:
        text = signature(op).encode()
        if len(text) > _MOST_BYTES:
            text = text[: _MOST_BYTES - 40] + b"... " + hashlib.blake2b(text, digest_size=16).hexdigest().encode()
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        known = _kept[key] = _ASKED.pack(shared, len(text)) + text
    return known


def _key(op: Op, shared: bool) -> tuple[object, ...]:
    """Return all that the signature is made of."""
    if isinstance(op, Barrier):
        return (Barrier,)
    if isinstance(op, AllToAll):
        return AllToAll, op.tensor.dtype
    rest = getattr(op, "reduction", None), getattr(op, "source", None)
    return type(op), op.tensor.dtype, op.tensor.shape, shared, *rest

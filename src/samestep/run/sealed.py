"""What torch.save writes, with a checksum behind it that torch.load does not mind.

torch's file is a zip archive, which ends in a record of 22 bytes whose last two are the length of a comment, 0. The
comment that is added here says the SHA-256 of the file as torch wrote it. (PKWARE's APPNOTE.TXT, 4.3.16.)
"""

import hashlib
import os
import pickle
import re
from collections.abc import Mapping
from typing import IO, Any

import torch

from samestep.errors import CheckpointError

__all__ = ["read_sealed", "write_sealed"]

_BEGIN, _END = b"PK\x03\x04", b"PK\x05\x06"
_END_BYTES = 22
_NO_COMMENT = b"\0\0"
_WORDS = b"samestep sha256 "
_COMMENT_BYTES = len(_WORDS) + 64
_CHUNK_BYTES = 1 << 20


def write_sealed(state: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write a state with its checksum to an empty file that has a name.

    Raises CheckpointError for contents that could not be read back.
    """
    writer = _Hashing(file)
    try:
        torch.save(state, writer)  # type: ignore[arg-type]  # write and flush are all that it needs
        file.flush()
        torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)  # reads no more than the names
    except (pickle.PickleError, AttributeError) as error:
        raise CheckpointError(
            f"save: there is more in it than tensors, numbers, text, lists and dicts, all that is read back: "
            f"{_reason(error)}"
        ) from error
    comment = _WORDS + writer.digest.hexdigest().encode()
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    file.write(len(comment).to_bytes(2, "little") + comment)


def read_sealed(file: IO[bytes], map_location: Any) -> Mapping[str, Any]:
    """Return the state in a file of `write_sealed`, if its checksum is right, or of torch.save.

    Raises CheckpointError, whose text goes on after the file's name, OSError where it can't be read.
    """
    _check(file)
    file.seek(0)
    try:
        state = torch.load(file, map_location=map_location, weights_only=True)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"is no file of weights, or a damaged one; torch.load says: {_reason(error)}") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"holds a {type(state).__name__}, expected a state dict: names with their tensors")
    return state


def _reason(error: Exception) -> str:
    """What torch says is wrong, without its advice to load the file unsafely."""
    said = str(error).splitlines() or [type(error).__name__]
    names = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"a {names.group(1)} is in it" if names else said[0]


class _Hashing:
    """Passes on what is written, and knows the checksum of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _check(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_BYTES - _COMMENT_BYTES))
    ending = file.read()
    file.seek(0)
    if size == 0:
        raise CheckpointError("is empty; what wrote it did not finish")
    if ending[-_END_BYTES:].startswith(_END) and ending.endswith(_NO_COMMENT):
        return  # torch.save wrote it, and no checksum
    comment = ending[_END_BYTES:]
    if ending.startswith(_END) and len(comment) == _COMMENT_BYTES:
        length = ending[_END_BYTES - 2 : _END_BYTES]
        if length + comment != len(comment).to_bytes(2, "little") + _WORDS + _sum(file, size).encode():
            raise CheckpointError("has changed since it was saved: its checksum is wrong; use another copy")
    elif file.read(len(_BEGIN)) == _BEGIN:
        raise CheckpointError(f"is cut off or damaged: its {size} bytes begin as weights and do not end so")


def _sum(file: IO[bytes], size: int) -> str:
    digest = hashlib.sha256()
    left = size - _COMMENT_BYTES - len(_NO_COMMENT)
    while left:
        data = file.read(min(left, _CHUNK_BYTES))
        if not data:
            raise CheckpointError("became shorter while it was read")
        digest.update(data)
        left -= len(data)
    digest.update(_NO_COMMENT)
    return digest.hexdigest()

"""Reads IDX files, the format of the MNIST digits: raw or packed with gzip, of any number of dimensions.

An IDX file is two zero bytes, a type code, the number of dimensions, each dimension as a big-endian unsigned
32-bit number, and then the elements. Files of unsigned bytes (type code 0x08) are read; they are all that MNIST
has.
"""

import gzip
import math
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import IO

import torch

from samestep.errors import DataError, MissingDataError

__all__ = ["read_idx"]

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_TYPES = {
    0x08: "unsigned byte",
    0x09: "signed byte",
    0x0B: "int16",
    0x0C: "int32",
    0x0D: "float32",
    0x0E: "float64",
}
_PIECE_BYTES = 1 << 20


def read_idx(path: str | os.PathLike[str]) -> torch.Tensor:
    """Read one IDX file of unsigned bytes and return it as a uint8 tensor of the shape that the file states.

    Whether the file is packed with gzip is told by its content, not by its name. No more is read than the
    stated shape needs, so a header that lies about it costs no memory.

    Raises MissingDataError when there is no such file, and DataError when it cannot be read, is not a regular
    file, is not IDX, has another type of element, is shorter or longer than its shape needs, or has damaged
    gzip data. Each names the file, what was expected and what was found.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise DataError(f"{path} is {kind}; expected an IDX file")
        with path.open("rb") as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            if not packed:
                return _read(file, path)
            with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
                return _read(unpacked, path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingDataError(f"{path} is not there; expected an IDX file, raw or packed with gzip") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} has damaged gzip data ({error}); get the file again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _read(file: IO[bytes] | gzip.GzipFile, path: Path) -> torch.Tensor:
    shape = _read_shape(file, path)
    expected = math.prod(shape)
    needs = f"expected {expected} bytes for the shape {list(shape)} that its header states"
    # One byte more than expected: it shows trailing bytes, and reaching the end makes gzip check its checksum.
    data = _read_up_to(file, expected + 1)
    if len(data) < expected:
        raise DataError(f"{path} is truncated: {needs}, got {len(data)}")
    if len(data) > expected:
        raise DataError(f"{path} has bytes after its end: {needs}, got at least {len(data)}")
    if not data:
        return torch.empty(shape, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(shape)


def _read_shape(file: IO[bytes] | gzip.GzipFile, path: Path) -> tuple[int, ...]:
    magic = bytes(_read_up_to(file, 4))
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        raise DataError(
            f"{path} is not an IDX file: expected two zero bytes, a type code and the number of dimensions, "
            f"got {f'0x{magic.hex()}' if magic else 'an empty file'}"
        )
    code, dimensions = magic[2:]
    if code != _UNSIGNED_BYTE:
        raise DataError(
            f"{path} holds elements of type {_TYPES[code]} (code 0x{code:02x}); expected unsigned bytes (code 0x08)"
        )
    header = _read_up_to(file, 4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DataError(
            f"{path} is truncated in its header: expected {4 * dimensions} bytes for {dimensions} dimensions, "
            f"got {len(header)}"
        )
    shape = struct.unpack(f">{dimensions}I", header)
    # torch multiplies dimensions into 64-bit strides, also when another one is zero.
    if math.prod(max(size, 1) for size in shape) >= 2**63:
        raise DataError(f"{path} states the shape {list(shape)}; expected less than 2**63 elements")
    return shape


def _read_up_to(file: IO[bytes] | gzip.GzipFile, limit: int) -> bytearray:
    # Piece by piece: a single read() would reserve as much memory as a damaged header asks for.
    data = bytearray()
    while len(data) < limit:
        piece = file.read(min(_PIECE_BYTES, limit - len(data)))
        if not piece:
            break
        data += piece
    return data

"""IDX files and the digits: bits as the formula gives them, and every damaged or missing file is named."""

import gzip
import hashlib
import math
import os
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import samestep.data
from samestep.data.digits import digits
from samestep.data.idx import read_idx
from samestep.errors import DataError, MissingDataError

PACKAGED = Path(samestep.data.__file__).with_name("mnist")
COUNTS = {"train": 8_000, "test": 2_000}


def idx(shape: tuple[int, ...], data: bytes | None = None, code: int = 8) -> bytes:
    content = bytes(i % 251 for i in range(math.prod(shape))) if data is None else data
    return struct.pack(f">HBB{len(shape)}I", 0, code, len(shape), *shape) + content


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def images_of(data: TensorDataset) -> torch.Tensor:
    return data.tensors[0]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 0, 5), (2, 3, 4, 5), (1,) * 40])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gzip"])
def test_any_shape_is_read_whatever_the_name(
    tmp_path: Path, shape: tuple[int, ...], pack: Callable[[bytes], bytes]
) -> None:
    tensor = read_idx(put(tmp_path / "digits.gz", pack(idx(shape))))
    assert (tensor.dtype, tensor.shape) == (torch.uint8, torch.Size(shape))
    assert tensor.flatten().tolist() == [i % 251 for i in range(math.prod(shape))]


def test_a_path_may_be_text_and_the_tensor_is_the_callers_own(tmp_path: Path) -> None:
    path = put(tmp_path / "a", idx((3,)))
    tensor = read_idx(str(path))
    tensor += 1
    assert read_idx(path).tolist() == [0, 1, 2]


WHOLE = idx((2, 3))
PACKED = gzip.compress(WHOLE, mtime=0)
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not an IDX file: .*got an empty file"),
    "one byte": (b"\0", "is not an IDX file: expected two zero bytes.*got 0x00"),
    "text": (b"hello world", "is not an IDX file.*got 0x68656c6c"),
    "unknown type code": (idx((3,), code=0x0A), "is not an IDX file.*got 0x00000a01"),
    "little endian": (WHOLE[3::-1] + WHOLE[4:], "is not an IDX file.*got 0x02080000"),
    "floats": (idx((1,), b"\0" * 4, code=0x0D), r"type float32 \(code 0x0d\); expected unsigned bytes \(code 0x08\)"),
    "short header": (WHOLE[:9], "truncated in its header: expected 8 bytes for 2 dimensions, got 5"),
    "no data": (WHOLE[:12], r"is truncated: expected 6 bytes for the shape \[2, 3\].*got 0"),
    "a byte short": (WHOLE[:-1], r"is truncated: expected 6 bytes for the shape \[2, 3\].*got 5"),
    "a byte more": (WHOLE + b"x", r"bytes after its end: expected 6 bytes for the shape \[2, 3\].*at least 7"),
    "a byte more, packed": (gzip.compress(WHOLE + b"x"), "bytes after its end: expected 6 .*at least 7"),
    "a byte short, packed": (gzip.compress(WHOLE[:-1]), "is truncated: expected 6 .*got 5"),
    "a second copy": (PACKED + PACKED, "bytes after its end"),
    "no such memory": (idx((2**32 - 1, 2**30), b"x"), "is truncated: expected 4611686017353646080 bytes.*got 1"),
    "no such tensor": (idx((2**32 - 1,) * 3 + (0,), b""), r"states the shape .*expected less than 2\*\*63 elements"),
    "gzip cut in its header": (PACKED[:5], r"damaged gzip data \(Compressed file ended"),
    "gzip cut in its data": (PACKED[:-12], r"damaged gzip data \(Compressed file ended"),
    "gzip cut in its checksum": (PACKED[:-6], r"damaged gzip data \(Compressed file ended"),
    "gzip checksum": (PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], r"damaged gzip data \(CRC check failed"),
    "gzip length": (PACKED[:-4] + b"\0\0\0\0", r"damaged gzip data \(Incorrect length"),
    "gzip block": (PACKED[:10] + b"\xff" + PACKED[11:], r"damaged gzip data \(Error -3"),
    "gzip with a tail": (PACKED + b"tail", r"damaged gzip data \(Not a gzipped file"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = put(tmp_path / "wrong", content)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))} .*{message}"):
        read_idx(path)


@settings(deadline=None)
@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: WHOLE[:4] + tail) | st.integers(0, 400))
def test_damage_is_a_data_error_or_nothing(tmp_path_factory: pytest.TempPathFactory, damage: bytes | int) -> None:
    if isinstance(damage, int):
        at, bit = damage % len(PACKED), 1 << damage % 8
        damage = PACKED[:at] + bytes([PACKED[at] ^ bit]) + PACKED[at + 1 :]
    path = put(tmp_path_factory.mktemp("damage") / "file", damage)
    try:
        said = str(read_idx(path).dtype)
    except DataError as error:
        said = str(error)
    assert said == "torch.uint8" or str(path) in said


def test_a_lying_header_costs_no_memory(tmp_path: Path) -> None:
    path = put(tmp_path / "bomb", gzip.compress(idx((3,), bytes(50_000_000)), 1))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"expected 3 bytes .* at least 4"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=f"{tmp_path / 'none'} is not there") as missing:
        read_idx(tmp_path / "none")
    assert isinstance(missing.value, FileNotFoundError)
    with pytest.raises(MissingDataError, match="is not there"):
        read_idx(put(tmp_path / "file", b"") / "below")
    with pytest.raises(DataError, match=f"{tmp_path} is a directory; expected an IDX file"):
        read_idx(tmp_path)


def test_a_pipe_or_device_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match=f"{path} is not a regular file"):
            read_idx(path)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    path = put(tmp_path / "mine", WHOLE)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=f"{path} cannot be read: {error.strerror}") as caught:
        read_idx(path)
    assert not isinstance(caught.value, MissingDataError)


@pytest.mark.parametrize("part", ["train", "test"])
def test_the_packaged_digits_have_the_formulas_bits(part: str) -> None:
    prefix = {"train": "train", "test": "t10k"}[part]
    raw = gzip.decompress((PACKAGED / f"{prefix}-images-idx3-ubyte.gz").read_bytes())[16:]
    pixels = torch.from_numpy(np.frombuffer(raw, np.uint8).astype(np.float32))
    labels = gzip.decompress((PACKAGED / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())[8:]
    data = digits(part)  # type: ignore[arg-type]
    assert isinstance(data, TensorDataset)
    got_images, got_labels = data.tensors
    assert (got_images.dtype, got_images.shape) == (torch.float32, (COUNTS[part], 1, 28, 28))
    assert torch.equal(got_images.flatten(), ((pixels / 255) - 0.1307) / 0.3081)
    assert (got_labels.dtype, got_labels.tolist()) == (torch.int64, list(labels))
    assert set(labels) == set(range(10))


def test_the_credit_lies_beside_the_files_and_knows_them() -> None:
    credit = (PACKAGED / "README.md").read_text()
    for words in (
        "Yann LeCun",
        "Corinna Cortes",
        "Christopher J.C. Burges",
        "CC BY-SA 3.0",
        "subset",
        "8,000",
        "2,000",
    ):
        assert words in credit
    sums = dict(re.findall(r"`(\S+\.gz)` .*`([0-9a-f]{64})`", credit))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in PACKAGED.glob("*.gz")}
    assert sums == files
    assert len(files) == 4


def fill(place: Path, *, images: bytes | None = None, labels: bytes | None = None, names: str = "{}-{}") -> None:
    """Write a test part of four digits."""
    put(place / names.format("t10k-images", "idx3-ubyte"), idx((4, 28, 28)) if images is None else images)
    put(place / names.format("t10k-labels", "idx1-ubyte"), idx((4,)) if labels is None else labels)


@pytest.mark.parametrize("under", [".", "MNIST/raw"])
@pytest.mark.parametrize("names", ["{}-{}", "{}.{}", "{}-{}.gz", "{}.{}.gz"])
def test_folders_and_names_that_people_have(tmp_path: Path, under: str, names: str) -> None:
    pack = gzip.compress if names.endswith(".gz") else bytes
    fill(tmp_path / under, images=pack(idx((4, 28, 28))), labels=pack(idx((4,))), names=names)
    images, labels = digits("test", str(tmp_path)).tensors
    assert images.shape == (4, 1, 28, 28)
    assert labels.tolist() == [0, 1, 2, 3]


def test_a_copy_of_the_packaged_folder_is_the_packaged_data(tmp_path: Path) -> None:
    shutil.copytree(PACKAGED, tmp_path / "copy")
    assert torch.equal(images_of(digits("test", tmp_path / "copy")), images_of(digits("test")))


def test_files_are_taken_from_one_place_and_folders_of_that_name_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "t10k-images-idx3-ubyte", idx((9, 28, 28)))
    (tmp_path / "t10k-labels-idx1-ubyte").mkdir()
    fill(tmp_path / "MNIST" / "raw", names="{}.{}")
    assert len(digits("test", tmp_path)) == 4


def test_an_empty_part_is_no_error(tmp_path: Path) -> None:
    fill(tmp_path, images=idx((0, 28, 28)), labels=idx((0,)))
    assert len(digits("test", tmp_path)) == 0


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (idx((3, 28, 28)), idx((4,)), "images-idx3-ubyte has 3 images and .*labels-idx1-ubyte has 4 labels"),
        (idx((4, 32, 32)), idx((4,)), r"images-idx3-ubyte has shape \[4, 32, 32\], expected \[n, 28, 28\]"),
        (idx((4 * 784,)), idx((4,)), r"images-idx3-ubyte has shape \[3136\], expected \[n, 28, 28\]"),
        (idx((4, 28, 28)), idx((2, 2)), r"labels-idx1-ubyte has shape \[2, 2\], expected \[n\]"),
        (idx((4, 28, 28)), idx((4,), b"\1\2\xc8\3"), "labels-idx1-ubyte has label 200 at 2, expected 0 to 9"),
        (idx((4, 28, 28))[:-1], idx((4,)), "images-idx3-ubyte is truncated"),
        (idx((4, 28, 28)), b"what", "labels-idx1-ubyte is not an IDX file"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path: Path, images: bytes, labels: bytes, message: str) -> None:
    fill(tmp_path, images=images, labels=labels)
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path))}/t10k-.*{message}"):
        digits("test", tmp_path)


def test_a_missing_file_lists_what_was_looked_for_and_where(tmp_path: Path) -> None:
    put(tmp_path / "train-images.idx3-ubyte.gz", gzip.compress(idx((4, 28, 28))))
    with pytest.raises(MissingDataError) as caught:
        digits("train", tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    stem = "train-labels-idx1-ubyte"
    names = f"{stem}, {stem}.gz, train-labels.idx1-ubyte, train-labels.idx1-ubyte.gz"
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"no MNIST train images with their labels in {tmp_path}")
    assert lines[1] == f"  images in {tmp_path}: found train-images.idx3-ubyte.gz"
    assert lines[2] == f"  labels in {tmp_path}: none of {names}"
    assert lines[3].startswith(f"  images in {raw}: none of train-images-idx3-ubyte, ")
    assert lines[4] == f"  labels in {raw}: none of {names}"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=f"{tmp_path / 'none'} is not there; expected a folder"):
        digits("train", tmp_path / "none")
    with pytest.raises(MissingDataError, match=f"{tmp_path / 'file'} is not a folder; expected a folder"):
        digits("train", put(tmp_path / "file", b""))


def test_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(DataError, match=f"{tmp_path}/train-images-idx3-ubyte cannot be looked at: Permission denied"):
        digits("train", tmp_path)


@pytest.mark.parametrize("part", ["t10k", "validation", "", None, []])
def test_another_part_is_refused(part: object) -> None:
    with pytest.raises(ValueError, match=r"part is .*, expected one of \('train', 'test'\)"):
        digits(part)  # type: ignore[arg-type]

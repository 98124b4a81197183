"""Handwritten digits as a data set: the 10,000 that come with the package, or a full MNIST folder of the user's."""

import os
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from torch.utils.data import TensorDataset

from samestep.data.idx import read_idx
from samestep.errors import DataError, MissingDataError

__all__ = ["digits"]

Part = Literal["train", "test"]

_PREFIXES: dict[Part, str] = {"train": "train", "test": "t10k"}
_PACKAGED = Path(__file__).with_name("mnist")
_SIDE = 28
_LAST_DIGIT = 9
# Mean and standard deviation of the pixels of MNIST's 60,000 training images, as everybody rounds them.
_MEAN, _STD = 0.1307, 0.3081


def digits(part: Part, folder: str | os.PathLike[str] | None = None) -> TensorDataset:
    """Return the digits of one part, "train" or "test", as pairs of image and label.

    folder: None reads the subset of MNIST in the package (8,000 and 2,000 digits; credits in
    data/mnist/README.md). A folder of the user's may hold MNIST's four files itself or in MNIST/raw, as
    torchvision leaves them, with names such as train-images-idx3-ubyte or train-images.idx3-ubyte, each with or
    without .gz.

    The tensors are images, float32 [n, 1, 28, 28], normalised as (pixel / 255 - 0.1307) / 0.3081, and labels,
    int64 [n], 0 to 9.

    Raises MissingDataError, which lists the names and folders that were tried, when a file is not there;
    DataError when a file is damaged, images are not 28 x 28, a label is not 0 to 9, or there are not as many
    labels as images; ValueError for another part.
    """
    if part not in get_args(Part):
        raise ValueError(f"part is {part!r}, expected one of {get_args(Part)}")
    image_file, label_file = _find(part, _PACKAGED if folder is None else Path(folder))
    images, labels = read_idx(image_file), read_idx(label_file)
    if images.dim() != 3 or images.shape[1:] != (_SIDE, _SIDE):
        raise DataError(f"{image_file} has shape {list(images.shape)}, expected [n, {_SIDE}, {_SIDE}]")
    if labels.dim() != 1:
        raise DataError(f"{label_file} has shape {list(labels.shape)}, expected [n]")
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} has {len(images)} images and {label_file} has {len(labels)} labels; expected as many"
        )
    wrong = (labels > _LAST_DIGIT).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise DataError(f"{label_file} has label {int(labels[at])} at {at}, expected 0 to {_LAST_DIGIT}")
    pixels = images.unsqueeze(1).float().div_(255).sub_(_MEAN).div_(_STD)
    return TensorDataset(pixels, labels.long())


def _find(part: Part, folder: Path) -> tuple[Path, Path]:
    """Return the image and the label file of the first place that has both; they are never taken from two places."""
    images = _names(f"{_PREFIXES[part]}-images", "idx3-ubyte")
    labels = _names(f"{_PREFIXES[part]}-labels", "idx1-ubyte")
    places = (folder, folder / "MNIST" / "raw")
    for place in places:
        image_file, label_file = _first(place, images), _first(place, labels)
        if image_file and label_file:
            return image_file, label_file
    raise MissingDataError(_what_is_missing(part, folder, places, images, labels))


def _names(stem: str, ending: str) -> list[str]:
    return [f"{stem}{joint}{ending}{suffix}" for joint, suffix in product("-.", ("", ".gz"))]


def _first(place: Path, names: list[str]) -> Path | None:
    for name in names:
        try:
            if (place / name).is_file():
                return place / name
        except OSError as error:
            raise DataError(f"{place / name} cannot be looked at: {error.strerror or error}") from error
    return None


def _what_is_missing(part: Part, folder: Path, places: tuple[Path, ...], images: list[str], labels: list[str]) -> str:
    if not folder.is_dir():
        return (
            f"{folder} {'is not a folder' if folder.exists() else 'is not there'}; expected a folder with MNIST's files"
        )
    lines = [f"no MNIST {part} images with their labels in {folder}; expected, in one place, one file of each:"]
    for place in places:
        for kind, names in (("images", images), ("labels", labels)):
            found = _first(place, names)
            lines.append(f"  {kind} in {place}: {f'found {found.name}' if found else 'none of ' + ', '.join(names)}")
    return "\n".join(lines)

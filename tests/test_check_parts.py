"""The parts of `samestep check` that look: digests, merged batches, living models, a scratch folder for files."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from samestep.inspect.digests import digest, sample_digest
from samestep.inspect.merging import merged
from samestep.inspect.models import Models

Pair = namedtuple("Pair", "x y")


def test_digests_tell_bits_shapes_and_dtypes_apart() -> None:
    tensors: list[torch.Tensor | None] = [
        None,
        torch.zeros(4),
        -torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.complex64),
    ]
    assert len({digest(one) for one in tensors}) == len(tensors)
    x = torch.randn(3, 4, requires_grad=True)
    assert digest(x) == digest(x.t().contiguous().t())
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3).to_sparse())


class Image:
    def tobytes(self) -> bytes:
        return b"pixels"


def test_samples_of_all_kinds_have_digests_or_none() -> None:
    samples: list[Any] = [
        (torch.ones(3), 4),
        [torch.ones(3), 4.5],
        {"text": "a", "ids": numpy.arange(3)},
        {"text": "a", "ids": numpy.arange(4)},
        (Image(), "label"),
        None,
        numpy.float32(3),
    ]
    marks = [sample_digest(sample) for sample in samples]
    assert "" not in marks
    assert len(set(marks)) == len(marks)
    assert sample_digest((3, object())) == sample_digest(numpy.array([object()])) == ""


def test_batches_are_put_together_row_by_row() -> None:
    one, two = torch.arange(6.0).view(3, 2), torch.arange(4.0).view(2, 2)
    whole = torch.cat([one, two])
    assert torch.equal(merged([one, two]), whole)
    got = merged([{"x": one, "y": [one[:, 0]], "kind": "a"}, {"x": two, "y": [two[:, 0]], "kind": "a"}])
    assert torch.equal(got["y"][0], whole[:, 0])
    assert got["kind"] == "a"
    pair = merged([Pair(one, one), Pair(two, two)])
    assert isinstance(pair, Pair)
    assert torch.equal(pair.y, whole)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "tensors of different shapes"),
        ([(torch.ones(2), torch.ones(3))] * 2, "different numbers of rows"),
        ([(torch.ones(2), torch.tensor(3.0))] * 2, "different numbers of rows"),
        ([[1, 2], [3, 4]], "different numbers of rows"),
        ([torch.ones(2), (torch.ones(2),)], "different kinds"),
        ([(torch.ones(2), "a"), (torch.ones(2), "b")], "a str in a batch"),
        ([OrderedDict(x=torch.ones(2))] * 2, "a OrderedDict in a batch"),
        ([[torch.ones(2)], [torch.ones(2), torch.ones(2)]], "a list in a batch"),
    ],
)
def test_what_is_no_plain_batch_is_refused(batches: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merged(batches)


def test_models_are_found_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wrapped = nn.DataParallel(model)
    alone = torch.ones(3, requires_grad=True)
    models = Models()
    assert models.name(model[0].weight) == "0.weight"
    assert models.name(alone) is None
    assert models.own_norms(model.parameters()) == ["1"]
    assert models.own_norms([alone]) == []
    theirs = [p for root in models._roots if root is not wrapped for p in root.parameters()]  # of other tests
    assert not models.has_gradients_unknown_to([alone, *theirs])
    wrapped(torch.randn(4, 2)).sum().backward()
    assert models.has_gradients_unknown_to([alone, *theirs])
    assert not models.has_gradients_unknown_to([*model.parameters(), *theirs])
    assert Models().own_norms(model.eval().parameters()) == []


SCRIPT = """
import io, os, pathlib, shutil, sys
from pathlib import Path
import numpy, torch
from samestep.inspect.scratch import Scratch
real = os.path.realpath(".")
notes = []
Scratch(Path(sys.argv[1]), "files", notes.append).install()
def fails(kind, call, *args):
    try:
        call(*args)
    except kind:
        return True
assert open("old.txt").read() == "old"
with open("old.txt", "w") as file:
    file.write("new")
assert Path("old.txt").read_text() == "new" and os.path.getsize("old.txt") == 3
with open("log.txt", "a") as file:
    file.write(" and more")
assert open("log.txt").read() == "log and more"
os.makedirs("runs/a", exist_ok=True)
torch.save({"x": 3}, "runs/a/model.pt")
assert torch.load("runs/a/model.pt") == {"x": 3} and Path("runs/a/model.pt").exists()
numpy.save("runs/a/x.npy", numpy.ones(3))
assert numpy.load("runs/a/x.npy").sum() == 3
assert fails(FileExistsError, open, "runs/a/x.npy", "x") and fails(FileExistsError, open, "kept.txt", "x")
assert fails(FileNotFoundError, open, "nowhere/x", "w") and fails(FileNotFoundError, open, "nothing.txt")
os.replace("runs/a/model.pt", "old.pt")
assert torch.load("old.pt") == {"x": 3} and not os.path.exists("runs/a/model.pt")
os.rename("kept.txt", "moved.txt")
assert open("moved.txt").read() == "kept" and fails(FileNotFoundError, open, "kept.txt")
os.remove("gone.txt")
assert not os.path.exists("gone.txt") and fails(FileNotFoundError, os.remove, "gone.txt")
shutil.rmtree("folder")
assert not os.path.exists("folder")
os.makedirs("folder")
fd = os.open("by_number", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
os.write(fd, b"1234")
os.close(fd)
assert os.stat("by_number").st_size == 4
open("/dev/null", "w").write("x")
print(*sorted(os.path.relpath(note, real) for note in notes))
"""


def test_files_are_written_to_a_scratch_folder_and_found_again(tmp_path: Path) -> None:
    place, ours = tmp_path / "work", tmp_path / "ours"
    (place / "folder").mkdir(parents=True)
    ours.mkdir()
    before = {"old.txt": "old", "log.txt": "log", "kept.txt": "kept", "gone.txt": "", "folder/x": "x"}
    for name, text in before.items():
        (place / name).write_text(text)
    done = subprocess.run([sys.executable, "-c", SCRIPT, ours], cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(
        ["old.txt", "runs/a/model.pt", "runs/a/x.npy", "old.pt", "moved.txt", "by_number"]
    )
    after = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}
    assert after == before

"""Weights on disk: names without wrappers, files that torch reads too, damage that is found, errors on all ranks."""

import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
from save_ranks import save_and_load
from torch import Tensor, nn

import samestep
from samestep.comm.base import Communicator
from samestep.errors import CheckpointError, CommunicatorError, MismatchError, MissingCheckpointError, SaveError
from samestep.run import files, sealed
from samestep.testing.ranks import run_processes, run_threads


class DataParallel(nn.Module):
    """A wrapper as other libraries have them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DistributedDataParallel(DataParallel):
    pass


class OptimizedModule(nn.Module):
    """What torch.compile makes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


class Named(nn.Module):
    """A model that has a part called "module" itself, and another that was wrapped alone."""

    def __init__(self) -> None:
        super().__init__()
        self.module = mlp(1)
        self.head = nn.Linear(2, 2)


def inner_wrapped() -> nn.Module:
    model = Named()
    model.head = DataParallel(model.head)  # type: ignore[assignment]
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "bare": Named,
    "once": lambda: DistributedDataParallel(Named()),
    "twice": lambda: OptimizedModule(DistributedDataParallel(DataParallel(Named()))),
    "within": inner_wrapped,
    "without and within": lambda: DataParallel(OptimizedModule(inner_wrapped())),
    "torch's": lambda: nn.DataParallel(Named()),
}
BARE = list(Named().state_dict())


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("saved", WRAPPED)
def test_case_11_saved_without_prefix_and_loaded_with_or_without(saved: str, tmp_path: Path) -> None:
    path, plain = tmp_path / "ours.pt", tmp_path / "torchs.pt"
    model = WRAPPED[saved]()
    samestep.save(model, path)
    torch.save(model.state_dict(), plain)
    assert list(torch.load(path)) == list(samestep.load(path)) == BARE
    for wrap in WRAPPED.values():
        for file in (path, plain):
            other = filled(wrap(), 9.0)
            assert samestep.load(file, other) == ([], [])
            assert same(values(other), values(model))


def test_case_11_a_state_dict_loses_what_all_its_names_begin_with(tmp_path: Path) -> None:
    samestep.save(nn.DataParallel(nn.DataParallel(mlp())).state_dict(), tmp_path / "a.pt")
    assert list(torch.load(tmp_path / "a.pt")) == list(mlp().state_dict())
    samestep.save(Named().state_dict(), tmp_path / "b.pt")
    assert list(torch.load(tmp_path / "b.pt")) == BARE
    mixed = {"n": 3, "rates": [0.1, 0.2], "nested": {"name": "x", "weights": torch.ones(2)}}
    samestep.save(mixed, tmp_path / "c.pt")
    assert repr(samestep.load(tmp_path / "c.pt")) == repr(mixed)


def test_versions_of_parts_travel_with_their_names(tmp_path: Path) -> None:
    norm = nn.Sequential(nn.BatchNorm1d(3))
    samestep.save(DataParallel(norm), tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")._metadata == norm.state_dict()._metadata  # type: ignore[attr-defined]
    state = norm.state_dict()
    del state["0.num_batches_tracked"]  # as before that buffer was there; torch fills it in for version 1
    state._metadata["0"] = {"version": 1}  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "old.pt")
    assert samestep.load(tmp_path / "old.pt", DataParallel(nn.Sequential(nn.BatchNorm1d(3)))) == ([], [])


def test_case_12_each_goes_to_its_own_device(tmp_path: Path) -> None:
    """Where the model is, or the rank; never where the saving rank was. A meta device stands for another GPU."""
    path = tmp_path / "a.pt"
    samestep.save(mlp(), path)
    apart = mlp().to("meta")
    places: list[Any] = []
    apart[0].weight.register_hook(lambda _: None)
    with pytest.warns(UserWarning, match="meta"):
        samestep.load(path, apart)
    assert {p.device.type for p in apart.parameters()} == {"meta"}
    assert {value.device.type for value in samestep.load(path).values()} == {"cpu"}
    assert {value.device.type for value in samestep.load(path, map_location="meta").values()} == {"meta"}

    def note(storage: Any, where: str) -> Any:
        places.append(where)
        return storage

    samestep.load(path, mlp(), map_location=note)
    assert set(places) == {"cpu"}


def test_what_is_tied_stays_tied_and_every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    tied = torch.randn(3)
    state = {"a": tied, "b": tied, **{str(d): torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.int8)}}
    samestep.save(state, tmp_path / "a.pt")
    found = samestep.load(tmp_path / "a.pt")
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in state.items())


# Files that are not what they should be


def damaged(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    changed = {"changed in front": 0, "changed in the middle": middle, "changed at the end": len(data) - 1}
    if how in changed:
        at = changed[how]
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    return {"empty": b"", "cut off": data[:middle], "longer": data + b"\0", "text": b"epoch 3, loss 0.1"}[how]


FOREIGN = {
    "a model": lambda: mlp(),
    "a tensor": lambda: torch.ones(3),
    "numbered": lambda: {0: torch.ones(3)},
}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("changed in front", "has changed since it was saved: its checksum is wrong"),
        ("changed in the middle", "has changed since it was saved"),
        ("changed at the end", "has changed since it was saved"),
        ("empty", "is empty"),
        ("cut off", "is cut off or damaged: its [0-9]+ bytes"),
        ("longer", "is cut off or damaged"),
        ("text", "is no file of weights"),
        ("a model", r"is no file of weights.*a torch.nn.modules.container.Sequential is in it"),
        ("a tensor", "holds a Tensor, expected a state dict"),
        ("numbered", "holds a dict, expected a state dict"),
        ("not there", "is not there"),
        ("a folder", "can't be read: Is a directory"),
    ],
)
def test_case_13_a_file_that_is_not_whole_is_named_and_changes_nothing(how: str, said: str, tmp_path: Path) -> None:
    path, model = tmp_path / "weights.pt", mlp(3)
    before = values(model)
    if how in FOREIGN:
        torch.save(FOREIGN[how](), path)
    elif how == "a folder":
        path.mkdir()
    elif how != "not there":
        samestep.save(mlp(4), path)
        path.write_bytes(damaged(path.read_bytes(), how))
    kind = MissingCheckpointError if how == "not there" else CheckpointError
    for arguments in ((path,), (path, model)):
        with pytest.raises(kind, match=f"{re.escape(str(path))} {said}"):
            samestep.load(*arguments)
    assert same(values(model), before)


def test_case_13_no_cut_and_no_changed_byte_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    samestep.save({"a": torch.ones(3)}, path)
    data = path.read_bytes()
    for size in [*range(0, len(data), 53), *range(len(data) - 110, len(data))]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            samestep.load(path)
    for at in [*range(0, len(data), 29), *range(len(data) - 110, len(data))]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        with pytest.raises(CheckpointError):
            samestep.load(path)


def test_files_of_torch_are_read_in_both_of_its_forms(tmp_path: Path) -> None:
    for zipped in (True, False):
        torch.save(mlp(3).state_dict(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        model = mlp(5)
        samestep.load(tmp_path / "a.pt", model)
        assert same(values(model), values(mlp(3)))


# Names and shapes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("0.bias"), r'Missing key\(s\) in state_dict: "0.bias"'),
        (lambda state: state.update(more=torch.ones(1)), r'Unexpected key\(s\) in state_dict: "more"'),
        (lambda state: state.update({"2.bias": torch.ones(5)}), "size mismatch for 2.bias"),
        (lambda state: state.update({"2.bias": "text"}), "2.bias"),
    ],
)
@pytest.mark.parametrize("saved_by", [samestep.save, torch.save])
def test_what_does_not_fit_changes_nothing(
    change: Callable[[Any], Any], said: str, saved_by: Any, tmp_path: Path
) -> None:
    state = mlp(1).state_dict()
    change(state)
    saved_by(state, tmp_path / "a.pt")
    model = mlp(2)
    with pytest.raises(CheckpointError, match=f"(?s)does not fit the model.*Error.*{said}") as caught:
        samestep.load(tmp_path / "a.pt", model)
    assert isinstance(caught.value, RuntimeError)
    assert same(values(model), values(mlp(2)))


def test_strict_false_is_torchs(tmp_path: Path) -> None:
    state = mlp(1).state_dict()
    del state["0.bias"]
    state["more"] = torch.ones(1)
    samestep.save(state, tmp_path / "a.pt")
    model = mlp(2)
    assert samestep.load(tmp_path / "a.pt", model, strict=False) == (["0.bias"], ["more"])
    wanted = mlp(2)
    wanted.load_state_dict(state, strict=False)
    assert same(values(model), values(wanted))
    state["2.bias"] = torch.ones(7)
    samestep.save(state, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="size mismatch"):
        samestep.load(tmp_path / "a.pt", model, strict=False)
    assert same(values(model), values(wanted))


# Over several ranks


def test_one_rank_writes_and_all_return_once_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "new" / "a.pt"

    def rank(comm: Communicator) -> list[Tensor]:
        samestep.save(mlp(comm.rank), path, group=comm)
        model = mlp(7)
        samestep.load(path, model)
        return values(model)

    assert all(same(found, values(mlp(0))) for found in run_threads(rank, 3))
    assert os.listdir(path.parent) == ["a.pt"]


def failing_on_all(comm: Communicator, state: Any, path: Any) -> Exception:
    with pytest.raises((CheckpointError, MismatchError, TypeError)) as caught:
        samestep.save(state(comm.rank), path(comm.rank), group=comm)
    comm.barrier()
    return caught.value


@pytest.mark.parametrize(
    ("state", "path", "kind", "said"),
    [
        (
            mlp,
            lambda rank: "here/is/a.pt",
            SaveError,
            "rank 0: .*here/is/a.pt could not be saved: (File ex|Not a)",
        ),
        (mlp, lambda rank: "folder", SaveError, "rank 0: .*folder could not be saved: is there and is no file"),
        (mlp, lambda rank: f"{rank}.pt", MismatchError, "rank 0: .*0.pt\n  rank 1: .*1.pt"),
        (mlp, lambda rank: "a.pt" if rank else 3, TypeError, "rank 0: expected str, .* not int"),
        (
            lambda rank: mlp() if rank != 1 else [3],
            lambda rank: "a.pt",
            TypeError,
            "rank 1: save: expected .* got list",
        ),
        (lambda rank: {"a": len}, lambda rank: "a.pt", CheckpointError, "rank 0: save: there is more in it"),
        (lambda rank: {"a": mlp()}, lambda rank: "a.pt", CheckpointError, "a torch.nn.*Sequential is in it"),
        (lambda rank: {"a": lambda: 3}, lambda rank: "a.pt", CheckpointError, "rank 0: save: there is more in it"),
    ],
)
def test_the_error_of_one_is_raised_on_all(
    state: Any, path: Any, kind: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("a file")
    (tmp_path / "folder").mkdir()
    errors = run_threads(partial(failing_on_all, state=state, path=path), 2)
    assert {type(error) for error in errors} == {kind}
    assert all(re.search(said, str(error)) for error in errors), errors
    assert sorted(os.listdir()) == ["folder", "here"]


@pytest.mark.parametrize("where", [(sealed._Hashing, "write"), (files.os, "fsync"), (files.os, "replace")])
def test_a_full_disk_leaves_the_old_file_and_reaches_all(
    where: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    samestep.save(mlp(1), path)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*where, full)
    errors = run_threads(partial(failing_on_all, state=mlp, path=lambda rank: path), 2)
    assert all(isinstance(error, OSError) and "rank 0: " in str(error) for error in errors)
    assert all("a.pt could not be saved: No space left on device" in str(error) for error in errors)
    assert os.listdir(tmp_path) == ["a.pt"]
    assert torch.equal(samestep.load(path)["0.weight"], mlp(1)[0].weight)


def test_unconnected_ranks_are_told_to_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(CommunicatorError, match=r"rank 1 of 2 .* has not been connected .* samestep.connect"):
        samestep.save(mlp(), tmp_path / "a.pt")
    assert not os.listdir(tmp_path)


# The file in its folder


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    old, link = tmp_path / "old.pt", tmp_path / "latest.pt"
    old.write_text("something")
    old.chmod(0o640)
    link.symlink_to(old)
    samestep.save(mlp(), link)
    assert link.is_symlink()
    assert list(samestep.load(old)) == list(mlp().state_dict())
    assert old.stat().st_mode & 0o777 == 0o640
    shutil.copy(old, tmp_path / "copy.pt")
    assert list(samestep.load(tmp_path / "copy.pt")) == list(mlp().state_dict())


def test_errors_pickle() -> None:
    assert str(pickle.loads(pickle.dumps(SaveError("rank 0: full")))) == "rank 0: full"


def test_ranks_save_and_load_what_either_class_wraps(tmp_path: Path) -> None:
    run_processes(save_and_load, 2, tmp_path)
    assert len(os.listdir(tmp_path)) == 2

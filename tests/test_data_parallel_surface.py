"""DataParallel: what goes in and out, devices, names in checkpoints, copies, and methods that a subclass replaces."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import scatter_gather as torchs
from torch.nn.utils.rnn import pack_sequence

import samestep
from samestep.parallel.data_parallel import DataParallel
from samestep.parallel.scatter import gather, scatter

CPU = torch.device("cpu")
X, Y = torch.arange(12.0).view(6, 2), torch.arange(6.0)

Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    x: Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "sample"
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.x))


class Opaque:
    pass


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict | UserDict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if dataclasses.is_dataclass(expected):
        return same(vars(found), vars(expected))
    return found is expected or found == expected


# Inputs


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(
    "nest",
    [
        lambda x, y: x,
        lambda x, y: (x, [y, {"a": x, "b": None}], "text", 3),
        lambda x, y: Pair(x, Pair(1, (y,))),
        lambda x, y: Typed(x, "name"),
        lambda x, y: Sample(x),
        lambda x, y: OrderedDict(b=x, a=y),
        lambda x, y: UserDict(a=x, b=3),
        lambda x, y: types.MappingProxyType({"a": x})["a"],
        lambda x, y: [(), [], {}, x],
    ],
)
def test_a_batch_is_cut_as_torch_cuts_it(nest: Any, devices: int) -> None:
    pieces = scatter(nest(X, Y), [CPU] * devices)
    expected = [nest(x, y) for x, y in zip(X.chunk(devices), Y.chunk(devices), strict=True)]
    assert len(pieces) == len(expected)
    assert all(map(same, pieces, expected))


def test_dictionaries_of_other_kinds_stay_what_they_are() -> None:
    grown = defaultdict(list, x=X)
    pieces = scatter(grown, [CPU] * 2)
    assert all(type(piece) is defaultdict and piece.default_factory is list for piece in pieces)
    assert torch.equal(pieces[1]["x"], X[3:])
    assert torch.equal(grown["x"], X)
    (proxied, _) = scatter(types.MappingProxyType({"x": X}), [CPU] * 2)
    assert type(proxied) is types.MappingProxyType
    assert torch.equal(gather([grown, pieces[0]], CPU)["x"], torch.cat([X, X[:3]]))


def test_what_is_no_tensor_goes_to_every_device_as_it_is() -> None:
    opaque, empty, size = Opaque(), list[int](), torch.Size([1, 2])
    for value in (opaque, empty, size, {X}, Sample, "text", 3):
        assert all(piece is value for piece in scatter(value, [CPU] * 3))
    assert torchs.scatter(("a", [1, {"b": None}], ()), [0, 1]) == scatter(("a", [1, {"b": None}], ()), [CPU] * 2)


def test_pieces_are_cut_along_any_dimension_and_may_be_written_to() -> None:
    along = X.clone().requires_grad_()
    for dim in (1, -1):
        left, right = scatter(along, [CPU] * 2, dim)
        assert torch.equal(right, X[:, 1:])
        left.mul_(2)
        (gradient,) = torch.autograd.grad((left * 3).sum() + right.sum(), along)
        assert torch.equal(gradient, torch.tensor([6.0, 1.0]).expand(6, 2))
    assert torch.equal(along, X)
    (whole,) = scatter(along, [CPU])
    assert whole is along


def test_a_tensor_without_dimensions_goes_to_every_device() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return x * scale

    scale = torch.tensor(2.0, requires_grad=True)
    output = DataParallel(Scaled(), ["cpu"] * 3)(X, scale=scale)
    output.sum().backward()
    assert torch.equal(output, X * 2)
    assert scale.grad == X.sum()


def test_tensors_that_would_be_cut_differently_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dimension 0 .* \[2\] into 2, \[6, 2\] into 3 pieces"):
        scatter((X, {"y": Y[:2]}), [CPU] * 3)
    with pytest.raises(TypeError, match=r"a PackedSequence can't be cut .* pack them in its forward"):
        scatter(pack_sequence([Y]), [CPU] * 2)
    with pytest.raises(IndexError, match="Dimension out of range"):
        scatter((X, Y), [CPU] * 2, 1)
    assert scatter(pack_sequence([Y]), [CPU])[0].data.equal(Y)


class Called(nn.Module):
    """Returns a row for each call, of what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "count"),
    [
        ((), {}, 1),
        ((3, "text"), {}, 3),
        ((), {"flag": True}, 3),
        ((X,), {}, 3),
        ((), {"x": X}, 3),
        ((X[:2],), {"flag": True}, 2),
        ((X[:1],), {"flag": True, "y": Y[:1]}, 1),
        ((None,), {"y": Y[:2]}, 2),
        ((torch.tensor(1.0),), {}, 3),
    ],
)
def test_every_replica_gets_all_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
    model = DataParallel(Called(), ["cpu"] * 3)
    assert model(*args, **kwargs).shape == (count, 2)
    calls = model.module.calls
    assert [(len(a), sorted(k)) for a, k in calls] == [(len(args), sorted(kwargs))] * count
    assert all(k["flag"] is True for _, k in calls if "flag" in kwargs)


# Outputs


@pytest.mark.parametrize(
    "nest",
    [
        lambda x, y: x,
        lambda x, y: (x, [y, {"a": x, "b": None}]),
        lambda x, y: Pair(x, (y, None)),
        lambda x, y: Sample(x),
        lambda x, y: OrderedDict(b=x, a=y),
        lambda x, y: UserDict(a=x),
        lambda x, y: [(), x, Sample, "text"],
    ],
)
def test_outputs_are_joined_in_their_structure(nest: Any) -> None:
    outputs = [nest(x, y) for x, y in zip(X.chunk(3), Y.chunk(3), strict=True)]
    assert same(gather(outputs, CPU), nest(X, Y))


def test_structures_without_tensors_are_joined_as_torch_joins_them() -> None:
    outputs = [{"a": None, "b": [None, (None,)]}] * 2
    assert gather(outputs, CPU) == torchs.gather(outputs, "cpu")
    values = gather([X[:3].max(1), X[3:].max(1)], CPU)
    assert type(values) is torch.return_types.max
    assert torch.equal(values.values, X.max(1).values)


def test_scalars_become_a_vector_with_torchs_warning() -> None:
    with pytest.warns(UserWarning, match="all input tensors were scalars; will instead unsqueeze and return a vector"):
        joined = gather([X.sum(), Y.sum()], CPU)
    assert joined.tolist() == [X.sum(), Y.sum()]


@pytest.mark.parametrize(
    ("outputs", "kind", "words"),
    [
        ([X, None], TypeError, "different things in one place.*: Tensor, NoneType"),
        ([{"a": X}, {"a": X, "b": X}], ValueError, r"All dicts must have the same number of keys.*\['a'\]; \['a', 'b'"),
        ([[X], [X, X]], ValueError, r"list objects of different lengths.*: \[1, 2\]"),
        ([3, 3], TypeError, "int objects, which can't be joined"),
        ([[1.0], [2.0]], TypeError, "float objects, which can't be joined"),
        ([Opaque(), Opaque()], TypeError, "Opaque objects, which can't be joined"),
        ([pack_sequence([Y])] * 2, TypeError, "PackedSequences can't be joined"),
    ],
)
def test_outputs_that_have_no_common_meaning_are_refused(outputs: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        gather(outputs, CPU)


def test_inputs_and_outputs_along_another_dimension() -> None:
    model = DataParallel(nn.Identity(), ["cpu"] * 2, dim=1)
    assert torch.equal(model(X), X)


# Devices


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device_ids names 1, but there are 0 CUDA devices; leave it out"):
        DataParallel(nn.Linear(2, 2), device_ids=[1])
    with pytest.raises(ValueError, match="output_device names 'cuda:0'"):
        DataParallel(nn.Linear(2, 2), device_ids=["cpu", "cpu"], output_device="cuda:0")
    with pytest.raises(ValueError, match="device_ids: expected CUDA devices or the CPU, got mps"):
        DataParallel(nn.Linear(2, 2), device_ids=["mps"])
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module to wrap, got Tensor"):
        DataParallel(X)  # type: ignore[arg-type]


def test_all_cuda_devices_are_the_default_and_what_is_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    module = nn.BatchNorm1d(2)
    model = DataParallel(module)
    assert (model.device_ids, model.output_device, model.dim) == ([0, 1, 2], 0, 0)
    expected = (
        r"module must have its parameters and buffers on device cuda:0 \(device_ids\[0\]\) but found one of them on "
        r"device: cpu \(weight on cpu, bias on cpu, running_mean on cpu and 2 more\); move it with module.to\("
    )
    with pytest.raises(RuntimeError, match=expected):
        model(X)
    others = DataParallel(module, [torch.device("cuda", 1), "cuda", "cpu"], output_device=-1)
    assert (others.device_ids, others.output_device) == ([1, 2, CPU], CPU)
    assert others.src_device_obj == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="names 3, but there are 3 CUDA devices"):
        DataParallel(module, [0, 3])


# The wrapper


def test_it_takes_torchs_arguments_and_is_exported() -> None:
    def names(function: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert samestep.DataParallel is DataParallel
    assert names(DataParallel.__init__) == names(nn.DataParallel.__init__)
    for method in ("scatter", "replicate", "parallel_apply", "gather"):
        assert names(getattr(DataParallel, method)) == names(getattr(nn.DataParallel, method))


def test_checkpoints_go_between_it_torchs_and_the_module() -> None:
    model, plain = DataParallel(nn.BatchNorm1d(2), ["cpu"] * 2), nn.BatchNorm1d(2)
    theirs = nn.DataParallel(nn.BatchNorm1d(2))
    plain.weight.data.fill_(7)
    assert list(model.state_dict()) == list(theirs.state_dict())
    model.load_state_dict(plain.state_dict())
    assert model.module.weight.tolist() == [7, 7]
    theirs.load_state_dict(model.state_dict())
    model.module.weight.data.fill_(0)
    model.load_state_dict(theirs.state_dict())
    assert model.module.weight.tolist() == [7, 7]


def test_attributes_fall_through_to_the_module() -> None:
    model = DataParallel(nn.Linear(2, 3), ["cpu"] * 2)
    assert model.out_features == 3
    assert model.weight is model.module.weight
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = model.nothing


def test_copies_and_pickles_work_on() -> None:
    model = DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
    expected = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert (twin.device_ids, twin.dim) == (model.device_ids, 0)
        for _ in range(2):
            assert torch.equal(twin(X), expected)
    assert copy.deepcopy(model).module.weight is not model.module.weight


def test_a_subclass_may_deal_out_and_join_in_its_own_way() -> None:
    class Listed(DataParallel):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            (rows,) = inputs
            return super().scatter((torch.stack(rows),), kwargs, device_ids)

        def gather(self, outputs: Any, output_device: Any) -> Any:
            assert output_device == self.output_device == CPU
            return list(outputs)

    for count in (1, 2):
        output = Listed(nn.Identity(), ["cpu"] * count)(list(X))
        assert torch.equal(torch.cat(output) if count == 2 else output, X)

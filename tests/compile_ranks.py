"""What the ranks of the tests of torch.compile do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import Recorder
from torch import Tensor, nn

from samestep.comm.base import Communicator
from samestep.launch.drop_in import replace_torchs_class
from samestep.parallel.distributed import DistributedDataParallel

__all__ = ["STYLES", "train"]

WIDTH = 520  # a layer is just above a MiB, the smallest bucket that dynamo's splitting takes
STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapper(net: Net, wrap: Callable[[Any], nn.Module], backend: Any) -> tuple[nn.Module, Any]:
    model = wrap(net)
    return model, torch.compile(model, backend=backend)


def inner(net: Net, wrap: Callable[[Any], nn.Module], backend: Any) -> tuple[nn.Module, Any]:
    model = wrap(torch.compile(net, backend=backend))
    return model, model


def in_place(net: Net, wrap: Callable[[Any], nn.Module], backend: Any) -> tuple[nn.Module, Any]:
    model = wrap(net)
    net.compile(backend=backend)
    return model, model


def step(net: Net, wrap: Callable[[Any], nn.Module], backend: Any) -> tuple[nn.Module, Any]:
    model = wrap(net)
    return model, torch.compile(lambda x: model(x) * 2 / 2, backend=backend)


STYLES = {f.__name__: f for f in (wrapper, inner, in_place, step)}


def train(comm: Communicator) -> dict[str, list[Any]]:
    """Train the same net in each style and without; return the differences, the compiled graphs, and the overlap.

    On one rank, our class stands in the place of torch's.
    """
    if comm.rank == 1:
        replace_torchs_class()
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.convert_frame import DistributedDataParallel as Known

    assert (Known is DistributedDataParallel) == (comm.rank == 1)

    graphs: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(sum(node.op.startswith("call") for node in module.graph.nodes))
        return aot_eager(module, inputs)

    def run(style: Callable[..., tuple[nn.Module, Any]]) -> tuple[list[Tensor], list[int]]:
        recorder = Recorder(comm)
        torch.manual_seed(1)
        net = Net()
        model, call = style(net, lambda m: DistributedDataParallel(m, process_group=recorder, bucket_cap_mb=1), backend)
        before_the_first_layer: list[int] = []
        net.layers[0].weight.register_post_accumulate_grad_hook(
            lambda _: before_the_first_layer.append(len(recorder.log))
        )
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            model.zero_grad()
            recorder.log.clear()
            loss = call(torch.randn(3, WIDTH, generator=generator)).square().mean()
            model.backward(loss, weight=1 + comm.rank)  # type: ignore[operator]
        return [p.grad.clone() for p in net.parameters() if p.grad is not None], before_the_first_layer

    plain, overlap = run(lambda net, wrap, _: (model := wrap(net), model))
    found: dict[str, list[Any]] = {"plain": [True, [], overlap]}
    for name, style in STYLES.items():
        torch._dynamo.reset()
        graphs.clear()
        got, overlap = run(style)
        found[name] = [all(map(torch.equal, plain, got)), list(graphs), overlap]
    assert Known._get_active_ddp_module() is None
    return found

"""The same bits as torch's DistributedDataParallel, over the cross product of what people combine."""

from __future__ import annotations

import pytest
from models import equal
from parity_cases import CHECKPOINTS, STRUCTURES, ByHand, cases, compare, train
from torch import nn

from samestep.comm.base import Communicator
from samestep.parallel.distributed import DistributedDataParallel
from samestep.testing.ranks import run_processes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_and_weights_have_the_bits_of_torch_and_of_averaging_by_hand(
    structure: str, checkpoints: str
) -> None:
    expected = len(list(cases(structure, checkpoints)))
    torch_takes_part = checkpoints != "reentrant" or structure in ("plain", "frozen")
    for count, with_torch, wrong in run_processes(compare, 2, structure, checkpoints, timeout_s=280):
        assert count == expected == 216
        assert with_torch == (expected if torch_takes_part else 0)
        assert wrong == []


def test_the_comparison_notices_gradients_that_were_not_averaged() -> None:
    assert all(run_processes(differences_without_exchange, 2))


def differences_without_exchange(communicator: Communicator) -> bool:
    case = next(cases("plain", "none"))

    def never(net: nn.Module) -> nn.Module:
        model = DistributedDataParallel(net)
        model.require_backward_grad_sync = False
        return model

    return not equal(train(case, communicator.rank, never), train(case, communicator.rank, ByHand))

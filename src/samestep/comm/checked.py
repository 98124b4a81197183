"""A communicator that asks all ranks whether they mean the same exchange before it starts one."""

from __future__ import annotations

import hashlib

import torch

from samestep.comm.base import Communicator, Work
from samestep.comm.ops import AllGather, AllToAll, Op, Recv, Send, describe, signature
from samestep.errors import MismatchError

__all__ = ["CheckedCommunicator"]


class CheckedCommunicator(Communicator):
    """Serve what `inner` serves, after one small all_gather that compares kind, reduction, dtype and shape.

    Ranks that ask for different things get a MismatchError that lists every rank's request, where a bare backend would
    hang, mix up numbers or kill the process; nothing was exchanged then, and the group stays usable. Costs one small
    exchange per operation. Sends and receives pass unchecked.
    """

    _scales = True

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def _start(self, op: Op) -> Work:
        if not isinstance(op, Send | Recv):
            self._compare(op)
        return self.inner.start(op)

    def _compare(self, op: Op) -> None:
        mine = torch.tensor([_digest(signature(op)), *_lengths(op, self.size)], device=self.device)
        everyone = mine.new_empty((self.size, len(mine)))
        self.inner.start(AllGather(everyone, mine)).wait()
        sends, receives = everyone[:, 1 : self.size + 1], everyone[:, self.size + 1 :]
        if bool((everyone[:, 0] == mine[0]).all()) and torch.equal(sends, receives.t()):
            return
        asked = self.inner.all_gather_object(describe(op))
        lines = "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(asked))
        raise MismatchError(f"ranks ask for different exchanges; make the same call on every rank:\n{lines}")

    def _split(self, ranks: tuple[int, ...]) -> Communicator | None:
        part = self.inner._split(ranks)
        return None if part is None else CheckedCommunicator(part)

    def close(self) -> None:
        self.inner.close()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _lengths(op: Op, size: int) -> list[int]:
    """What this rank sends to and receives from each; only all_to_all's may differ from pair to pair."""
    if isinstance(op, AllToAll):
        return [*op.input_splits, *op.output_splits]
    return [0] * (2 * size)

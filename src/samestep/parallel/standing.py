"""What a rank says of its own backward, and what all have found out about those before."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from samestep.errors import ReplicaError
from samestep.parallel.control import Control, Outcome, Verdict

__all__ = ["Standing"]


class Standing:
    """Rank `rank`'s standing.

    outcome  what it says of the backward under way, or of the next
    void     whether its last backward has raised what all ranks found out in its exchange
    skipped  whether the last exchange that was looked at made all ranks skip their step
    """

    def __init__(self, control: Control, rank: int) -> None:
        self.outcome, self.void, self.skipped = Outcome.DONE, False, False
        self._control, self._rank = control, rank
        self._unread: Tensor | None = None

    def put_off(self, tail: Tensor) -> Verdict:
        """Keep the control numbers for later; until then all counts as well."""
        self._unread, self.skipped = tail.clone(), False
        return Verdict()

    def catch_up(self) -> Verdict | None:
        """Look at what was put off, if anything was."""
        tail, self._unread = self._unread, None
        return None if tail is None else self._control.judge(tail)

    def note(self, verdict: Verdict, *, heed: bool = True) -> None:
        """Take note of `verdict`, and tell the user: raise ReplicaError if the step must not be taken, unless told not
        to heed that, or warn that it is skipped."""
        self.skipped = verdict.error is None and bool(verdict.skipping)
        if verdict.error is not None and heed:
            self.void = True
            raise verdict.error
        if self.skipped and self._rank == 0:
            ranks = ", ".join(map(str, verdict.skipping))
            warnings.warn(f"all ranks skip a step, as rank(s) {ranks} called skip_step()", stacklevel=2)

    def refuse_late_news(self) -> None:
        """Raise ReplicaError if the step before was to be skipped, which was found out only now."""
        if self.skipped:
            raise ReplicaError(
                f"rank {self._rank}: a rank asked to skip the last step, but this one went on without having looked; "
                "on a device, read step_skipped before optimizer.step()"
            )

    def refuse_within_backward(self) -> None:
        """Raise ReplicaError if this thread is running a backward."""
        if torch._C._current_graph_task_id() != -1:
            raise ReplicaError(
                f"rank {self._rank}: skip_step() was called while backward was running; call it when backward has "
                "returned or raised, or in its place"
            )

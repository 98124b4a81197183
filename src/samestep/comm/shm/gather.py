"""How ranks come to share memory: each offers some, maps what the others offer, and all do it or nobody does."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace

from samestep.comm.base import Communicator
from samestep.comm.shm.kernel import free_bytes, missing
from samestep.comm.shm.memory import Mapping, Offer, map_peer, offered

__all__ = ["Shared", "Unshared", "refusal", "share"]


@dataclass(frozen=True)
class Unshared:
    """Why the ranks of a group do not share memory: the first reason in rank order, the same text on all ranks."""

    reason: str


@dataclass(frozen=True)
class Shared:
    """The memory of every rank, mapped here, and the number and start time of every rank's process."""

    mappings: tuple[Mapping, ...]
    processes: tuple[tuple[int, int], ...]
    kernels: bool  # whether all have, and want to use, the same compiled loops


def share(control: Communicator, num_bytes: int, kernels: int = 0) -> Shared | Unshared:
    """Offer `num_bytes` of zeros to each other and map what the others offer; all ranks of `control` call it.

    Two exchanges of `control`: one of the offers, one of how mapping them went. Memory of which some rank could not map
    a part is given back on all ranks.
    """
    with contextlib.ExitStack() as until_all_have_mapped:
        offer, own, lacking = Offer(), None, missing()
        if not lacking:
            try:
                _require_room(num_bytes, control.size)
                offer, own = until_all_have_mapped.enter_context(offered(num_bytes))
            except OSError as error:
                why = error.strerror or error
                lacking = f"{num_bytes} bytes of memory to share could not be had ({why})"
                if error.filename is not None:
                    lacking = f"{error.filename} cannot be read ({why})"
        offers: list[Offer] = control.all_gather_object(
            Offer(refusal=lacking) if lacking else replace(offer, kernels=kernels)
        )
        mappings, reason = _map_all(offers, own, control.rank)
        reasons: list[str] = control.all_gather_object(reason)
    for reason in filter(None, reasons):
        return Unshared(reason)
    if own is not None:
        own.clear_token()
    same = kernels > 0 and all(o.kernels == kernels for o in offers)
    return Shared(mappings, tuple((o.pid, o.started) for o in offers), same)


def _require_room(num_bytes: int, size: int) -> None:
    """Raise OSError if there is not enough memory for all: Linux would look for some by ending processes."""
    free = free_bytes()
    if size * num_bytes > free:
        raise OSError(errno.ENOMEM, f"the host has {free} bytes left for {size} ranks")


def refusal(offers: Sequence[Offer], rank: int) -> str:
    """Return why `rank` cannot map what the others offer, as far as that can be seen without trying, or nothing."""
    mine = offers[rank]
    for other, offer in enumerate(offers):
        if offer.refusal:
            return f"rank {other}: {offer.refusal}"
    for other, offer in enumerate(offers):
        if offer.host != mine.host:
            return f"ranks {min(rank, other)} and {max(rank, other)} are on different hosts, or in different containers"
        if offer.uid != mine.uid:
            low, high = sorted((rank, other))
            return f"ranks {low} and {high} run as different users ({offers[low].uid} and {offers[high].uid})"
    return ""


def _map_all(offers: Sequence[Offer], own: Mapping | None, rank: int) -> tuple[tuple[Mapping, ...], str]:
    reason = refusal(offers, rank)
    if reason or own is None:
        return (), reason
    mappings = []
    for other, offer in enumerate(offers):
        try:
            mappings.append(own if other == rank else map_peer(offer))
        except OSError as error:
            return (), f"rank {rank} cannot map the memory of rank {other} ({error.strerror or error})"
    return tuple(mappings), ""

"""The ranks of a job. Those of many are in `mesh`, which is loaded when there are many."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sparrow.distributed.collectives import Meter, Pending

T = TypeVar("T")


def leads() -> bool:
    """Returns whether this process is rank 0 of its job, or alone."""
    return int(os.environ.get("RANK", "0")) == 0


class Lobby:
    """The ranks of a job before they are a `World`, which needs settings that perhaps only rank 0
    knows.
    """

    rank = 0
    size = 1

    def broadcast(self, purpose: str, value: T, slow: bool = False) -> T:
        """Returns rank 0's value on every rank. Plain data that JSON can hold. slow: see
        `World.broadcast`.
        """
        return value


class Grid(NamedTuple):
    """The ranks of a job: hosts, and ranks a host."""

    hosts: int
    local_size: int

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.hosts * self.local_size


class World:
    """All ranks of a job on a grid of hosts. This one is a job of one, in which collectives return
    what they are given.

    meter: counts what is sent. A collective is given the dim that it runs over, "host" across hosts
    or "local" within one, or "all". Its argument `what` names the purpose, for the meter and for
    errors.
    """

    def __init__(self) -> None:
        self.rank = self.host = self.local_rank = 0
        self.size = self.hosts = self.local_size = 1
        self.timeout = timedelta(minutes=10)  # how long a rank waits for the others
        self.name = ""  # a name that no other job and no earlier attempt had
        self.meter = Meter()
        self.step = 0
        self.stage = "start"  # what this rank is doing, for ranks that wait for it
        self._links: dict[str, list[str]] = {}

    def watched(self, remedy: str = "") -> AbstractContextManager[None]:
        """A context in which a rank that waits in vain raises a UserError that says for whom; it
        ends with `remedy`.
        """
        return nullcontext()

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """A context in which this rank is at `stage`; errors and the other ranks name it."""
        before = self.stage
        self.stage = stage
        yield
        self.stage = before  # not after an error, which happened at this stage

    @property
    def has_lanes(self) -> bool:
        """Whether stages of a step that overlap have groups of their own, the lanes."""
        return False

    def open_lanes(self, dims: Iterable[str]) -> None:
        """Make the groups of the lanes along some dims, where they are not made yet. All ranks must
        call it alike.
        """

    def ranks(self, dim: str) -> list[int]:
        """Returns the members of this rank's group along a dim; "host" runs across hosts, "local"
        within one.
        """
        if dim == "all":
            return list(range(self.size))
        if dim == "host":
            return [h * self.local_size + self.local_rank for h in range(self.hosts)]
        return [self.host * self.local_size + i for i in range(self.local_size)]

    def link(self, peer: int) -> str:
        """Returns what lies between this rank and another: "self", "host" or "network", see
        `Meter`.
        """
        if peer == self.rank:
            return "self"
        return "host" if peer // self.local_size == self.host else "network"

    # -- collectives -------------------------------------------------------------------------------

    def all_to_all(
        self,
        purpose: str,
        parts: Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        dim: str = "all",
    ) -> Pending[list[Tensor]]:
        """Send a part to each member along a dim. Returns the parts that they send to this rank.

        Args:
            purpose: what it is for, for the meter and for errors.
            parts: part i [n_i] is for the i-th member.
            sizes: how many elements each member sends here. If it is None, the sizes are sent
                first.
            dim: along which the members are.
        """
        counts = [part.numel() for part in parts]
        if sizes is None:
            unit_counts = [1] * len(counts)
            begun_sizes = self.all_to_all_flat(
                f"{purpose}, sizes", torch.tensor(counts), unit_counts, unit_counts, dim
            )
            sizes = begun_sizes.wait().tolist()
        part_sizes = list(sizes)
        begun = self.all_to_all_flat(purpose, torch.cat(list(parts)), counts, part_sizes, dim)
        return Pending(lambda: list(begun.wait().split(part_sizes)))

    def all_to_all_flat(
        self,
        purpose: str,
        send_N: Tensor,
        counts: Sequence[int],
        sizes: Sequence[int],
        dim: str = "all",
        lane: str = "",
    ) -> Pending[Tensor]:
        """Like `all_to_all`, with all parts in one tensor: counts[i] elements for
        member i, in order.

        lane: one of LANES that are open along the dim; else it takes the group of all that is not
        part of a step.
        """
        self._count_parts(purpose, send_N, counts, dim)
        return Pending(lambda: send_N)

    def _count_parts(self, purpose: str, send_N: Tensor, counts: Sequence[int], dim: str) -> None:
        """Count what goes to each member along a dim, by the kind of link."""
        if dim not in self._links:
            self._links[dim] = [self.link(member) for member in self.ranks(dim)]
        for link, count in zip(self._links[dim], counts, strict=True):
            self.meter.add(purpose, link, count * send_N.element_size())

    def all_sum(self, purpose: str, values: Tensor, dim: str = "all") -> Tensor:
        """Returns the sum over the ranks along a dim; it is computed in place."""
        return values

    def all_gather(self, purpose: str, values: Tensor, same: bool = False) -> list[Tensor]:
        """Returns every rank's tensor [n_r, ...], in the ranks' order. same: whether all n_r are
        equal.
        """
        return [values]

    def broadcast(self, purpose: str, value: T, slow: bool = False) -> T:
        """Returns rank 0's value on every rank.

        Args:
            purpose: what it is for, for errors.
            value: plain data that JSON can hold.
            slow: whether the others wait for rank 0 as long as it lives, and not for a time-out.
                See `watched`.
        """
        return value

    def broadcast_tensor(self, purpose: str, values: Tensor, slow: bool = False) -> Tensor:
        """Returns rank 0's tensor of the host, in place. See `broadcast`."""
        return values

    def gathered(self, purpose: str, value: T) -> list[T]:
        """Returns every rank's value, in the ranks' order. Values must be plain data that JSON can
        hold.
        """
        return [value]

    def barrier(self, purpose: str) -> None:
        """Wait until every rank is here."""

    def leave(self) -> None:
        """Destroy the groups made here, whose threads wake a hundred times a second. The process
        stays in the job.
        """

    def end(self) -> None:
        """Leave the job."""

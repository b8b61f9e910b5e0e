from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparrow.core.errors import UserError
from sparrow.distributed.collectives import Meter, Pending, all_to_all
from sparrow.distributed.watch import Watch, attempt

# what Gloo and NCCL say when another rank does not answer
SIGNS = ("Connection closed", "Connection reset", "Timed out", "timed out", "timeout", "Broken pipe", "NCCL", "gloo")


def leads() -> bool:
    """Whether this process is its job's rank 0, or alone."""
    return int(os.environ.get("RANK", "0")) == 0


class World:
    """All ranks of a job on a grid of hosts, rank = host * local_size + local rank; a job of one has no groups.

    mesh: a DeviceMesh of dims ("host", "local"), None for one rank. meter: counts what is sent. Collectives are named
    by the dim they run over, or "all"; `what` names the purpose for the meter and for errors.
    """

    def __init__(self, mesh: DeviceMesh | None = None, timeout_s: float = 600) -> None:
        self.mesh, self.timeout = mesh, timedelta(seconds=timeout_s)
        self.rank = mesh.get_rank() if mesh is not None else 0
        self.hosts, self.local_size = mesh.shape if mesh is not None else (1, 1)
        self.size = self.hosts * self.local_size
        self.host, self.local_rank = divmod(self.rank, self.local_size)
        self.meter = Meter()
        self.step, self.stage = 0, "start"  # what this rank is at, for whoever waits for it
        self._groups: dict[str, dist.ProcessGroup] = {}
        if mesh is not None:
            self._groups = {"all": dist.group.WORLD, "host": mesh.get_group("host"), "local": mesh.get_group("local")}  # type: ignore[dict-item]

    @classmethod
    def begin(cls, device: str = "cpu", local_size: int | None = None, timeout_s: float = 600) -> World:
        """The job that torchrun started this process in, or one of its own; UserError when the grid does not fit.

        local_size: ranks a host, as torchrun says unless told.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 or not dist.is_available():
            return cls()
        local = local_size or int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if size % local:
            raise UserError(f"{size} ranks do not divide into hosts of {local}; start as many on every host")
        kind, timeout = torch.device(device).type, timedelta(seconds=timeout_s)
        grid = torch.arange(size).view(-1, local)
        try:
            if not dist.is_initialized():
                store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timeout, rank=rank, world_size=size,
                    store=dist.PrefixStore(f"sparrow/{attempt()}", store),
                )  # fmt: skip
            # made here and not by the mesh, whose groups would wait for half an hour
            groups = [dist.new_subgroups_by_enumeration(part.tolist(), timeout=timeout)[0] for part in (grid.T, grid)]
        except RuntimeError as error:
            if not _lost(error):
                raise
            raise UserError(f"not all of {size} ranks came within {timeout_s:g} s ({_line(error)})") from error
        return cls(DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=("host", "local")), timeout_s)

    @contextmanager
    def watched(self, remedy: str = "") -> Iterator[None]:
        """In which a rank that waits for others in vain says for whom, as a UserError. remedy: behind what it says."""
        if self.size == 1:
            yield
            return
        watch = Watch(self.rank, self.size, lambda: f"step {self.step}, {self.stage}")
        try:
            yield
        except Exception as error:
            with _undisturbed():
                if not _lost(error):
                    watch.end(_line(error))
                    raise
                why = watch.explain(_line(error))
                watch.end(why, waited=True)
                raise UserError(why + remedy) from error
        finally:
            watch.stop()

    def group(self) -> dist.ProcessGroup:
        """Another group of all ranks, whose collectives overlap those of the first."""
        made: dist.ProcessGroup = dist.new_group(timeout=self.timeout)
        return made

    def ranks(self, dim: str) -> list[int]:
        """The members of this rank's group along a dim, in order; "host" runs across hosts, "local" within one."""
        if dim == "all":
            return list(range(self.size))
        if dim == "host":
            return [h * self.local_size + self.local_rank for h in range(self.hosts)]
        return [self.host * self.local_size + i for i in range(self.local_size)]

    def link(self, other: int) -> str:
        """The kind of link to another rank."""
        if other == self.rank:
            return "self"
        return "host" if other // self.local_size == self.host else "network"

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """Says what this rank is at."""
        before, self.stage = self.stage, stage
        yield
        self.stage = before  # not after an error: it happened here

    # -- collectives --------------------------------------------------------------------------------------------

    def all_to_all(
        self, what: str, parts: Sequence[Tensor], sizes: Sequence[int] | None = None, dim: str = "all"
    ) -> Pending[list[Tensor]]:
        """Part i [n_i] to the i-th member along a dim; gives the parts that they sent here, of `sizes` elements.

        Where sizes is None they travel first.
        """
        members = self.ranks(dim)
        if sizes is None:
            counts = [torch.tensor([part.numel()]) for part in parts]
            sizes = [int(n) for n in self.all_to_all(f"{what}, sizes", counts, [1] * len(members), dim).wait()]
        for member, part in zip(members, parts, strict=True):
            self.meter.add(what, self.link(member), part.numel() * part.element_size())
        begun = all_to_all(parts, sizes, self._groups.get(dim))

        def finish() -> list[Tensor]:
            with self.at(what):
                return begun.wait()

        return Pending(finish)

    def all_sum(self, what: str, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            self.count(what, values, 2)
            with self.at(what):
                dist.all_reduce(values)
        return values

    def all_gather(self, what: str, values: Tensor, same: bool = False) -> list[Tensor]:
        """Every rank's tensor [n_r, ...], in the ranks' order; the first sizes may differ unless they are the same."""
        if self.size == 1:
            return [values]
        with self.at(what):
            sizes = [torch.tensor([len(values)]) for _ in range(self.size)]
            if not same:
                self.count(f"{what}, sizes", sizes[0], self.size)
                dist.all_gather(sizes, torch.tensor([len(values)]))
            most = max(int(n) for n in sizes)
            padded = torch.cat([values, values.new_zeros(most - len(values), *values.shape[1:])])
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            self.count(what, padded, self.size)
            dist.all_gather(parts, padded.contiguous())
        return [part[: int(n)] for part, n in zip(parts, sizes, strict=True)]

    def barrier(self, what: str) -> None:
        """Until every rank is here."""
        if self.size > 1:
            with self.at(what):
                dist.barrier()

    def end(self) -> None:
        """Leave the job."""
        if self.size > 1:
            dist.destroy_process_group()

    def count(self, what: str, values: Tensor, phases: int) -> None:
        """Count a collective on all ranks of so many phases, such as 2 of an all-reduce."""
        count = values.numel() * values.element_size() * phases * (self.size - 1) // self.size
        self.meter.add(what, "network" if self.hosts > 1 else "host", count)


def _lost(error: Exception) -> bool:
    """Whether a collective failed because another rank did."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def _line(error: Exception) -> str:
    """What an error says, without Gloo's places in its source and its advice."""
    text = re.sub(r"\[/\S*\] |\. This is typically.*", "", str(error).strip())
    return next(iter(text.splitlines()), type(error).__name__)[:300]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """In which a SIGTERM does not end this process: torchrun sends one as soon as it sees another rank end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

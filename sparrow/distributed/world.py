from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparrow.core.errors import UserError
from sparrow.distributed import limits
from sparrow.distributed.attempt import agree
from sparrow.distributed.collectives import Meter, Pending, all_to_all
from sparrow.distributed.devices import own_device
from sparrow.distributed.watch import Watch

T = TypeVar("T")
# what Gloo and NCCL say when another rank does not answer
SIGNS = (
    "Connection closed",
    "Connection reset",
    "likely closed",
    "Timed out",
    "timed out",
    "timeout",
    "Broken pipe",
    "NCCL",
    "gloo",
)


def leads() -> bool:
    """Whether this process is its job's rank 0, or alone."""
    return int(os.environ.get("RANK", "0")) == 0


class Lobby:
    """The ranks of a job before they are a `World`, which begins with settings that rank 0 may know alone."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = _size()
        self._timeout_s = timeout_s
        if self.size > 1:
            limits.allow(self.size)
            with _coming(self.size, timeout_s):
                self._store = _part(self.size, timedelta(seconds=timeout_s))

    def told(self, what: str, value: T) -> T:
        """Rank 0's value on every rank; of what JSON can say."""
        with _coming(self.size, self._timeout_s):
            if self.rank == 0:
                self._store.set(what, json.dumps(value))
            found: T = json.loads(self._store.get(what))
        return found


class World:
    """All ranks of a job on a grid of hosts, rank = host * local_size + local rank; a job of one has no groups.

    mesh: a DeviceMesh of dims ("host", "local"), None for one rank. meter: counts what is sent. Collectives are named
    by the dim they run over, or "all"; `what` names the purpose for the meter and for errors.
    """

    def __init__(self, mesh: DeviceMesh | None = None, timeout_s: float = 600) -> None:
        self.mesh = mesh
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = mesh.get_rank() if mesh is not None else 0
        self.hosts, self.local_size = mesh.shape if mesh is not None else (1, 1)
        self.size = self.hosts * self.local_size
        self.host, self.local_rank = divmod(self.rank, self.local_size)
        self.name = ""  # that no other job and no earlier attempt had
        self.meter = Meter()
        self.step = 0
        self.stage = "start"  # what this rank is at, for whoever waits for it
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []
        self._links: dict[str, list[str]] = {}
        if mesh is not None:
            self._made = [mesh.get_group("host"), mesh.get_group("local")]
            self._groups = {"all": dist.group.WORLD, "host": mesh.get_group("host"), "local": mesh.get_group("local")}  # type: ignore[dict-item]

    @classmethod
    def begin(cls, device: str = "cpu", local_size: int | None = None, timeout_s: float = 600) -> World:
        """The job that torchrun started this process in, or one of its own; UserError when the grid does not fit.

        local_size: ranks a host, as torchrun says unless told.
        """
        size = _size()
        if size == 1:
            return cls()
        limits.allow(size)
        local = local_size or int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if size % local:
            raise UserError(f"{size} ranks do not divide into hosts of {local}; start as many on every host")
        kind, timeout = torch.device(device).type, timedelta(seconds=timeout_s)
        own = own_device(device, int(os.environ["RANK"]), local)
        if own is not None:
            torch.cuda.set_device(own)  # which "cuda" means from now on
        with _coming(size, timeout_s):
            if not dist.is_initialized():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
                    timeout=timeout,
                    rank=int(os.environ["RANK"]),
                    world_size=size,
                    store=_part(size, timeout),
                    device_id=own,
                )
            told = torch.zeros(size, dtype=torch.int64)
            told[dist.get_rank()] = local
            dist.all_reduce(told)
            if len(hosts := set(told.tolist())) > 1:  # before groups are made, for which some would wait in vain
                raise UserError(f"hosts of {' and '.join(map(str, sorted(hosts)))} ranks; start as many on every host")
            grid = torch.arange(size).view(-1, local)
            # made here and not by the mesh, whose groups would wait for half an hour
            groups = [dist.new_subgroups_by_enumeration(part.tolist(), timeout=timeout)[0] for part in (grid.T, grid)]
            world = cls(DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=("host", "local")), timeout_s)
            world.name = world.told("name", uuid.uuid4().hex)
            return world

    @contextmanager
    def watched(self, remedy: str = "") -> Iterator[None]:
        """In which a rank that waits for others in vain says for whom, as a UserError. remedy: behind what it says."""
        if self.size == 1:
            yield
            return
        watch = Watch(self.name, self.rank, self.size, lambda: f"step {self.step}, {self.stage}", self.timeout)
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
        self._made.append(made)
        return made

    def ranks(self, dim: str) -> list[int]:
        """The members of this rank's group along a dim, in order; "host" runs across hosts, "local" within one."""
        if dim == "all":
            return list(range(self.size))
        if dim == "host":
            return [h * self.local_size + self.local_rank for h in range(self.hosts)]
        return [self.host * self.local_size + i for i in range(self.local_size)]

    def link(self, other: int) -> str:
        """What lies between this rank and another: "self", "host" or "network", see `Meter`."""
        if other == self.rank:
            return "self"
        return "host" if other // self.local_size == self.host else "network"

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """Within it this rank is at `stage`: errors and the other ranks name it."""
        before = self.stage
        self.stage = stage
        yield
        self.stage = before  # not after an error: it happened here

    # -- collectives --------------------------------------------------------------------------------------------

    def all_to_all(
        self, what: str, parts: Sequence[Tensor], sizes: Sequence[int] | None = None, dim: str = "all"
    ) -> Pending[list[Tensor]]:
        """Part i [n_i] to the i-th member along a dim; gives the parts that they sent here, of `sizes` elements.

        Where sizes is None they travel first.
        """
        counts = [part.numel() for part in parts]
        if sizes is None:
            ones = [1] * len(counts)
            sizes = self.all_to_all_flat(f"{what}, sizes", torch.tensor(counts), ones, ones, dim).wait().tolist()
        begun, given = self.all_to_all_flat(what, torch.cat(list(parts)), counts, sizes, dim), list(sizes)
        return Pending(lambda: list(begun.wait().split(given)))

    def all_to_all_flat(
        self, what: str, send_N: Tensor, counts: Sequence[int], sizes: Sequence[int], dim: str = "all"
    ) -> Pending[Tensor]:
        """`all_to_all` of parts that lie one behind the other, counts[i] elements for member i; as its result does."""
        for link, count in self._by_link(dim, counts).items():
            self.meter.add(what, link, count * send_N.element_size())
        begun = all_to_all(send_N, counts, sizes, self._groups.get(dim))

        def finish() -> Tensor:
            with self.at(what):
                return begun.wait()

        return Pending(finish)

    def _by_link(self, dim: str, counts: Sequence[int]) -> dict[str, int]:
        """Sums of what goes to the members along a dim, by the kind of link."""
        if dim not in self._links:
            self._links[dim] = [self.link(member) for member in self.ranks(dim)]
        found: dict[str, int] = {}
        for link, count in zip(self._links[dim], counts, strict=True):
            found[link] = found.get(link, 0) + count
        return found

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

    def told(self, what: str, value: T) -> T:
        """Rank 0's value on every rank; of what JSON can say."""
        if self.size == 1:
            return value
        said = _bytes(value if self.rank == 0 else None)
        size = torch.tensor([len(said)])
        with self.at(what):
            dist.broadcast(size, 0)
            said = said if self.rank == 0 else said.new_empty(int(size))
            dist.broadcast(said, 0)
        found: T = json.loads(said.numpy().tobytes())
        return found

    def gathered(self, what: str, value: T) -> list[T]:
        """Every rank's value, in the ranks' order; of what JSON can say."""
        return [json.loads(said.numpy().tobytes()) for said in self.all_gather(what, _bytes(value))]

    def barrier(self, what: str) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with self.at(what):
                dist.barrier()

    def leave(self) -> None:
        """Let go of the groups made here, whose threads wake a hundred times a second; the process stays in the job."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made = []

    def end(self) -> None:
        """Leave the job."""
        if self.size > 1:
            dist.destroy_process_group()

    def count(self, what: str, values: Tensor, phases: int) -> None:
        """Count a collective on all ranks of so many phases, such as 2 of an all-reduce."""
        count = values.numel() * values.element_size() * phases * (self.size - 1) // self.size
        self.meter.add(what, "network" if self.hosts > 1 else "host", count)


def _size() -> int:
    """How many ranks the job has that this process was started for."""
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_available() else 1


_ATTEMPT: list[dist.Store] = []
_PARTS = itertools.count()


def _part(size: int, timeout: timedelta) -> dist.Store:
    """A part of the job's store: no other attempt has it, and nothing else in this one."""
    if not _ATTEMPT:  # agreed on once: who has not yet left one agreement would take part in the next
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
        _ATTEMPT.append(dist.PrefixStore(f"sparrow/{agree(store, rank, size, timeout)}", store))
    _ATTEMPT[0].set_timeout(timeout)
    return dist.PrefixStore(str(next(_PARTS)), _ATTEMPT[0])  # ranks ask for the same parts, one after the other


@contextmanager
def _coming(size: int, timeout_s: float) -> Iterator[None]:
    """In which the ranks come together; UserError when not all do."""
    try:
        yield
    except RuntimeError as error:
        if not _lost(error):
            raise
        raise UserError(f"not all of {size} ranks came within {timeout_s:g} s ({_line(error)})") from error


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


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

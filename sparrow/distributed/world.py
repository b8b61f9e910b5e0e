from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
LANES = ("ids", "vectors", "gradients")  # stages of a step that overlap; dense gradients have a group of their own too
REMEMBERED = 1000  # launches
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
    """Returns whether this process is rank 0 of its job, or alone."""
    return int(os.environ.get("RANK", "0")) == 0


class Lobby:
    """The ranks of a job before they are a `World`, which needs settings that perhaps only rank 0 knows."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = _size()
        self._timeout_s = timeout_s
        if self.size > 1:
            limits.allow(self.size)
            with _coming(self.size, timeout_s):
                self._store = _part(self.size, timedelta(seconds=timeout_s))

    def told(self, what: str, value: T) -> T:
        """Returns rank 0's value on every rank. It must be plain data that JSON can hold."""
        with _coming(self.size, self._timeout_s):
            if self.rank == 0:
                self._store.set(what, json.dumps(value))
            found: T = json.loads(self._store.get(what))
        return found


class World:
    """All ranks of a job on a grid of hosts, rank = host * local_size + local rank; a job of one has no groups.

    mesh: a DeviceMesh of dims ("host", "local"), None for one rank. meter: counts what is sent. A collective is given
    the dim that it runs over, or "all". Its argument `what` names the purpose, for the meter and for errors.

    An NCCL group is one queue, so stages of a step that overlap have groups of their own, the lanes. NCCL can deadlock
    where ranks launch on several groups in different orders. So one thread launches at a time, in the order of the
    program: the main thread, and during a backward autograd's thread of the device. `launched` has the last launches,
    as lane, dim and purpose; it is the same on every rank.
    """

    def __init__(self, mesh: DeviceMesh | None = None, timeout_s: float = 600) -> None:
        self.mesh = mesh
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = mesh.get_rank() if mesh is not None else 0
        self.hosts, self.local_size = mesh.shape if mesh is not None else (1, 1)
        self.size = self.hosts * self.local_size
        self.host, self.local_rank = divmod(self.rank, self.local_size)
        self.name = ""  # a name that no other job and no earlier attempt had
        self.meter = Meter()
        self.step = 0
        self.stage = "start"  # what this rank is doing, for ranks that wait for it
        self.launched: deque[tuple[str, str, str]] = deque(maxlen=REMEMBERED)
        self._groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []
        self._links: dict[str, list[str]] = {}
        if mesh is not None:
            self._made = [mesh.get_group("host"), mesh.get_group("local")]
            self._groups["", "all"] = dist.group.WORLD  # type: ignore[assignment]
            self._groups |= {("", dim): mesh.get_group(dim) for dim in ("host", "local")}

    @classmethod
    def begin(cls, device: str = "cpu", local_size: int | None = None, timeout_s: float = 600) -> World:
        """Returns the job that torchrun started this process in, or a job of one.

        Args:
            device: "cpu", "cuda" or such as "cuda:1".
            local_size: ranks on each host; by default as torchrun says.
            timeout_s: how long a rank waits for the others before it gives up.

        Raises:
            UserError: when the ranks do not fill a grid, or do not all come.
        """
        size, kind, timeout = _size(), torch.device(device).type, timedelta(seconds=timeout_s)
        if size == 1:
            if torch.device(device).index is not None:
                torch.cuda.set_device(device)  # kernels run on the device that is set
            return cls()
        limits.allow(size, on_gpus=kind == "cuda")
        local = local_size or int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if size % local:
            raise UserError(f"{size} ranks do not divide into hosts of {local}; start as many on every host")
        own = own_device(device, int(os.environ["RANK"]), local)
        if own is not None:
            torch.cuda.set_device(own)  # from now on "cuda" means this device
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
            if len(hosts := set(told.tolist())) > 1:  # before groups are made: some ranks would wait in vain for these
                raise UserError(f"hosts of {' and '.join(map(str, sorted(hosts)))} ranks; start as many on every host")
            grid = torch.arange(size).view(-1, local)
            # made here and not by the mesh, because groups of the mesh would wait for half an hour
            groups = [_cut(part, timeout) for part in (grid.T, grid)]
            world = cls(DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=("host", "local")), timeout_s)
            world.name = world.told("name", uuid.uuid4().hex)
            return world

    @contextmanager
    def watched(self, remedy: str = "") -> Iterator[None]:
        """A context in which a rank that waits in vain raises a UserError that says for whom; it ends with `remedy`."""
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
        """Returns another group of all ranks, whose collectives run beside those of the first."""
        made: dist.ProcessGroup = dist.new_group(timeout=self.timeout)
        self._made.append(made)
        return made

    @property
    def has_lanes(self) -> bool:
        """Whether lanes have groups of their own. Gloo needs none: a group of it has several threads."""
        return self.mesh is not None and self.mesh.device_type == "cuda"

    def open_lanes(self, dims: Iterable[str]) -> None:
        """Make the groups of the lanes along some dims, where they are not made yet. All ranks must call it alike."""
        if not self.has_lanes:
            return
        grid = torch.arange(self.size).view(-1, self.local_size)
        for dim in dims:
            for lane in LANES:
                if (lane, dim) in self._groups:
                    continue
                if dim == "all":
                    self._groups[lane, dim] = self.group()
                else:
                    self._groups[lane, dim] = _cut(grid.T if dim == "host" else grid, self.timeout)
                    self._made.append(self._groups[lane, dim])

    def launches(self, what: str, lane: str = "", dim: str = "all") -> None:
        """Note that this rank is about to launch a collective."""
        self.launched.append((lane, dim, what))

    def ranks(self, dim: str) -> list[int]:
        """Returns the members of this rank's group along a dim; "host" runs across hosts, "local" within one."""
        if dim == "all":
            return list(range(self.size))
        if dim == "host":
            return [h * self.local_size + self.local_rank for h in range(self.hosts)]
        return [self.host * self.local_size + i for i in range(self.local_size)]

    def link(self, other: int) -> str:
        """Returns what lies between this rank and another: "self", "host" or "network", see `Meter`."""
        if other == self.rank:
            return "self"
        return "host" if other // self.local_size == self.host else "network"

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """A context in which this rank is at `stage`; errors and the other ranks name it."""
        before = self.stage
        self.stage = stage
        yield
        self.stage = before  # not after an error, which happened at this stage

    # -- collectives --------------------------------------------------------------------------------------------

    def all_to_all(
        self, what: str, parts: Sequence[Tensor], sizes: Sequence[int] | None = None, dim: str = "all"
    ) -> Pending[list[Tensor]]:
        """Send a part to each member along a dim. Returns the parts that they send to this rank.

        Args:
            what: the purpose, for the meter and for errors.
            parts: part i [n_i] is for the i-th member.
            sizes: how many elements each member sends here. If it is None, the sizes are sent first.
            dim: along which the members are.
        """
        counts = [part.numel() for part in parts]
        if sizes is None:
            ones = [1] * len(counts)
            sizes = self.all_to_all_flat(f"{what}, sizes", torch.tensor(counts), ones, ones, dim).wait().tolist()
        begun, given = self.all_to_all_flat(what, torch.cat(list(parts)), counts, sizes, dim), list(sizes)
        return Pending(lambda: list(begun.wait().split(given)))

    def all_to_all_flat(
        self, what: str, send_N: Tensor, counts: Sequence[int], sizes: Sequence[int], dim: str = "all", lane: str = ""
    ) -> Pending[Tensor]:
        """Returns what `all_to_all` does, with all parts in one tensor: counts[i] elements for member i, in order.

        lane: one of LANES that are open along the dim; else it takes the group of all that is not part of a step.
        """
        for link, count in self._by_link(dim, counts).items():
            self.meter.add(what, link, count * send_N.element_size())
        self.launches(what, lane, dim)
        begun = all_to_all(send_N, counts, sizes, self._groups.get((lane, dim), self._groups.get(("", dim))))

        def finish() -> Tensor:
            with self.at(what):
                return begun.wait()

        return Pending(finish)

    def _by_link(self, dim: str, counts: Sequence[int]) -> dict[str, int]:
        """Returns how much goes to the members along a dim, by the kind of link."""
        if dim not in self._links:
            self._links[dim] = [self.link(member) for member in self.ranks(dim)]
        found: dict[str, int] = {}
        for link, count in zip(self._links[dim], counts, strict=True):
            found[link] = found.get(link, 0) + count
        return found

    def all_sum(self, what: str, values: Tensor) -> Tensor:
        """Returns the sum over all ranks; it is computed in place."""
        if self.size > 1:
            self.count(what, values, 2)
            self.launches(what)
            with self.at(what):
                dist.all_reduce(values)
        return values

    def all_gather(self, what: str, values: Tensor, same: bool = False) -> list[Tensor]:
        """Returns every rank's tensor [n_r, ...], in the ranks' order. same: whether all n_r are equal."""
        if self.size == 1:
            return [values]
        self.launches(what)
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
        """Returns rank 0's value on every rank. It must be plain data that JSON can hold."""
        if self.size == 1:
            return value
        self.launches(what)
        said = _bytes(value if self.rank == 0 else None)
        size = torch.tensor([len(said)])
        with self.at(what):
            dist.broadcast(size, 0)
            said = said if self.rank == 0 else said.new_empty(int(size))
            dist.broadcast(said, 0)
        found: T = json.loads(said.numpy().tobytes())
        return found

    def gathered(self, what: str, value: T) -> list[T]:
        """Returns every rank's value, in the ranks' order. Values must be plain data that JSON can hold."""
        return [json.loads(said.numpy().tobytes()) for said in self.all_gather(what, _bytes(value))]

    def barrier(self, what: str) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self.launches(what)
            with self.at(what):
                dist.barrier()

    def leave(self) -> None:
        """Destroy the groups made here, whose threads wake a hundred times a second. The process stays in the job."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made = []

    def end(self) -> None:
        """Leave the job."""
        if self.size > 1:
            dist.destroy_process_group()

    def count(self, what: str, values: Tensor, phases: int) -> None:
        """Count a collective on all ranks. phases: how many it has, such as 2 for an all-reduce."""
        count = values.numel() * values.element_size() * phases * (self.size - 1) // self.size
        self.meter.add(what, "network" if self.hosts > 1 else "host", count)


def _cut(members: Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Returns this rank's group of those that the rows of `members` are."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)[0]
    return group


def _size() -> int:
    """Returns how many ranks the job of this process has."""
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_available() else 1


_ATTEMPT: list[dist.Store] = []
_PARTS = itertools.count()


def _part(size: int, timeout: timedelta) -> dist.Store:
    """Returns a part of the job's store that no other attempt and nothing else in this attempt uses."""
    if not _ATTEMPT:  # agreed on once: a rank that has not left one agreement would take part in the next
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
        _ATTEMPT.append(dist.PrefixStore(f"sparrow/{agree(store, rank, size, timeout)}", store))
    _ATTEMPT[0].set_timeout(timeout)
    return dist.PrefixStore(str(next(_PARTS)), _ATTEMPT[0])  # all ranks ask for the same parts in the same order


@contextmanager
def _coming(size: int, timeout_s: float) -> Iterator[None]:
    """A context in which the ranks connect; UserError when not all do."""
    try:
        yield
    except RuntimeError as error:
        if not _lost(error):
            raise
        raise UserError(f"not all of {size} ranks came within {timeout_s:g} s ({_line(error)})") from error


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _lost(error: Exception) -> bool:
    """Returns whether a collective failed because another rank failed."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def _line(error: Exception) -> str:
    """Returns what an error says, without the places in Gloo's source and without its advice."""
    text = re.sub(r"\[/\S*\] |\. This is typically.*", "", str(error).strip())
    return next(iter(text.splitlines()), type(error).__name__)[:300]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A context in which SIGTERM does not end this process; torchrun sends it when it sees another rank end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

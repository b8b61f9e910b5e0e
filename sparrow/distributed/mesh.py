"""Many ranks: what they send each other through `torch.distributed`. It is loaded when there are
many.
"""

from __future__ import annotations

import itertools
import json
import math
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
from typing_extensions import override

from sparrow.core.errors import LostRankError, UserError
from sparrow.core.torchrun import record_uncaught
from sparrow.distributed import limits
from sparrow.distributed.attempt import agree
from sparrow.distributed.collectives import Pending, all_to_all
from sparrow.distributed.devices import own_device
from sparrow.distributed.waits import Waits, broadcast, keep_for_ever
from sparrow.distributed.watch import Watch
from sparrow.distributed.world import Lobby, World

T = TypeVar("T")
# stages of a step that overlap; dense gradients have a group of their own too
LANES = ("ids", "vectors", "gradients")
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


class MeshLobby(Lobby):
    """See `Lobby`.

    Raises:
        UserError: when not all ranks come.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        super().__init__()
        self.rank = int(os.environ["RANK"])
        self.size = size
        self._timeout_s = timeout_s
        record_uncaught()
        limits.allow(size)
        with _coming(size, timeout_s):
            self._store = _part(size, timedelta(seconds=timeout_s))

    @override
    def broadcast(self, purpose: str, value: T, slow: bool = False) -> T:
        with _coming(self.size, self._timeout_s):
            if self.rank == 0:
                self._store.set(purpose, json.dumps(value))
            received: T = json.loads(self._store.get(purpose))
        return received


class MeshWorld(World):
    """Many ranks on a grid of hosts, rank = host * local_size + local rank.

    mesh: a DeviceMesh of dims ("host", "local").

    An NCCL group is one queue, so stages of a step that overlap have groups of their own, the
    lanes. NCCL can deadlock where ranks launch on several groups in different orders. So one thread
    launches at a time, in the order of the program: the main thread, and during a backward
    autograd's thread of the device. `launched` has the last launches, as lane, dim and purpose; it
    is the same on every rank.
    """

    def __init__(self, mesh: DeviceMesh, timeout_s: float = 600) -> None:
        super().__init__()
        self.mesh = mesh
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = mesh.get_rank()
        self.hosts, self.local_size = mesh.shape
        self.size = self.hosts * self.local_size
        self.host, self.local_rank = divmod(self.rank, self.local_size)
        self.launched: deque[tuple[str, str, str]] = deque(maxlen=REMEMBERED)
        self.waits = Waits()
        self._is_watched = False
        self._own_groups = [mesh.get_group("host"), mesh.get_group("local")]
        self._groups: dict[tuple[str, str], dist.ProcessGroup] = {("", "all"): dist.group.WORLD}  # type: ignore[dict-item]
        self._groups |= {("", dim): mesh.get_group(dim) for dim in ("host", "local")}

    @override
    @contextmanager
    def watched(self, remedy: str = "") -> Iterator[None]:
        where = lambda: f"step {self.step}, {self.stage}"  # noqa: E731
        watch = Watch(self.name, self.rank, self.size, where, self.timeout, self.waits)
        self._is_watched = True
        try:
            yield
            watch.leave()
        except Exception as error:
            with _undisturbed():
                if cause := self.waits.reason:
                    why = f"{cause}; rank {self.rank} was at {where()}"
                    for group in dict.fromkeys([*self._own_groups, *self._groups.values()]):
                        keep_for_ever(group)
                elif _lost(error):
                    cause, why = watch.explain(_line(error))
                else:
                    watch.end(_line(error))
                    raise
                watch.end(why, waited=True)
                raise LostRankError(why + remedy, cause) from error
        finally:
            self._is_watched = False
            watch.stop()

    def group(self) -> dist.ProcessGroup:
        """Returns another group of all ranks, whose collectives run beside those of the first."""
        group: dist.ProcessGroup = dist.new_group(timeout=self.timeout)
        self._own_groups.append(group)
        return group

    @property
    @override
    def has_lanes(self) -> bool:
        return self.mesh.device_type == "cuda"  # a group of Gloo has several threads

    @override
    def open_lanes(self, dims: Iterable[str]) -> None:
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
                    self._own_groups.append(self._groups[lane, dim])

    def launches(self, purpose: str, lane: str = "", dim: str = "all") -> None:
        """Note that this rank is about to launch a collective."""
        self.launched.append((lane, dim, purpose))

    # -- collectives -------------------------------------------------------------------------------

    @override
    def all_to_all_flat(
        self,
        purpose: str,
        send_N: Tensor,
        counts: Sequence[int],
        sizes: Sequence[int],
        dim: str = "all",
        lane: str = "",
    ) -> Pending[Tensor]:
        self._count_parts(purpose, send_N, counts, dim)
        self.launches(purpose, lane, dim)
        group = self._groups.get((lane, dim), self._groups.get(("", dim)))
        begun = all_to_all(send_N, counts, sizes, group, self._finish)

        def finish() -> Tensor:
            with self.at(purpose):
                return begun.wait()

        return Pending(finish)

    @override
    def all_sum(self, purpose: str, values: Tensor, dim: str = "all") -> Tensor:
        if len(self.ranks(dim)) > 1:
            self.count(purpose, values, 2, dim)
            self.launches(purpose, "", dim)
            with self.at(purpose):
                self._finish(
                    dist.all_reduce(values, group=self._groups["", dim], async_op=True), values
                )
        return values

    @override
    def all_gather(self, purpose: str, values: Tensor, same: bool = False) -> list[Tensor]:
        self.launches(purpose)
        with self.at(purpose):
            sizes = [torch.tensor([len(values)]) for _ in range(self.size)]
            if not same:
                self.count(f"{purpose}, sizes", sizes[0], self.size)
                own = torch.tensor([len(values)])
                self._finish(dist.all_gather(sizes, own, async_op=True), own)
            most = max(int(n) for n in sizes)
            padded = torch.cat([values, values.new_zeros(most - len(values), *values.shape[1:])])
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            self.count(purpose, padded, self.size)
            padded = padded.contiguous()
            self._finish(dist.all_gather(parts, padded, async_op=True), padded)
        return [part[: int(n)] for part, n in zip(parts, sizes, strict=True)]

    @override
    def broadcast(self, purpose: str, value: T, slow: bool = False) -> T:
        text = _bytes(value if self.rank == 0 else None)
        size = self.broadcast_tensor(purpose, torch.tensor([len(text)]), slow)
        if self.rank != 0:
            text = text.new_empty(int(size))
        received: T = json.loads(self.broadcast_tensor(purpose, text).numpy().tobytes())
        return received

    @override
    def broadcast_tensor(self, purpose: str, values: Tensor, slow: bool = False) -> Tensor:
        self.launches(purpose)
        limit_s = math.inf if slow and self._is_watched else self.timeout.total_seconds()
        with self.at(purpose):
            self.waits.finish(broadcast(values, self._groups["", "all"]), limit_s)
        return values

    @override
    def gathered(self, purpose: str, value: T) -> list[T]:
        return [
            json.loads(text.numpy().tobytes()) for text in self.all_gather(purpose, _bytes(value))
        ]

    @override
    def barrier(self, purpose: str) -> None:
        self.launches(purpose)
        with self.at(purpose):
            work = dist.barrier(async_op=True)
            # NCCL's would end with the first slice
            work.wait() if self.has_lanes else self.waits.finish(work)

    def _finish(self, work: dist.Work, values: Tensor) -> None:
        """Wait for a collective on some values. On a GPU the host does not wait."""
        if values.device.type == "cpu":
            self.waits.finish(work)
        else:
            work.wait()

    @override
    def leave(self) -> None:
        for group in self._own_groups:
            dist.destroy_process_group(group)
        self._own_groups = []

    @override
    def end(self) -> None:
        dist.destroy_process_group()

    def count(self, purpose: str, values: Tensor, phases: int, dim: str = "all") -> None:
        """Count a collective on the ranks along a dim. phases: how many it has, such as 2 for an
        all-reduce.
        """
        members = len(self.ranks(dim))
        count = values.numel() * values.element_size() * phases * (members - 1) // members
        self.meter.add(purpose, "network" if self.hosts > 1 and dim != "local" else "host", count)


def begin_mesh(size: int, device: str, local_size: int | None, timeout_s: float) -> MeshWorld:
    """Returns the job of many ranks that torchrun started this process in, see `begin_world`.

    Raises:
        UserError: when the ranks do not fill a grid, or do not all come.
    """
    kind = torch.device(device).type
    timeout = timedelta(seconds=timeout_s)
    record_uncaught()
    limits.allow(size, on_gpus=kind == "cuda")
    local = local_size or int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size % local:
        raise UserError(
            f"{size} ranks do not divide into hosts of {local}; start as many on every host"
        )
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
        local_sizes = torch.zeros(size, dtype=torch.int64)
        local_sizes[dist.get_rank()] = local
        dist.all_reduce(local_sizes)
        # before groups are made: some ranks would wait in vain for these
        if len(hosts := set(local_sizes.tolist())) > 1:
            raise UserError(
                f"hosts of {' and '.join(map(str, sorted(hosts)))} ranks; start as many on every"
                " host"
            )
        grid = torch.arange(size).view(-1, local)
        # made here and not by the mesh, because groups of the mesh would wait for half an hour
        groups = [_cut(part, timeout) for part in (grid.T, grid)]
        world = MeshWorld(
            DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=("host", "local")), timeout_s
        )
        world.name = world.broadcast("name", uuid.uuid4().hex)
        return world


def _cut(members: Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Returns this rank's group of those that the rows of `members` are."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)[
        0
    ]
    return group


_ATTEMPT: list[dist.Store] = []
_PARTS = itertools.count()


def _part(size: int, timeout: timedelta) -> dist.Store:
    """Returns a part of the job's store that no other attempt and nothing else in this attempt
    uses.
    """
    # agreed on once: a rank that has not left one agreement would take part in the next
    if not _ATTEMPT:
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
        _ATTEMPT.append(dist.PrefixStore(f"sparrow/{agree(store, rank, size, timeout)}", store))
    _ATTEMPT[0].set_timeout(timeout)
    # all ranks ask for the same parts in the same order
    return dist.PrefixStore(str(next(_PARTS)), _ATTEMPT[0])


@contextmanager
def _coming(size: int, timeout_s: float) -> Iterator[None]:
    """A context in which the ranks connect; UserError when not all do."""
    try:
        yield
    except RuntimeError as error:
        if not _lost(error):
            raise
        raise UserError(
            f"not all of {size} ranks came within {timeout_s:g} s ({_line(error)})"
        ) from error


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
    """A context in which SIGTERM does not end this process; torchrun sends it when it sees another
    rank end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

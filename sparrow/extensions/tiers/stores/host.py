"""`HostStore`: rows in the memory of the host, or on an SSD beneath it, of which some are in frames
on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow.core.pages import empty_rows
from sparrow.embeddings.spec import Component, Placement, Tier
from sparrow.embeddings.stores.store import First
from sparrow.extensions.tiers.stores.saved import Saved, put_into, take_rows
from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.kernels.formats import Field


class HostStore(SsdStore):
    """Rows in the memory of the host, and frames on a device, which `SsdStore` fills and empties.

    Who is in which frame is known on the host. It was tested with the CPU as both and on a stand-in
    for a GPU. It was never run on a GPU.

    Args:
        component: whose rows these are. Its tier says how many frames there are.
        rows: how many of its rows are here.
        dim: how many of its dimensions are here.
        placement: the device, and where the file is of an SSD beneath the host. That folder is
            there.
        beneath: the tier of that SSD, if there is one.
    """

    def __init__(
        self,
        component: Component,
        rows: int,
        dim: int,
        placement: Placement,
        beneath: Tier | None = None,
    ) -> None:
        super().__init__(component, rows, dim, replace(placement, folder=Path()))
        self._records: HostRows | SsdRows
        if beneath is not None:
            store = SsdStore(
                replace(component, tier=beneath), rows, dim, replace(placement, device="cpu")
            )
            self._records = SsdRows(store, self._first)
        else:
            self._records = HostRows(self._fields, rows)
        for name, values in self._records.buffers.items():
            # they stay when frames move
            self.register_buffer(f"host_{name}", values, persistent=False)
        self._numbers_F: Tensor | None = None  # on a device that is not the host

    def fetch(self, rows_N: Tensor, batch: int, settled: int) -> None:
        """Give the rows of a batch frames, see `SsdStore.fetch`."""
        super().fetch(rows_N.cpu(), batch, settled)

    def arrive(self, last: int | None = None) -> None:
        """Wait for the rows of batches, see `SsdStore.arrive`."""
        super().arrive(last)
        if self._numbers_F is not None:
            self._numbers_F.copy_(self.get_buffer("tag"))

    def name_file(self, folder: Path) -> None:
        """Do nothing: there is no file. A checkpoint has all rows."""

    def show(self, saved: Saved) -> bool:
        """Returns False: rows of a checkpoint are written here."""
        return False

    def close(self) -> None:
        """Let go of the file, if rows have one."""
        self._records.close()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostStore:
        for name, values in self._held.items():
            self._buffers[f"frame_{name}"] = fn(values)
        device = self._held["touched"].device
        self._numbers_F = None if device.type == "cpu" else self.get_buffer("tag").to(device)
        return self

    @property
    def _numbers(self) -> Tensor:
        return super()._numbers if self._numbers_F is None else self._numbers_F

    @property
    def _blocks(self) -> Any:
        return self._records

    def _frames_of(self, rows_N: Tensor) -> Tensor:
        return super()._frames_of(rows_N.cpu()).to(rows_N.device)

    def _read_into(self, rows_U: Tensor, frames_U: Tensor, batch: int) -> None:
        super()._read_into(rows_U, frames_U, batch)
        # last: if they find no frames in memory, those on the device are filled all the same
        self._records.expect(rows_U)


class HostRows:
    """Row records in memory, with the methods of `Blocks` that frames need. Nothing is under way
    here.

    Args:
        fields: of a record.
        rows: how many there are.
    """

    def __init__(self, fields: Mapping[str, Field], rows: int) -> None:
        self.held = {
            name: empty_rows(*field.shape(rows), dtype=field.dtype)
            for name, field in fields.items()
        }
        self.was_put_R = torch.zeros(rows, dtype=torch.bool)
        self.counters: dict[str, int] = {}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What has the memory."""
        return {**self.held, "was_put": self.was_put_R}

    def expect(self, rows_U: Tensor) -> None:
        """Do nothing: all rows are here. rows_U: those that a batch of training is about to
        fetch.
        """

    def close(self) -> None:
        """Do nothing: there is no file."""

    def fetch(self, rows_U: Tensor, into: Mapping[str, Tensor], at_U: Tensor) -> Tensor:
        """Copy some rows. Returns what `wait` takes, as `Blocks.fetch` does."""
        put_into(into, at_U, take_rows(self.held, rows_U))
        return ~self.was_put_R[rows_U]

    def wait(self, never_U: Tensor) -> Tensor:
        """Returns which rows of a fetch were never put, bool [U]."""
        return never_U

    def known(self, first: int, last: int) -> Tensor:
        """Returns the rows that were put among those from `first` on, before `last`: int64,
        ascending.
        """
        return first + self.was_put_R[first:last].nonzero()[:, 0]

    def put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Take whole records. rows_U: int64 [U], each once."""
        put_into(self.held, rows_U, fields)
        self.was_put_R[rows_U] = True


class SsdRows:
    """Row records on an SSD, with frames for some in memory, as what is beneath frames on a device.

    A row that a batch of training needs on the device gets a frame here too. There it is read from,
    and there it is put when it leaves the device, while it has that frame.

    Args:
        store: has the frames and the file.
        first: see `SsdStore`.
    """

    def __init__(self, store: SsdStore, first: First) -> None:
        self.store = store
        store.first = first
        store.setting = "tables.tier.beneath"
        self.batch = 0  # each time that rows are expected

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What has the memory."""
        return dict(self.store.named_buffers())

    @property
    def counters(self) -> dict[str, int]:
        """See `SsdStore.counters`; of different rows, those that the device had no frame for."""
        return self.store.counters

    def expect(self, rows_U: Tensor) -> None:
        """Begin to read rows that a batch of training is about to fetch."""
        if len(rows_U):
            self.batch += 1
            self.store.fetch(rows_U, self.batch, self.batch - 1)

    def fetch(
        self, rows_U: Tensor, into: Mapping[str, Tensor], at_U: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
        """Returns what `wait` takes."""
        return rows_U, into, at_U

    def wait(self, request: tuple[Tensor, Mapping[str, Tensor], Tensor]) -> Tensor:
        """Copy some rows. Returns which of them lack their first values, bool [U]: none does."""
        rows_U, into, at_U = request
        put_into(into, at_U, self.store.read(rows_U))
        return torch.zeros(len(rows_U), dtype=torch.bool)

    def known(self, first: int, last: int) -> Tensor:
        """Returns the rows from `first` on, before `last`: all of them may be asked for."""
        return torch.arange(first, last)

    def put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Take whole records. rows_U: int64 [U], each once."""
        self.store.put(rows_U, {name: values.cpu() for name, values in fields.items()})

    def close(self) -> None:
        """Let go of the file."""
        self.store.close()

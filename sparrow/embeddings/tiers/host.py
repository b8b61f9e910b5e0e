"""`HostStore`: rows in the memory of the host, of which some are in frames on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow.core.pages import empty_rows
from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers.saved import Saved, put_into
from sparrow.embeddings.tiers.ssd import SsdStore
from sparrow.embeddings.tiers.store import Folder
from sparrow.kernels.formats import Field


class HostStore(SsdStore):
    """Rows in the memory of the host, and frames on the device of `rows_on`, which `SsdStore` fills and empties.

    Who is in which frame is known on the host. It was tested with the CPU as both and on a stand-in for a GPU. It was
    never run on a GPU.

    Args:
        component: whose rows these are. Its tier says how many frames there are.
        rows: how many of its rows are here.
        dim: how many of its dimensions are here.
        window: rows of so many last batches never leave their frames.
    """

    def __init__(self, component: Component, rows: int, dim: int, window: int = 5) -> None:
        super().__init__(component, rows, dim, Folder(path=Path(), window=window))
        self._records = HostRows(self._fields, rows)
        for name, of in {**self._records.held, "was_put": self._records.was_put_R}.items():
            self.register_buffer(f"host_{name}", of, persistent=False)  # they stay when frames move
        self._numbers_F: Tensor | None = None  # on a device that is not the host

    def fetch(self, rows_N: Tensor, batch: int, settled: int) -> None:
        """Do what `SsdStore.fetch` does."""
        super().fetch(rows_N.cpu(), batch, settled)

    def arrive(self, last: int | None = None) -> None:
        """Do what `SsdStore.arrive` does."""
        super().arrive(last)
        if self._numbers_F is not None:
            self._numbers_F.copy_(self.get_buffer("tag"))

    def name_file(self, folder: Path) -> None:
        """Do nothing: there is no file. A checkpoint has all rows."""

    def show(self, saved: Saved) -> bool:
        """Returns False: rows of a checkpoint are written here."""
        return False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostStore:
        for name, of in self._held.items():
            self._buffers[f"frame_{name}"] = fn(of)
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


class HostRows:
    """Row records in memory, with the methods of `Blocks` that frames need. Nothing is under way here.

    Args:
        fields: of a record.
        rows: how many there are.
    """

    def __init__(self, fields: Mapping[str, Field], rows: int) -> None:
        self.held = {name: empty_rows(*field.shape(rows), dtype=field.dtype) for name, field in fields.items()}
        self.was_put_R = torch.zeros(rows, dtype=torch.bool)
        self.counters: dict[str, int] = {}

    def fetch(self, rows_U: Tensor, into: Mapping[str, Tensor], at_U: Tensor) -> Tensor:
        """Copy some rows. Returns what `wait` takes, as `Blocks.fetch` does."""
        put_into(into, at_U, {name: of[rows_U] for name, of in self.held.items()})
        return ~self.was_put_R[rows_U]

    def wait(self, never_U: Tensor) -> Tensor:
        """Returns which rows of a fetch were never put, bool [U]."""
        return never_U

    def put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Take whole records. rows_U: int64 [U], each once."""
        put_into(self.held, rows_U, fields)
        self.was_put_R[rows_U] = True

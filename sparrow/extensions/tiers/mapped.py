"""A file that is mapped, through the page cache, for disks that know no O_DIRECT."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import ClassVar

import torch

from sparrow.core import UserError
from sparrow.embeddings.spec import Component, Placement, Tier
from sparrow.embeddings.stores import MemoryStore
from sparrow.extensions.tiers.folders import make_folder


@dataclass(frozen=True, kw_only=True)
class Config(Tier):
    """All rows are in a mapped file, and the system decides which are in memory. The settings are
    those of other tiers.

    A row that is out costs a whole page, and training waits for it.
    """

    is_on: ClassVar[bool] = False

    @property
    def has_folder(self) -> bool:
        """See `Tier.has_folder`."""
        return True

    def reason_against(self, device: str) -> str:
        """See `Tier.reason_against`."""
        return "" if device == "cpu" else "its rows learn on a GPU; use --device cpu"

    def memory_bytes(self, component: Component, rows: int, dim: int) -> int:
        """Returns 0: the system takes pages back when others need memory."""
        return 0

    def disk_bytes(self, component: Component, used: float, hosts: int) -> int:
        """See `Tier.disk_bytes`."""
        return component.rows * component.bytes_row  # on each host, since each may have a copy

    def store(self, component: Component, rows: int, dim: int, placement: Placement) -> MappedRows:
        """See `Tier.store`."""
        assert placement.folder is not None
        return MappedRows(component, rows, dim, make_folder(placement.folder))


class MappedRows(MemoryStore):
    """Rows in memory that a file backs, which goes away with the process. See `MemoryStore`.

    Raises:
        UserError: when the disk has too little room, or the file cannot be made.
    """

    def __init__(self, component: Component, rows: int, dim: int, folder: Path) -> None:
        super().__init__(component, rows, dim, "meta")
        for name, field in self._fields.items():
            shape = field.shape(rows)
            size = torch.Size(shape).numel() * field.dtype.itemsize
            try:
                with TemporaryFile(dir=folder) as file:
                    file.truncate(size)
                    # not on macOS, where a full disk ends the process
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(file.fileno(), 0, size)
                    memory = mmap.mmap(file.fileno(), size)
            except OSError as error:
                message = f"cannot make a file of its rows in {folder} ({error.strerror or error})"
                raise UserError(
                    f"table {component.name!r}: {message}; name another folder"
                ) from None
            memory.madvise(mmap.MADV_RANDOM)  # else each fault reads 128 KiB
            self.register_buffer(
                name, torch.frombuffer(memory, dtype=field.dtype).view(shape), persistent=False
            )

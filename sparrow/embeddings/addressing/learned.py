from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.core.files import replace_file
from sparrow.embeddings.addressing._size import LogTable, Numbering, Size, Traits
from sparrow.embeddings.addressing.hashed import by_hash


@dataclass(frozen=True, eq=False)
class Map:
    """A learned map of ids to rows, as a file holds it.

    Args:
        row_S: int16 or int32 [S], the row of each id.
        rows: how many there are.
        private: the first rows, which one id has alone. Others share the rest.
        fitted: how many of the earliest training rows it was made from.
        vocabulary: the digest of the vocabulary that numbers the ids, or "".
        log: the fingerprint of the log of these rows, or "".
    """

    row_S: Tensor
    rows: int
    private: int
    fitted: int
    vocabulary: str
    log: str = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal digits."""
        header = f"{self.rows} {self.private} {self.fitted} {self.vocabulary} {self.log}".encode()
        return hashlib.sha256(header + self.row_S.numpy().tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the map to a file."""
        metadata = {
            name: str(getattr(self, name))
            for name in ("rows", "private", "fitted", "vocabulary", "log", "digest")
        }
        with replace_file(path) as partial:
            safetensors.torch.save_file({"row": self.row_S}, partial, metadata)

    @classmethod
    def load(cls, path: Path) -> Map:
        """Returns the map of a file.

        Raises:
            UserError: when it cannot be read, or is damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                row_S = file.get_tensor("row")
            numbers: dict[str, Any] = {
                name: int(metadata[name]) for name in ("rows", "private", "fitted")
            }
            log = metadata.get("log", "")
            id_map = cls(row_S, **numbers, vocabulary=metadata["vocabulary"], log=log)
        except OSError as error:
            reason = error.strerror or str(error).partition(":")[0]  # without the name once more
            if not path.is_absolute():
                reason += f", in {Path.cwd()}"
            raise UserError(
                f"file: {path}: {reason}; check the path, or fit a map with `sparrow tables --fit`"
            ) from None
        except (SafetensorError, KeyError, ValueError):
            raise UserError(
                f"file: {path} is no map of ids; fit one with `sparrow tables --fit`"
            ) from None
        is_map = id_map.row_S.dtype in (torch.int16, torch.int32) and id_map.row_S.dim() == 1
        if not is_map or id_map.digest != metadata.get("digest"):
            raise UserError(f"file: {path} is damaged; fit it anew with `sparrow tables --fit`")
        return id_map


@dataclass(frozen=True)
class Learned:
    """A map says the row of each id: alike ids share one (learned hash functions, arXiv
    2203.15837).

    Ids that came after the map have one of the shared rows by their hash, as ids have that the fit
    did not see.

    Args:
        rows: how many ids there are.
        digest: of the map.
        map: it.
    """

    rows: int
    digest: str
    map: Map = field(compare=False, repr=False)
    _on: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def ids(self) -> int:
        """As many ids as the log has."""
        return self.rows

    @property
    def traits(self) -> Traits:
        """The map is in memory beside the rows."""
        return Traits(
            bytes_map=self.map.row_S.nbytes, fitted=self.map.fitted, fitted_log=self.map.log
        )

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component."""
        return (Size("", self.map.rows, dim),)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the row of each id in each component, int64 [N]."""
        if ids_N.device not in self._on:
            self._on[ids_N.device] = self.map.row_S.to(ids_N.device)
        row_S = self._on[ids_N.device]
        known = len(row_S)
        rows_N = row_S[ids_N.clamp(max=known - 1)].long()
        if known < self.rows:
            rows_N = torch.where(
                ids_N < known, rows_N, by_hash(ids_N, self.map.private, self.map.rows)
            )
        return (rows_N,)

    def combine(self, dim: int) -> None:
        """Returns None, because there is nothing to combine."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Alike ids share a row, as a map says that was made before, by `sparrow tables --fit`.

    file: the map, from the working directory on. digest: of it, which a run writes down.
    """

    file: str
    digest: str = ""

    def build(self, ids: Numbering) -> Learned:
        """Returns the addressing of a table with these ids."""
        ids.check_numbered("learned")
        id_map = Map.load(Path(self.file))
        if self.digest and id_map.digest != self.digest:
            raise UserError(
                f"file: {self.file} is another map than the run began with; put that one back"
            )
        if len(id_map.row_S) > ids.rows:
            raise UserError(
                f"file: {self.file} maps {len(id_map.row_S)} ids, and the log has {ids.rows}; fit"
                " one for it"
            )
        return Learned(ids.rows, id_map.digest, id_map)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with the digest of the map, for each table.

        A map of another vocabulary is refused: it would give ids the rows of others.
        """
        configs = []
        for table in tables:
            learned = self.build(table.ids)
            fitted_to = (learned.map.vocabulary, len(learned.map.row_S))
            if not self.digest and fitted_to != (table.ids.digest, table.ids.rows):
                raise UserError(
                    f"file: {self.file} was fitted to another vocabulary; fit one to this log"
                )
            configs.append(replace(self, digest=learned.digest))
        return configs

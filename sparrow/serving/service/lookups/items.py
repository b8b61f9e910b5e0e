"""A catalogue of candidates: a Parquet file with columns of the log, which are encoded before any request asks."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import save_file

from sparrow.core.arrays import Array, Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.core.files import whole
from sparrow.features.encodings import FIRST, MISSING
from sparrow.features.encodings.vocabulary import Vocabulary
from sparrow.features.hashing import hash_ids
from sparrow.features.ids import as_ids
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import Transforms
from sparrow.kernels.encode import Rows
from sparrow.serving.requests import Encoder, Known, Part
from sparrow.serving.rows import tensors_of
from sparrow.serving.scorer import Scorer
from sparrow.serving.service.asked import Asked
from sparrow.serving.values import values_of

KEPT = 4  # files of a kind that stay: of the version that answers, of the one that is loaded, and to go back to
_BLOCK = 1 << 16  # rows that are encoded at a time


class Items:
    """Rows of a catalogue by their key.

    Processes that share a folder share one copy in memory: the first one makes files in it, and all map them.

    Args:
        path: the Parquet file. It may change afterwards.
        key: its column of ids, each of them once. 12 and "12" are one id, as in a log.
        folder: for files; nobody else should be able to write there.

    Raises:
        UserError: for a file that cannot be read or has no such column, and for a key that is missing or comes twice.
    """

    def __init__(self, path: str | Path, key: str, folder: Path) -> None:
        self.path, self.key, self._folder = Path(path), key, folder
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
                digest.update(key.encode())
                self.digest = digest.hexdigest()  # tells a catalogue from others
                names = pq.read_schema(file).names
                if key not in names:
                    raise UserError(f"{path}: no column {key!r}{suggest(key, names)}")
                mapped = pa.memory_map(str(self.made("arrow", lambda to: _write(pq.ParquetFile(file), to))))
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path}: cannot be read ({error}); give a Parquet file") from None
        self.columns, self.rows = frozenset(names), pa.ipc.open_file(mapped).read_all()
        if not len(self):
            raise UserError(f"{path}: has no rows; give the items that requests name")
        keys = _arrays(self.made("keys", lambda to: save_file(self._sorted(), to)))
        known = Vocabulary(keys["hash"], keys["place"])
        object.__setattr__(known, "by_hash", (keys["hash"], keys["place"]))  # mapped: the property would make copies
        schema = Schema(
            columns={key: Column(kind="categorical", table=key)},
            encodings={key: Encoding(kind="vocabulary", rows=known.rows, min_count=1)},
        )
        self._numbering = Encoder(Transforms(schema=schema, vocabularies={key: known}))

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def replaced(self, path: str | Path) -> Items:
        """Returns the catalogue of another file, with the same key and folder."""
        return Items(path, self.key, self._folder)

    def rows_of(self, keys: Sequence[Any]) -> Int64s:
        """Returns the row of each key, int64 [N]; for a key that is missing or not there the number of rows.

        Raises:
            UserError: for a key that is no id.
        """
        row_N = self._numbering.batch({self.key: list(keys)}).ids[self.key].values_N.numpy() - FIRST
        return np.where(row_N < 0, len(self), row_N)

    def get(self, keys: Sequence[Any]) -> dict[str, list[Any]]:
        """Returns the columns of keys as the file has them. All of a key that is not there are None."""
        row_N = self.rows_of(keys)
        found: dict[str, list[Any]] = self.rows.take(pa.array(row_N, mask=row_N == len(self))).to_pydict()
        return found

    def made(self, name: str, write: Callable[[Path], None]) -> Path:
        """Returns the file of this catalogue with a name, which is written if it is not there.

        Of older ones with a name of the same kind (what its last dot begins), few stay.
        """
        path = self._folder / f"{self.digest[:16]}.{name}"
        with open(self._folder / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                try:
                    with whole(path) as partial:
                        write(partial)
                except SafetensorError as error:  # it says no other when a disk is full
                    raise UserError(f"{path}: cannot be written ({error}); make room") from None
            os.utime(path)
            files = sorted(self._folder.glob(f"*{path.suffix}"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-KEPT]:  # who has mapped it keeps it
                file.unlink()
        return path

    def _sorted(self) -> dict[str, Array]:
        """Returns the hashes of the keys in ascending order, and the row of each, counted from FIRST."""
        values = self.rows[self.key].combine_chunks()
        try:
            hash_R = hash_ids(as_ids(values, self.key, int))
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        order_R = np.argsort(hash_R, kind="stable")
        hash_R = hash_R[order_R]
        if len(hash_R) and not hash_R[0]:
            raise UserError(f"{self.path}: {self.key!r} of row {order_R[0]} is missing; give each row a key")
        for at in np.flatnonzero(hash_R[1:] == hash_R[:-1])[:1]:
            one, other = order_R[at : at + 2].tolist()
            told = f"rows {one} and {other} have one {self.key!r}, {values[one].as_py()!r}"
            raise UserError(f"{self.path}: {told}; keep one of them")
        return {"hash": hash_R, "place": order_R + FIRST}


class Encoded:
    """A catalogue as a version reads it. Its scores are those of the same columns in a request.

    Args:
        items: the catalogue.
        scorer: of the version.

    Raises:
        UserError: for a value that the transforms refuse.
    """

    def __init__(self, items: Items, scorer: Scorer) -> None:
        self.items, self.key, schema = items, items.key, scorer.schema
        made_of = scorer.encoder.made_of
        self._made_of = {name: of for name, of in made_of.items() if items.columns.issuperset(of)}
        for name, of in made_of.items():
            here = [source for source in of if source in items.columns and source != items.key]
            if schema.columns[name].cross and here and name not in self._made_of:
                told = f"columns.{name}: a cross of {here[0]!r}, which the catalogue has, and of what it does not have"
                raise UserError(f"{items.path}: {told}; leave {here[0]!r} out of it, and send it with the candidates")
        self._crosses = {name for name in self._made_of if schema.columns[name].cross}
        self._numbers = schema.side_by_side([name for name in schema.dense if name in self._made_of])
        self._lists = [name for name in self._made_of if schema.columns[name].kind == "list"]
        self._ids = [name for name in self._made_of if name not in {*self._numbers, *self._lists}]
        files = scorer.folder.manifest["files"]
        used = [(name, files[name]["sha256"]) for name in files if name.startswith(("schema.toml", "vocabulary/"))]
        digest = hashlib.sha256(repr(sorted(used)).encode()).hexdigest()
        path = items.made(f"{digest[:16]}.encoded", lambda to: save_file(self._encode(scorer.encoder), to))
        self._arrays = _arrays(path)

    def known(self, rows: Rows, given: Collection[str]) -> Known | None:
        """See `Catalogue`."""
        of_rows = rows.keys() if isinstance(rows, Mapping) else rows[0].keys() if rows else ()
        given = {*given, *of_rows}
        more = given - {self.key}  # a cross of the key may be of what only the catalogue has, too
        lacking = {n for n, of in self._made_of.items() if (more if n in self._crosses else given).isdisjoint(of)}
        if self.key not in of_rows or not lacking:
            return None
        row_B = self.items.rows_of(values_of(rows, self.key))
        one_B = np.ones(len(row_B), np.int64)
        ids_BF, numbers_BC = self._arrays["ids"][row_B], self._arrays["numbers"][row_B]
        parts = {name: Part(ids_BF[:, f], one_B) for f, name in enumerate(self._ids)}
        for name, at in self._numbers.items():
            parts[name] = Part(one_B[:0], one_B[:0], None, numbers_BC[:, at].T.reshape(-1))
        parts |= {name: self._list(name, row_B) for name in self._lists}
        return Known(self.key, {name: parts[name] for name in lacking}, row_B == len(self.items))

    def whole(self, asked: Asked) -> Asked:
        """Returns a request with the raw columns that its candidates lack."""
        if self.key not in asked.candidates:
            return asked
        given = asked.user.keys() | asked.candidates.keys()
        raw = {name: of for name, of in self.items.get(asked.candidates[self.key]).items() if name not in given}
        return replace(asked, candidates={**raw, **asked.candidates})

    def _list(self, name: str, row_B: Int64s) -> Part:
        values, offsets, weights = (self._arrays.get(f"{of} {name}") for of in ("values", "offsets", "weights"))
        assert values is not None and offsets is not None
        begin_B, length_B = offsets[row_B], offsets[row_B + 1] - offsets[row_B]
        shift_B = begin_B - (np.cumsum(length_B) - length_B)
        at_N = np.arange(length_B.sum()) + np.repeat(shift_B, length_B)
        return Part(values[at_N], length_B, None if weights is None else weights[at_N])

    def _encode(self, encoder: Encoder) -> dict[str, Array]:
        """Returns what the transforms make of the items, and of one more that has no values."""
        rows, size = self.items.rows, len(self.items)
        parts: dict[str, list[Part]] = {name: [] for name in self._made_of}
        try:
            for row0 in range(0, size, _BLOCK):
                for name, each in parts.items():
                    each.append(encoder.part(name, rows.slice(row0, _BLOCK), row0))
        except UserError as error:
            raise UserError(f"{self.items.path}: {error}") from None

        def whole_of(name: str, field: str, *last: float) -> Array:
            each = [getattr(part, field) for part in parts[name]]
            return np.concatenate([*each, np.array(last, each[0].dtype)])

        def numbers_of(name: str, width: int) -> Array:
            each = [part.numbers.reshape(width, -1) for part in parts[name] if part.numbers is not None]
            return np.concatenate([*each, np.full((width, 1), np.nan)], axis=1)

        ids = [whole_of(name, "values", MISSING) for name in self._ids]
        numbers = [numbers_of(name, at.stop - at.start) for name, at in self._numbers.items()]
        found = {"ids": np.array(ids, np.int64), "numbers": np.concatenate([np.empty((0, size + 1)), *numbers])}
        found = {of: np.ascontiguousarray(x.reshape(-1, size + 1).T) for of, x in found.items()}
        for name in self._lists:
            found[f"values {name}"] = whole_of(name, "values")
            found[f"offsets {name}"] = np.cumsum(np.append(0, whole_of(name, "lengths", 0)))
            if parts[name][0].weights is not None:
                found[f"weights {name}"] = whole_of(name, "weights")
        return found


def _write(file: pq.ParquetFile, to: Path) -> None:
    """Write the rows of a file so that they can be mapped, and any of them taken without a copy of the others."""
    with pa.ipc.new_file(str(to), file.schema_arrow) as out:
        out.write_table(file.read().combine_chunks())


def _arrays(path: Path) -> dict[str, Array]:
    """Returns the arrays of a file, mapped."""
    return {name: of.numpy() for name, of in tensors_of(path).items()}

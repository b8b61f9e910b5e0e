"""A catalogue of candidates: a Parquet file with columns of the log, which are encoded before any
request asks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import save_file

from sparrow.apps.service.request import Request
from sparrow.core.arrays import Array, Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.core.files import replace_file
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
from sparrow.serving.values import values_of

# files of a kind that stay: of the version that answers, of the one that is loaded, and to go back
# to
KEPT = 4
_BLOCK = 1 << 16  # rows that are encoded at a time


class Items:
    """Rows of a catalogue by their key.

    Processes that share a folder share one copy in memory: the first one makes files in it, and all
    map them.

    Args:
        path: the Parquet file. It may change afterwards.
        key: its column of ids, each of them once. 12 and "12" are one id, as in a log.
        folder: for files; nobody else should be able to write there.

    Raises:
        UserError: for a file that cannot be read or has no such column, and for a key that is
            missing or comes twice.
    """

    def __init__(self, path: str | Path, key: str, folder: Path) -> None:
        self.path = Path(path)
        self.key = key
        self._folder = folder
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
                digest.update(key.encode())
                self.digest = digest.hexdigest()  # tells a catalogue from others
                names = pq.read_schema(file).names
                if key not in names:
                    raise UserError(f"{path}: no column {key!r}{suggest(key, names)}")
                mapped = pa.memory_map(
                    str(self.ensure_file("arrow", lambda to: _write(pq.ParquetFile(file), to)))
                )
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path}: cannot be read ({error}); give a Parquet file") from None
        self.columns = frozenset(names)
        self.rows = pa.ipc.open_file(mapped).read_all()
        if not len(self):
            raise UserError(f"{path}: has no rows; give the items that requests name")
        keys = _arrays(self.ensure_file("keys", lambda to: save_file(self._sort_keys(), to)))
        known = Vocabulary(keys["hash"], keys["place"])
        # mapped: the property would make copies
        object.__setattr__(known, "by_hash", (keys["hash"], keys["place"]))
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
        """Returns the row of each key, int64 [N]; for a key that is missing or not there the number
        of rows.

        Raises:
            UserError: for a key that is no id.
        """
        row_N = self._numbering.batch({self.key: list(keys)}).ids[self.key].values_N.numpy() - FIRST
        return np.where(row_N < 0, len(self), row_N)

    def get(self, keys: Sequence[Any]) -> dict[str, list[Any]]:
        """Returns the columns of keys as the file has them. All of a key that is not there are
        None.
        """
        row_N = self.rows_of(keys)
        columns: dict[str, list[Any]] = self.rows.take(
            pa.array(row_N, mask=row_N == len(self))
        ).to_pydict()
        return columns

    def ensure_file(self, name: str, write: Callable[[Path], None]) -> Path:
        """Write the file of this catalogue with a name, if it is not there, and return its path.

        Of older ones with a name of the same kind (what its last dot begins), few stay.
        """
        path = self._folder / f"{self.digest[:16]}.{name}"
        with open(self._folder / "lock", "w", encoding="utf-8") as lock:
            _lock(lock.fileno())
            if not path.exists():
                try:
                    with replace_file(path) as partial:
                        write(partial)
                except SafetensorError as error:  # it says no other when a disk is full
                    raise UserError(f"{path}: cannot be written ({error}); make room") from None
            os.utime(path)
            files = sorted(
                self._folder.glob(f"*{path.suffix}"), key=lambda file: file.stat().st_mtime_ns
            )
            for file in files[:-KEPT]:  # who has mapped it keeps it
                file.unlink()
        return path

    def _sort_keys(self) -> dict[str, Array]:
        """Returns the hashes of the keys in ascending order, and the row of each, counted from
        FIRST.
        """
        values = self.rows[self.key].combine_chunks()
        try:
            hash_R = hash_ids(as_ids(values, self.key, int))
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        order_R = np.argsort(hash_R, kind="stable")
        hash_R = hash_R[order_R]
        if len(hash_R) and not hash_R[0]:
            raise UserError(
                f"{self.path}: {self.key!r} of row {order_R[0]} is missing; give each row a key"
            )
        for at in np.flatnonzero(hash_R[1:] == hash_R[:-1])[:1]:
            first, second = order_R[at : at + 2].tolist()
            problem = f"rows {first} and {second} have one {self.key!r}, {values[first].as_py()!r}"
            raise UserError(f"{self.path}: {problem}; keep one of them")
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
        self.items = items
        self.key = items.key
        schema = scorer.schema
        feature_sources = scorer.encoder.feature_sources
        self._feature_sources = {
            n: sources
            for n, sources in feature_sources.items()
            if items.columns.issuperset(sources)
        }
        for name, sources in feature_sources.items():
            own_sources = [
                source for source in sources if source in items.columns and source != items.key
            ]
            if len(sources) > 1 and own_sources and name not in self._feature_sources:
                source = repr(own_sources[0])
                problem = (
                    f"columns.{name}: made of {source}, which the catalogue has, and of what it"
                    " does not have"
                )
                raise UserError(
                    f"{items.path}: {problem}; leave {source} out of it, and send it with the"
                    " candidates"
                )
        self._crosses = {name for name in self._feature_sources if schema.columns[name].cross}
        self._numbers = schema.side_by_side(
            [name for name in schema.dense if name in self._feature_sources]
        )
        self._lists = [
            name for name in self._feature_sources if schema.columns[name].kind == "list"
        ]
        self._ids = [
            name for name in self._feature_sources if name not in {*self._numbers, *self._lists}
        ]
        files = scorer.folder.manifest["files"]
        used = [
            (name, files[name]["sha256"])
            for name in files
            if name.startswith(("schema.toml", "vocabulary/"))
        ]
        digest = hashlib.sha256(repr(sorted(used)).encode()).hexdigest()
        path = items.ensure_file(
            f"{digest[:16]}.encoded", lambda to: save_file(self._encode(scorer.encoder), to)
        )
        self._arrays = _arrays(path)

    def known(self, rows: Rows, columns: Collection[str]) -> Known | None:
        """Returns the features that a request lacks, see `Catalogue`."""
        row_columns = rows.keys() if isinstance(rows, Mapping) else rows[0].keys() if rows else ()
        columns = {*columns, *row_columns}
        more = columns - {self.key}  # a cross of the key may be of what only the catalogue has, too
        lacking = set()
        for name, sources in self._feature_sources.items():
            sent = more if name in self._crosses else columns
            if sent.isdisjoint(sources):
                lacking.add(name)
        if self.key not in row_columns or not lacking:
            return None
        row_B = self.items.rows_of(values_of(rows, self.key))
        single_B = np.ones(len(row_B), np.int64)
        ids_BF = self._arrays["ids"][row_B]
        numbers_BC = self._arrays["numbers"][row_B]
        parts = {name: Part(ids_BF[:, f], single_B) for f, name in enumerate(self._ids)}
        for name, at in self._numbers.items():
            parts[name] = Part(single_B[:0], single_B[:0], None, numbers_BC[:, at].T.reshape(-1))
        parts |= {name: self._list(name, row_B) for name in self._lists}
        return Known(self.key, {name: parts[name] for name in lacking}, row_B == len(self.items))

    def fill_columns(self, request: Request) -> Request:
        """Returns a request with the raw columns that its candidates lack."""
        if self.key not in request.candidates:
            return request
        present = request.user.keys() | request.candidates.keys()
        own = self.items.get(request.candidates[self.key])
        raw = {name: values for name, values in own.items() if name not in present}
        return replace(request, candidates={**raw, **request.candidates})

    def _list(self, name: str, row_B: Int64s) -> Part:
        values = self._arrays[f"values {name}"]
        offsets = self._arrays[f"offsets {name}"]
        weights = self._arrays.get(f"weights {name}")
        begin_B = offsets[row_B]
        length_B = offsets[row_B + 1] - offsets[row_B]
        shift_B = begin_B - (np.cumsum(length_B) - length_B)
        at_N = np.arange(length_B.sum()) + np.repeat(shift_B, length_B)
        return Part(values[at_N], length_B, None if weights is None else weights[at_N])

    def _encode(self, encoder: Encoder) -> dict[str, Array]:
        """Encode the items, and one more that has no values."""
        rows = self.items.rows
        size = len(self.items)
        parts: dict[str, list[Part]] = {name: [] for name in self._feature_sources}
        try:
            for row0 in range(0, size, _BLOCK):
                for name, blocks in parts.items():
                    blocks.append(encoder.part(name, rows.slice(row0, _BLOCK), row0))
        except UserError as error:
            raise UserError(f"{self.items.path}: {error}") from None

        def join_field(name: str, field: str, *last: float) -> Array:
            arrays = [getattr(part, field) for part in parts[name]]
            return np.concatenate([*arrays, np.array(last, arrays[0].dtype)])

        def join_numbers(name: str, width: int) -> Array:
            arrays = [
                part.numbers.reshape(width, -1) for part in parts[name] if part.numbers is not None
            ]
            return np.concatenate([*arrays, np.full((width, 1), np.nan)], axis=1)

        ids = [join_field(name, "values", MISSING) for name in self._ids]
        numbers = [join_numbers(name, at.stop - at.start) for name, at in self._numbers.items()]
        wide = {
            "ids": np.array(ids, np.int64),
            "numbers": np.concatenate([np.empty((0, size + 1)), *numbers]),
        }
        encoded = {
            kind: np.ascontiguousarray(x.reshape(-1, size + 1).T) for kind, x in wide.items()
        }
        for name in self._lists:
            encoded[f"values {name}"] = join_field(name, "values")
            encoded[f"offsets {name}"] = np.cumsum(np.append(0, join_field(name, "lengths", 0)))
            if parts[name][0].weights is not None:
                encoded[f"weights {name}"] = join_field(name, "weights")
        return encoded


def _lock(fd: int) -> None:
    """Lock a file. Who waits for it asks again and again: who does nothing for long is taken to
    hang.
    """
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.01)


def _write(file: pq.ParquetFile, to: Path) -> None:
    """Write the rows of a file so that they can be mapped, and any of them taken without a copy of
    the others.
    """
    with pa.ipc.new_file(str(to), file.schema_arrow) as out:
        out.write_table(file.read().combine_chunks())


def _arrays(path: Path) -> dict[str, Array]:
    """Returns the arrays of a file, mapped."""
    return {name: tensor.numpy() for name, tensor in tensors_of(path).items()}

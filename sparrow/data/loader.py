"""Prepared log -> batches, in a seeded order that can be taken up again at any batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.core.errors import suggest
from sparrow.data.fit import PARTS
from sparrow.data.prepared import VERSION, sha256
from sparrow.data.schema import Column, Schema
from sparrow.data.spool import ahead
from sparrow.data.transformed import Transforms, weights_of

WINDOW_GROUPS = 4  # row groups whose rows are shuffled together; three windows are in memory at a time

_ROWS = ("rows", "rows_before")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """A prepared log: path, its fitted schema, and what its manifest counts."""

    path: Path
    schema: Schema
    manifest: Mapping[str, Any]

    def rows(self, split: str = "train") -> int:
        """Rows of train, valid or test."""
        return int(self.manifest["rows"][_known(split)])

    def rows_before(self, split: str = "train") -> int:
        """Rows of a part before `negatives` left some out."""
        return int(self.manifest["rows_before"][_known(split)])

    def label_mean(self, split: str = "train", label: str | None = None) -> float:
        """Share of ones among a part's labels, the first one's unless told; NaN for a part without rows.

        UserError for an unknown part or label.
        """
        means = self.manifest["label_mean"][_known(split)]
        label = label or self.schema.labels[0]
        if label not in means:
            raise UserError(f"label: none is named {label!r}{suggest(label, means)}")
        return float("nan") if means[label] is None else float(means[label])

    @property
    def negatives(self) -> float:
        """The share w of training rows without a click that were kept; scores p become p / (p + (1 - p) / w)."""
        return self.schema.split.negatives

    @cached_property
    def transforms(self) -> Transforms:
        """What the rows passed through, to save beside a model; UserError for a damaged vocabulary."""
        return Transforms.load(self.path)

    def loader(self, batch_size: int, split: str = "train", shuffle: bool = False, seed: int = 0) -> Loader:
        """Batches of a part; see `Loader`. UserError for an unknown part or a batch_size below 1."""
        return Loader(self.schema, self._file(split), batch_size, shuffle=shuffle, seed=seed)

    def baselines(self, split: str, batch_size: int = 1 << 16) -> Iterator[tuple[str, Loader]]:
        """Every baseline column with batches whose one dense column it is, to be measured like a model's scores."""
        kept = {n: c for n, c in self.schema.columns.items() if c.kind in ("label", "group", "weight")}
        for name in self.schema.of_kind("baseline"):
            columns = {**kept, name: Column(kind="numeric")}
            yield name, Loader(replace(self.schema, columns=columns, tables={}), self._file(split), batch_size)

    @property
    def fingerprint(self) -> str:
        """What tells this prepared log from any other: a digest of its manifest, which knows every file's."""
        return sha256(self.path / "manifest.json")

    def _file(self, split: str) -> Path:
        return self.path / _known(split) / "part-00000.parquet"


def open(prepared_dir: str | Path) -> Dataset:
    """Open what `prepare` wrote; UserError when it is no prepared log, of another version, or was edited."""
    path = Path(prepared_dir)
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        version = manifest["version"]
    except (FileNotFoundError, NotADirectoryError):
        former = next(iter(path.parent.glob(f".{path.name}.*/old")), None)  # --overwrite, killed between two renames
        remedy = f"move {former} back to {path}" if former else "make one with `sparrow prepare`"
        raise UserError(f"{path}: not a prepared log (no manifest.json); {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / 'manifest.json'}: damaged; prepare the log again") from None
    if version != VERSION:
        raise UserError(f"{path}: prepared in format {version}, this Sparrow reads {VERSION}; prepare the log again")
    try:
        digest, vocabularies, _ = manifest["schema_sha256"], manifest["vocabulary_sha256"], manifest["parts_sha256"]
        _ = [(int(manifest[rows][part]), manifest["label_mean"][part].items()) for rows in _ROWS for part in PARTS]
        files = ("schema.toml", *vocabularies, *(f"{part}/part-00000.parquet" for part in PARTS))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path / 'manifest.json'}: damaged; prepare the log again") from None
    for file in files:
        if not (path / file).is_file():
            raise UserError(f"{path / file}: missing; prepare the log again")
    if sha256(path / "schema.toml") != digest:
        remedy = "prepare the log again with the edited one (--schema)"
        raise UserError(f"{path / 'schema.toml'}: changed since the log was prepared; {remedy}")
    return Dataset(path, Schema.load(path / "schema.toml"), manifest)


class Loader:
    """Batches of one part: iterate for the rest of the current epoch; the next iteration is the next epoch.

    Batch k holds rows [k * batch_size, (k + 1) * batch_size) of the epoch's order: the file's, or with shuffle one
    drawn from (seed, epoch): row groups in random order, and rows at random within windows of WINDOW_GROUPS groups.
    One thread reads a window ahead; it ends with the iteration, also an abandoned one.
    """

    def __init__(
        self,
        schema: Schema,
        file: Path,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size: {batch_size} holds no rows; use 1 or more")
        self.schema, self.batch_size = schema, batch_size
        self._file, self._shuffle, self._seed = file, shuffle, seed % (1 << 64)  # numpy takes no negative seed
        with _parquet(file) as parquet:
            meta = parquet.metadata
            self._group_rows = np.array([meta.row_group(i).num_rows for i in range(meta.num_row_groups)], np.int64)
        rows = int(self._group_rows.sum())
        self._batches = -(-rows // batch_size)
        self._columns = schema.of_kind("label", "weight", "group", "numeric", "categorical", "list")
        self._columns += tuple(weights_of(name) for name, column in schema.columns.items() if column.weights)
        self._epoch = self._next = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        if self._next < self._batches:
            for batch in _ahead(self._tables(), self.schema, self.batch_size, self._batches - self._next):
                self._next += 1
                yield batch
        self._epoch, self._next = self._epoch + 1, 0

    def bytes_ahead(self) -> int:
        """About the memory that an iteration takes: three windows of rows, as Parquet counts them unpacked."""
        with _parquet(self._file) as parquet:
            meta = parquet.metadata
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
        size = max((group.total_byte_size for group in groups), default=0)
        return 3 * size * min(WINDOW_GROUPS if self._shuffle else 1, len(groups))

    @property
    def exhausted(self) -> bool:
        """Whether the current epoch has no batch left."""
        return self._next >= self._batches

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: the epoch and the next batch of it."""
        return {"epoch": self._epoch, "batch": self._next, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Stand where `state_dict` was taken; UserError for another batch size, whose batches are cut elsewhere."""
        if state["batch_size"] != self.batch_size or not 0 <= state["batch"] <= self._batches:
            raise UserError(
                f"batch_size: {self.batch_size} over {self._batches} batches cannot take up {dict(state)}; "
                "keep the data and the batch size of the run"
            )
        self._epoch, self._next = state["epoch"], state["batch"]

    def _tables(self) -> Iterator[pa.Table]:
        """The epoch's rows from the next batch on, a window at a time; earlier windows are not read."""
        order = np.arange(len(self._group_rows))
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        size = WINDOW_GROUPS if self._shuffle else 1
        skip = self._next * self.batch_size
        with _parquet(self._file) as parquet:
            for first in range(0, len(order), size):
                groups = order[first : first + size]
                rows = int(self._group_rows[groups].sum())
                if skip < rows:
                    table = self._read(parquet, groups.tolist())
                    if self._shuffle:
                        rng = np.random.default_rng((self._seed, self._epoch, first))
                        table = table.take(pa.array(rng.permutation(rows)))
                    yield table.slice(skip)
                skip = max(skip - rows, 0)

    def _read(self, parquet: pq.ParquetFile, groups: list[int]) -> pa.Table:
        try:
            return parquet.read_row_groups(groups, list(self._columns), use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{self._file}: damaged ({str(error).splitlines()[0]}); prepare the log again") from None


def _parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowInvalid, FileNotFoundError) as error:
        raise UserError(f"{file}: damaged ({str(error).splitlines()[0]}); prepare the log again") from None


def batches(schema: Schema, table: pa.Table, batch_size: int) -> Iterator[Batch]:
    """Batches of a table that `transform` made, in order; the last one may be shorter."""
    return _Window(schema, table).batches(batch_size)


class _Window:
    """Some thousand rows as numpy arrays; batches are slices of them."""

    def __init__(self, schema: Schema, table: pa.Table) -> None:
        self.schema, self.rows = schema, table.num_rows
        self.dense_NC = np.empty((self.rows, len(schema.dense)), np.float32)
        for c, name in enumerate(schema.dense):
            self.dense_NC[:, c] = table[name].to_numpy()
        self.ids = [_values_and_offsets(table[name]) for name in schema.sparse]
        self.weights: dict[str, Array] = {}
        for name, column in schema.columns.items():
            if column.weights:
                self.weights[name] = pc.list_flatten(table[weights_of(name)]).to_numpy()
        self.roles = {}
        for kind in ("weight", "group"):
            role = schema.role(kind)
            if role is not None and role in table.column_names:
                self.roles[kind] = np.array(table[role].to_numpy())  # a copy: torch wants memory it may write
        if schema.labels and all(name in table.column_names for name in schema.labels):
            self.roles["label"] = np.stack([table[name].to_numpy() for name in schema.labels], axis=1)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """The rows in order, batch_size at a time."""
        return (self.batch(low, min(low + batch_size, self.rows)) for low in range(0, self.rows, batch_size))

    def batch(self, low: int, high: int) -> Batch:
        """Rows [low, high)."""
        values, lengths, weights = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        ones = np.ones(high - low, np.int64)
        for name, (ids, offsets) in zip(self.schema.sparse, self.ids, strict=True):
            first, last = (low, high) if offsets is None else (int(offsets[low]), int(offsets[high]))
            values.append(ids[first:last])
            lengths.append(ones if offsets is None else np.diff(offsets[low : high + 1]))
            if self.weights:
                w_N = self.weights.get(name)
                weights.append(np.ones(last - first, np.float32) if w_N is None else w_N[first:last])
        roles = {kind: torch.from_numpy(values[low:high]) for kind, values in self.roles.items()}
        return Batch(
            dense_BC=torch.from_numpy(self.dense_NC[low:high]),
            ids=KeyedJagged(
                keys=self.schema.sparse,
                values_N=torch.from_numpy(np.concatenate(values)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
                weights_N=torch.from_numpy(np.concatenate(weights)) if self.weights else None,
            ),
            labels_BT=roles.get("label"),
            weights_B=roles.get("weight"),
            session_B=roles.get("group"),
        )


def _values_and_offsets(column: pa.ChunkedArray) -> tuple[Array, Array | None]:
    if not pa.types.is_large_list(column.type):
        return column.to_numpy().astype(np.int64, copy=False), None
    lengths = pc.list_value_length(column).to_numpy()
    ids = pc.list_flatten(column).to_numpy().astype(np.int64, copy=False)
    return ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _windows(tables: Iterator[pa.Table], schema: Schema, batch_size: int) -> Iterator[_Window]:
    """Windows of whole batches: the rows that do not fill one wait for the next table; the last is what is left."""
    left: pa.Table | None = None
    for table in tables:
        left = table if left is None else pa.concat_tables([left, table])
        rows = left.num_rows - left.num_rows % batch_size
        if rows:
            yield _Window(schema, left.slice(0, rows))
            left = left.slice(rows)
    if left is not None and left.num_rows:
        yield _Window(schema, left)


def _ahead(tables: Iterator[pa.Table], schema: Schema, batch_size: int, count: int) -> Iterator[Batch]:
    """The first `count` batches; a thread makes the next window while this one is used."""
    for window in ahead(_windows(tables, schema, batch_size), "sparrow-loader"):
        for batch in window.batches(batch_size):
            yield batch
            count -= 1
            if not count:
                return


def _known(split: str) -> str:
    if split not in PARTS:
        raise UserError(f"split: no part {split!r}{suggest(split, PARTS)}")
    return split

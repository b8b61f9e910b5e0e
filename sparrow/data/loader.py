"""Prepared log -> batches, in a seeded order that can be taken up again at any batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core import Batch, UserError
from sparrow.core.errors import suggest
from sparrow.data._rows import Int64s, Rows, joined
from sparrow.data.fit import PARTS
from sparrow.data.prepared import VERSION, sha256
from sparrow.data.schema import Column, Schema
from sparrow.data.spool import ahead
from sparrow.data.transformed import Transforms, weights_of

WINDOW_GROUPS = 4  # row groups whose rows are shuffled together; two windows are in memory at a time


@dataclass(frozen=True)
class Dataset:
    """A prepared log: path, its fitted schema, and what its manifest counts."""

    path: Path
    schema: Schema
    manifest: Mapping[str, Any]

    def rows(self, split: str = "train") -> int:
        """Rows of train, valid or test."""
        return int(self.manifest["rows"][_known(split)])

    def label_mean(self, split: str = "train", label: str | None = None) -> float:
        """Share of ones among a part's labels, the first one's unless told; NaN for a part without rows.

        UserError for an unknown part or label.
        """
        means = self.manifest["label_mean"][_known(split)]
        label = label or self.schema.labels[0]
        if label not in means:
            raise UserError(f"label: none is named {label!r}{suggest(label, means)}")
        return float("nan") if means[label] is None else float(means[label])

    @cached_property
    def transforms(self) -> Transforms:
        """What the rows passed through, to save beside a model; UserError for a damaged vocabulary."""
        return Transforms.load(self.path)

    def loader(self, batch_size: int, split: str = "train", shuffle: bool = False, seed: int = 0) -> Loader:
        """Batches of a part; see `Loader`. UserError for an unknown part or a batch_size below 1."""
        return Loader(self.schema, self._file(split), batch_size, shuffle=shuffle, seed=seed)

    def first(self, rows: int, split: str = "train") -> Batch:
        """The first rows of a part, as many as there are at most."""
        with _parquet(self._file(split)) as parquet:
            batch = next(parquet.iter_batches(rows, row_groups=[0]))
        table = pa.Table.from_batches([batch])
        return Rows(self.schema, [table], table.num_rows).batch(np.arange(table.num_rows))

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
        _ = [(int(manifest["rows"][part]), manifest["label_mean"][part].items()) for part in PARTS]
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
            for batch in _cut(ahead(self._windows(), "sparrow-loader"), self.batch_size, self._batches - self._next):
                self._next += 1
                yield batch
        self._epoch, self._next = self._epoch + 1, 0

    def bytes_ahead(self) -> int:
        """About the memory that an iteration takes: two windows of rows, as Parquet counts them, and a group."""
        with _parquet(self._file) as parquet:
            meta = parquet.metadata
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
        size = max((group.total_byte_size for group in groups), default=0)
        return size + 2 * size * min(WINDOW_GROUPS if self._shuffle else 1, len(groups))

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

    def _windows(self) -> Iterator[tuple[Rows, Int64s]]:
        """The epoch's rows from the next batch on, a window at a time with its order; earlier windows are not read."""
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
                    places = np.arange(rows)
                    if self._shuffle:
                        places = np.random.default_rng((self._seed, self._epoch, first)).permutation(rows)
                    tables = (self._read(parquet, group) for group in groups.tolist())
                    yield Rows(self.schema, tables, rows), places[skip:]
                skip = max(skip - rows, 0)

    def _read(self, parquet: pq.ParquetFile, group: int) -> pa.Table:
        try:
            return parquet.read_row_groups([group], list(self._columns), use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{self._file}: damaged ({str(error).splitlines()[0]}); prepare the log again") from None


def _parquet(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowInvalid, FileNotFoundError) as error:
        raise UserError(f"{file}: damaged ({str(error).splitlines()[0]}); prepare the log again") from None


def _cut(windows: Iterator[tuple[Rows, Int64s]], batch_size: int, count: int) -> Iterator[Batch]:
    """The first `count` batches; the last one may be shorter."""
    held: list[Batch] = []  # of the next batch
    missing = batch_size
    for rows, order in windows:
        while len(order):
            held.append(rows.batch(order[:missing]))
            missing, order = missing - held[-1].batch_size, order[missing:]
            if not missing:
                yield joined(held)
                held, missing, count = [], batch_size, count - 1
                if not count:
                    return
    if held:
        yield joined(held)


def _known(split: str) -> str:
    if split not in PARTS:
        raise UserError(f"split: no part {split!r}{suggest(split, PARTS)}")
    return split

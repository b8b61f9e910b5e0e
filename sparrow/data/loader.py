"""Prepared log -> batches, in a seeded order that can be taken up again at any batch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core import Batch, UserError
from sparrow.core.errors import suggest
from sparrow.data._rows import Int64s, Rows, joined
from sparrow.data.fit import PARTS
from sparrow.data.parts import PAYS, ROWS, RUN, group_file, opened, read_group, request
from sparrow.data.prepared import VERSION, sha256
from sparrow.data.runs import begins
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

    def loader(
        self, batch_size: int, split: str = "train", shuffle: bool = False, seed: int = 0,
        dedup: Literal["auto", "on", "off"] = "auto",
    ) -> Loader:  # fmt: skip
        """Batches of a part; see `Loader`. UserError for an unknown part or a batch_size below 1.

        dedup: whether batches have equal rows of groups once, with an inverse index; auto where it `pays`.
        """
        unique = [group for group in self.schema.groups if dedup == "on" or self.pays(group)] if dedup != "off" else []
        return Loader(self.schema, self._part(split), batch_size, shuffle=shuffle, seed=seed, unique=unique)

    def factor(self, group: str) -> float:
        """Training rows for every run of equal rows of a group: how often less its features are stored, and about how
        often less looked up (RecD's dedupe factor, for batches that hold whole sessions).
        """
        return self.rows() / max(int(self.manifest["runs"]["train"][group]), 1)

    def pays(self, group: str) -> bool:
        """Whether a group's equal rows are many enough to be looked up once (PAYS)."""
        return self.factor(group) >= PAYS

    def first(self, rows: int, split: str = "train") -> Batch:
        """The first rows of a part, as many as there are at most."""
        if not self.rows(split):
            raise UserError(f"{self._part(split)}: no rows; prepare the log with some for it")
        with opened(self._part(split), self.schema) as parquet:
            first = Rows(self.schema, [read_group(parquet, 0)])
        return first.batch(np.arange(min(rows, len(first))))

    def column(self, name: str, split: str) -> pa.ChunkedArray:
        """One of the part's columns, a row each."""
        group = next((group for group, names in self.schema.groups.items() if name in names), None)
        file, wanted = (ROWS, [name]) if group is None else (group_file(group), [RUN, name])
        return self.rows_of({file: pq.read_table(self._part(split) / file, columns=wanted)})[name]

    def rows_of(self, tables: Mapping[str, pa.Table]) -> pa.Table:
        """What `read_group` gave as one table, in which runs are repeated for each of their rows."""
        columns: dict[str, pa.ChunkedArray] = {}
        for table in tables.values():
            if RUN in table.column_names:
                table = table.take(pa.array(np.repeat(np.arange(table.num_rows), table[RUN].to_numpy())))
            columns |= dict(zip(table.column_names, table.columns, strict=True))
        return pa.table({name: column for name, column in columns.items() if name != RUN})

    def baselines(self, split: str, batch_size: int = 1 << 16) -> Iterator[tuple[str, Loader]]:
        """Every baseline column with batches whose one dense column it is and whose label is the log's first.

        To be measured like a model's scores.
        """
        first = self.schema.labels[:1]
        kept = {n: c for n, c in self.schema.columns.items() if c.kind in ("group", "weight") or n in first}
        for name in self.schema.of_kind("baseline"):
            columns = {**kept, name: Column(kind="numeric")}
            yield (
                name,
                Loader(
                    replace(self.schema, columns=columns, tables={}, groups={}, cluster=None),
                    self._part(split),
                    batch_size,
                ),
            )

    @property
    def fingerprint(self) -> str:
        """What tells this prepared log from any other: a digest of its manifest, which knows every file's."""
        return sha256(self.path / "manifest.json")

    def _part(self, split: str) -> Path:
        return self.path / _known(split)


def open(prepared_dir: str | Path) -> Dataset:
    """Open what `prepare` wrote; UserError when it is no prepared log, of another version, or was edited."""
    path = Path(prepared_dir)
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        version = manifest["version"]
    except (FileNotFoundError, NotADirectoryError):
        former = next(iter(path.parent.glob(f".{path.name}.*/old")), None)  # --overwrite, killed between two renames
        remedy = f"move {former} back to {path}" if former else "make one with `sparrow prepare`"
        lacks = "no manifest.json" if path.exists() else "it does not exist"
        raise UserError(f"{path}: not a prepared log ({lacks}); {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / 'manifest.json'}: damaged; prepare the log again") from None
    if version != VERSION:
        raise UserError(f"{path}: prepared in format {version}, this Sparrow reads {VERSION}; prepare the log again")
    try:
        digest, vocabularies = manifest["schema_sha256"], manifest["vocabulary_sha256"]
        _ = [(int(manifest["rows"][part]), manifest["label_mean"][part].items()) for part in PARTS]
        _ = [(manifest["runs"][part].items(), manifest["saved_bytes"][part].items()) for part in PARTS]
        names = ("schema.toml", *vocabularies, *manifest["parts_sha256"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path / 'manifest.json'}: damaged; prepare the log again") from None
    for file in names:
        if not (path / file).is_file():
            raise UserError(f"{path / file}: missing; prepare the log again")
    if sha256(path / "schema.toml") != digest:
        remedy = "prepare the log again with the edited one (--schema)"
        raise UserError(f"{path / 'schema.toml'}: changed since the log was prepared; {remedy}")
    return Dataset(path, Schema.load(path / "schema.toml"), manifest)


class Loader:
    """Batches of one part: iterate for the rest of the current epoch; the next iteration is the next epoch.

    Batch k holds rows [k * batch_size, (k + 1) * batch_size) of the epoch's order: the file's, or with shuffle one
    drawn from (seed, epoch): row groups in random order, and rows at random within windows of WINDOW_GROUPS groups. Of
    a clustered log sessions are what is put in random order, and each end of a batch moves to the beginning of its
    request (one of more than batch_size rows is cut), so that a batch has up to twice as many rows, or fewer. unique:
    groups of features whose equal rows a batch has once.
    One thread reads a window ahead; it ends with the iteration, also an abandoned one.
    """

    def __init__(
        self,
        schema: Schema,
        folder: Path,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        unique: Collection[str] = (),
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size: {batch_size} holds no rows; use 1 or more")
        self.schema, self.batch_size = schema, batch_size
        self._folder, self._shuffle, self._seed = folder, shuffle, seed % (1 << 64)  # numpy takes no negative seed
        self._unique = unique
        with opened(folder, schema) as parquet:
            meta = next(iter(parquet.values())).metadata
            self._group_rows = np.array([meta.row_group(i).num_rows for i in range(meta.num_row_groups)], np.int64)
        rows = int(self._group_rows.sum())
        self._batches = -(-rows // batch_size)
        self._columns = schema.of_kind("label", "weight", "group", "numeric", "categorical", "list")
        self._columns += tuple(weights_of(name) for name, column in schema.columns.items() if column.weights)
        if schema.cluster:
            self._columns += (schema.cluster.by, *request(schema))
        self._epoch = self._next = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        if self._next < self._batches:
            for batch in self._cut(ahead(self._windows(), "sparrow-loader")):
                self._next += 1
                yield batch
        self._epoch, self._next = self._epoch + 1, 0

    def bytes_ahead(self) -> int:
        """About the memory that an iteration takes: two windows of rows, as Parquet counts them, and a group."""
        with opened(self._folder, self.schema) as parquet:
            metas = [file.metadata for file in parquet.values()]
            sizes = [sum(m.row_group(i).total_byte_size for m in metas) for i in range(metas[0].num_row_groups)]
        return max(sizes, default=0) * (1 + 2 * min(WINDOW_GROUPS if self._shuffle else 1, len(sizes)))

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

    def _windows(self) -> Iterator[tuple[Rows, Int64s, Int64s]]:
        """The epoch's rows from the next batch on, a window at a time: its order, and where in that batches begin.

        Windows before are not read.
        """
        order = np.arange(len(self._group_rows))
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        size, low = WINDOW_GROUPS if self._shuffle else 1, 0
        with opened(self._folder, self.schema) as parquet:
            for first in range(0, len(order), size):
                groups = order[first : first + size]
                high = low + int(self._group_rows[groups].sum())
                if self._next * self.batch_size < high:
                    rows = Rows(
                        self.schema,
                        [read_group(parquet, group, self._columns) for group in groups.tolist()],
                        self._unique,
                    )
                    random = np.random.default_rng((self._seed, self._epoch, first)) if self._shuffle else None
                    places, requests = self._order(rows, random)
                    wanted = np.arange(max(self._next, -(-low // self.batch_size)), -(-high // self.batch_size))
                    edges = wanted * self.batch_size - low
                    if requests is not None:
                        edges = requests[np.searchsorted(requests, edges, "right") - 1]
                    yield rows, places, edges
                low = high

    def _order(self, rows: Rows, random: np.random.Generator | None) -> tuple[Int64s, Int64s | None]:
        """The places of a window's rows in this epoch's order, and where in that requests begin."""
        places, cluster = np.arange(len(rows)), self.schema.cluster
        if cluster is None:
            return (places if random is None else random.permutation(len(rows))), None
        if random is not None:
            kind = self.schema.columns[cluster.by].kind
            session = np.append(np.flatnonzero(begins([(rows.column(kind), None)], len(rows))), len(rows))
            chosen = random.permutation(len(session) - 1)
            lengths = np.diff(session)[chosen]
            places = np.repeat(session[chosen] - np.cumsum(lengths) + lengths, lengths) + places
        columns = [(rows.column(self.schema.columns[name].kind), None) for name in (cluster.by, *request(self.schema))]
        starts = np.flatnonzero(begins(columns, len(rows))[places])
        if random is not None:  # neighbours now, that were not before
            starts = np.union1d(starts, np.cumsum(lengths)[:-1])
        lengths = np.diff(starts, append=len(rows))
        pieces = -(-lengths // self.batch_size)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        return places, np.repeat(starts, pieces) + within * self.batch_size

    def _cut(self, windows: Iterator[tuple[Rows, Int64s, Int64s]]) -> Iterator[Batch]:
        """The batches from the next one on."""
        held: list[Batch] = []  # of the next batch
        begun = False
        for rows, places, edges in windows:
            at = 0
            for edge in edges.tolist():
                if begun and edge > at:
                    held.append(rows.batch(places[at:edge]))
                if held:
                    yield joined(held)
                held, begun, at = [], True, edge
            if at < len(places):
                held.append(rows.batch(places[at:]))
        if held:
            yield joined(held)


def _known(split: str) -> str:
    if split not in PARTS:
        raise UserError(f"split: no part {split!r}{suggest(split, PARTS)}")
    return split

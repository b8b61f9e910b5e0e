"""A prepared log, opened: what its manifest counts, its columns, and batches of its parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core import Batch, UserError
from sparrow.core.errors import suggest
from sparrow.core.files import MANIFEST, manifest_file
from sparrow.data.batches.loader import Loader
from sparrow.data.batches.parts import (
    PARTS,
    ROWS,
    VERSION,
    group_file,
    open_files,
    pays,
    read_groups,
    sha256,
)
from sparrow.features.clipped import Clipped
from sparrow.features.rows import Rows
from sparrow.features.schema import RUN, Column, Schema
from sparrow.features.skew import Skew
from sparrow.features.transforms import Transforms

_AGAIN = "prepare the log again"  # what helps where a file is wrong


@dataclass(frozen=True)
class Dataset:
    """A prepared log.

    path: its folder. schema: its fitted schema. manifest: what was counted when it was prepared.
    """

    path: Path
    schema: Schema
    manifest: Mapping[str, Any]

    def rows(self, split: str = "train") -> int:
        """Returns how many rows a part has: train, valid or test.

        Raises:
            UserError: for an unknown part.
        """
        return int(self.manifest["rows"][_known(split)])

    def counts(self, split: str = "train") -> bool:
        """Returns whether any row of a part has a weight above 0.

        Raises:
            UserError: for an unknown part.
        """
        columns = {name: self.schema.columns[name] for name in self.schema.weights}
        if not columns:
            return self.rows(split) > 0
        weights = replace(self.schema, columns=columns, encodings={}, groups={}, cluster=None)
        return any(batch.mass > 0 for batch in Loader(weights, self._part(split), 1 << 16))

    def skew(self) -> Skew:
        """Returns how the log, in all its parts, differs from what its schema was fitted on."""
        counts = self.manifest["clipped"].items()
        clipped = Clipped({name: tuple(count_and_first) for name, count_and_first in counts})
        return Skew.from_dict(self.manifest.get("skew", {}), clipped)

    def log_odds(self) -> list[float]:
        """Returns the log of the odds of each label among the training rows that a loss sees.

        Rows count by their sample weights. Negatives that were left out do not count, nor do rows
        that lack the label. It is the empirical logit, the log of (ones + 1/2) / (zeros + 1/2). So
        it is finite for labels that are all alike, too.
        """
        rates = self.manifest["base_rate"]
        lacks = self.manifest.get("unlabelled", {})
        rows = {
            label: self.rows() - lacks.get(label, {"train": 0})["train"]
            for label in self.schema.labels
        }
        rows |= self.manifest.get("impressions", {})
        odds = []
        for label, n in rows.items():
            positives = rates[label] * n + 0.5
            negatives = (1 - rates[label]) * n + 0.5
            odds.append(math.log(positives / negatives))
        return odds

    @cached_property
    def transforms(self) -> Transforms:
        """What the rows passed through, to save beside a model.

        Raises:
            UserError: for a damaged vocabulary.
        """
        return Transforms.load(self.path)

    def loader(
        self,
        batch_size: int,
        split: str = "train",
        shuffle: bool = False,
        seed: int = 0,
        dedup: Literal["auto", "on", "off"] = "auto",
        rank: int = 0,
        ranks: int = 1,
    ) -> Loader:
        """Returns the batches of a part; see `Loader`.

        Args:
            batch_size: rows of a batch.
            split: the part: train, valid or test.
            shuffle: whether rows come in a random order.
            seed: what the random order is drawn from.
            dedup: whether a batch has equal rows of a feature group once, with an inverse index.
                "auto": where it `pays`.
            rank: which of the readers this one is.
            ranks: how many readers share each batch.

        Raises:
            UserError: for an unknown part, and for a batch_size below 1.
        """
        groups = self.schema.groups if dedup != "off" else ()
        unique = [group for group in groups if dedup == "on" or self.pays(group, ranks)]
        return Loader(
            self.schema,
            self._part(split),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            unique=unique,
            rank=rank,
            ranks=ranks,
        )

    def factor(self, group: str) -> float:
        """Returns a group's dedup factor: the training rows for each run of equal rows.

        Its features are stored that many times less often. They are looked up about as many times
        less often, for batches that hold whole sessions (RecD's dedupe factor).
        """
        return self.rows() / max(int(self.manifest["runs"]["train"][group]), 1)

    def pays(self, group: str, ranks: int = 1) -> bool:
        """Returns whether a group's equal rows are by default looked up once, by so many
        readers.
        """
        return pays(self.schema, group, self.factor(group), ranks)

    def first(self, rows: int, split: str = "train") -> Batch:
        """Returns the first `rows` rows of a part, or all where there are fewer.

        Raises:
            UserError: for an unknown part, and for one without rows.
        """
        if not self.rows(split):
            raise UserError(f"{self._part(split)}: no rows; prepare the log with some for it")
        with open_files(self._part(split), self.schema) as parquet:
            meta = parquet[None].parquet.metadata
            ends = np.cumsum([meta.row_group(i).num_rows for i in range(meta.num_row_groups)])
            first = Rows(
                self.schema,
                [read_groups(parquet, list(range(int((ends < rows).sum()) + 1))[: len(ends)])],
            )
        return first.batch(np.arange(min(rows, len(first))))

    def column(self, name: str, split: str) -> pa.ChunkedArray:
        """Returns one of the part's columns, with an entry for each row.

        Raises:
            UserError: for an unknown part.
        """
        group = next((group for group, names in self.schema.groups.items() if name in names), None)
        file, wanted = (ROWS, [name]) if group is None else (group_file(group), [RUN, name])
        return self.rows_of({group: pq.read_table(self._part(split) / file, columns=wanted)})[name]

    def rows_of(self, tables: Mapping[str | None, pa.Table]) -> pa.Table:
        """Returns what `read_groups` gave as one table with a row for each row of the log: each run
        is repeated.
        """
        columns: dict[str, pa.ChunkedArray] = {}
        for table in tables.values():
            if RUN in table.column_names:
                table = table.take(
                    pa.array(np.repeat(np.arange(table.num_rows), table[RUN].to_numpy()))
                )
            columns |= dict(zip(table.column_names, table.columns, strict=True))
        return pa.table({name: column for name, column in columns.items() if name != RUN})

    def baselines(self, split: str, batch_size: int = 1 << 16) -> Iterator[tuple[str, Loader]]:
        """Yields the name of every baseline column with its batches, so that it can be measured
        like a model's scores.

        In these batches the column is the only dense column, and the log's first label is the only
        label.

        Args:
            split: the part: train, valid or test.
            batch_size: rows of a batch.

        Raises:
            UserError: for an unknown part.
        """
        first = self.schema.labels[:1]
        roles = (*self.schema.of_kind("group"), *self.schema.weights, *first)
        role_columns = {n: c for n, c in self.schema.columns.items() if n in roles}
        for name in self.schema.of_kind("baseline"):
            columns = {**role_columns, name: Column(kind="numeric")}
            schema = replace(self.schema, columns=columns, encodings={}, groups={}, cluster=None)
            yield name, Loader(schema, self._part(split), batch_size)

    @property
    def fingerprint(self) -> str:
        """What tells this prepared log from any other: a digest of its manifest, which has the
        digest of every file.
        """
        return sha256(self.path / "manifest.json")

    def _part(self, split: str) -> Path:
        return self.path / _known(split)


def open(prepared_dir: str | Path) -> Dataset:
    """Returns what `prepare` wrote, opened.

    Raises:
        UserError: when it is no prepared log, is of another version, is damaged, or was edited.
    """
    path = Path(prepared_dir)
    try:
        manifest = json.loads(manifest_file(path, MANIFEST, _AGAIN).read_text())
        version = manifest["version"]
    except (FileNotFoundError, NotADirectoryError):
        # --overwrite, killed between two renames
        former = next(iter(path.parent.glob(f".{path.name}.*/old")), None)
        remedy = f"move {former} back to {path}" if former else "make one with `sparrow prepare`"
        lacks = "no manifest.json" if path.exists() else "it does not exist"
        raise UserError(f"{path}: not a prepared log ({lacks}); {remedy}") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / MANIFEST}: damaged; {_AGAIN}") from None
    if version != VERSION:
        raise UserError(
            f"{path}: prepared in format {version}, this Sparrow reads {VERSION}; {_AGAIN}"
        )
    try:
        digest = manifest["schema_sha256"]
        vocabularies = manifest["vocabulary_sha256"]
        _ = [(int(manifest["rows"][part]), manifest["label_mean"][part].items()) for part in PARTS]
        _ = [float(manifest["base_rate"][label]) for label in manifest["label_mean"]["train"]]
        _ = [
            (manifest["runs"][part].items(), manifest["saved_bytes"][part].items())
            for part in PARTS
        ]
        _ = [
            manifest["clipped"].items(),
            *(manifest["unknown_ids"][part].items() for part in PARTS),
        ]
        names = ("schema.toml", *vocabularies, *manifest["parts_sha256"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path / MANIFEST}: damaged; {_AGAIN}") from None
    for file in names:
        if not manifest_file(path, file, _AGAIN).exists():
            raise UserError(f"{path / file}: missing; {_AGAIN}")
    if sha256(path / "schema.toml") != digest:
        remedy = "prepare the log again with the edited one (--schema)"
        raise UserError(f"{path / 'schema.toml'}: changed since the log was prepared; {remedy}")
    return Dataset(path, Schema.load(path / "schema.toml"), manifest)


def _known(split: str) -> str:
    if split not in PARTS:
        raise UserError(f"split: no part {split!r}{suggest(split, PARTS)}")
    return split

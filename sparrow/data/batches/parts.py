"""A part of a prepared log on disk: rows, and beside them groups of features once for every run of
equal rows.

part-00000.parquet holds the columns of no group; group-NAME.parquet those of one, with the rows of
each run in column `:rows`. All files have the same row groups, so that a reader can take one of
each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparrow import features
from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError, complaint
from sparrow.features.schema import RUN, Schema, weights_of

VERSION = 8  # of a prepared log's format
PARTS = ("train", "valid", "test")
ROWS = "part-00000.parquet"
# of a row group, at most: small, so that many readers can divide a batch
GROUP_ROWS = 1 << 12
GROUP_BYTES = 1 << 20
PAYS = 1.1  # rows for a run of equal ones, from which on they are looked up once


def group_file(group: str) -> str:
    """Returns the name of a group's file."""
    return f"group-{quote(group, safe='')}.parquet"


def files(schema: Schema) -> tuple[str, ...]:
    """Returns the names of all files of a part."""
    return (ROWS, *map(group_file, schema.groups))


def pays(schema: Schema, group: str, factor: float, ranks: int = 1) -> bool:
    """Returns whether it takes less time to look a group's equal rows up once.

    One process looks ids up as fast as it finds out which of them repeat, unless they are lists.
    Between ranks, a vector less travels for each repeated row (measured: docs/dedup.md).

    Args:
        schema: the prepared log's.
        group: the feature group.
        factor: rows for each run of equal rows.
        ranks: how many processes train.
    """
    lists = any(schema.columns[name].kind == "list" for name in schema.groups[group])
    return factor >= PAYS and (lists or ranks > 1)


def columns_of(schema: Schema, group: str) -> list[str]:
    """Returns a group's columns, the weights of lists included."""
    names: list[str] = []
    for feature in schema.groups[group]:
        names.append(feature)
        if schema.columns[feature].weights:
            names.append(weights_of(feature))
    return names


def request(schema: Schema) -> list[str]:
    """Returns the columns whose change begins another request.

    They are the group that GAUC ranks within, or where there is none the session and the time.
    """
    group, session, time = (schema.role(kind) for kind in ("group", "session", "time"))
    return [name for name in ((group,) if group else (session, time)) if name]


class PartWriter:
    """Writes one part, in row groups of at most GROUP_ROWS and GROUP_BYTES. If clustered, these
    hold whole requests.

    runs: group -> runs of equal rows so far. saved: group -> bytes that the rows beyond the first
    of each run would take as numbers.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        folder.mkdir()
        self._folder = folder
        self._groups = {group: columns_of(schema, group) for group in schema.groups}
        self._request = request(schema) if schema.cluster else []
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._held: list[pa.Table] = []
        self._rows = self._bytes = 0
        self.runs = dict.fromkeys(schema.groups, 0)
        self.saved = dict.fromkeys(schema.groups, 0)

    def add(self, table: pa.Table) -> None:
        """Takes in rows. The first call fixes the columns, also when it brings no rows."""
        if not self._writers:
            for name, part in self._parts(table.slice(0, 0)).items():
                self._writers[name] = pq.ParquetWriter(
                    self._folder / name,
                    part.schema,
                    compression="lz4",
                    write_page_checksum=True,
                    use_dictionary=False,
                )
        self._held.append(table)
        self._rows = self._rows + table.num_rows
        self._bytes = self._bytes + int(_sizes(table).sum())
        if self._rows > GROUP_ROWS or self._bytes > GROUP_BYTES:
            self._write(is_last=False)

    def _write(self, *, is_last: bool) -> None:
        table = pa.concat_tables(self._held).combine_chunks()
        ends = np.cumsum(_sizes(table))
        at = 0
        total = table.num_rows
        while at < total:
            before = ends[at - 1] if at else 0
            fit = max(int(np.searchsorted(ends, before + GROUP_BYTES, "right")) - at, 1)
            rows = min(GROUP_ROWS, fit, total - at)
            if at + rows == total and not is_last:
                break  # more of its rows may come
            if self._request and at + rows < total:
                head = table.slice(at, rows + 1)
                requests = [features.runs.bits(head[name]) for name in self._request]
                starts = np.flatnonzero(features.runs.begins(requests, rows + 1))[1:]
                rows = int(starts[-1]) if len(starts) else rows  # a request of more rows is cut
            for name, part in self._parts(table.slice(at, rows)).items():
                self._writers[name].write_table(part, row_group_size=GROUP_ROWS)
            at += rows
        self._held = [table.slice(at)]
        self._rows = total - at
        self._bytes = int(ends[-1] - (ends[at - 1] if at else 0)) if total else 0

    def _parts(self, table: pa.Table) -> dict[str, pa.Table]:
        """Returns file -> what it gets of some rows."""
        group_tables = {}
        for group, names in self._groups.items():
            columns = [features.runs.bits(table[name]) for name in names]
            first = np.flatnonzero(features.runs.begins(columns, table.num_rows))
            rows = table.select(names)
            runs = rows.take(pa.array(first))
            lengths = np.diff(first, append=table.num_rows).astype(np.int32)
            group_tables[group_file(group)] = runs = runs.add_column(0, RUN, pa.array(lengths))
            self.runs[group] += len(first)
            self.saved[group] += int(_sizes(rows).sum()) - int(_sizes(runs).sum())
        apart = {name for names in self._groups.values() for name in names}
        rows_table = table.select([name for name in table.column_names if name not in apart])
        return {ROWS: rows_table, **group_tables}

    def close(self, *, is_complete: bool) -> None:
        """Closes the files. is_complete: no more rows come, and those held are written first."""
        try:
            if is_complete and self._writers:
                self._write(is_last=True)
        finally:
            for writer in self._writers.values():
                writer.close()


def _sizes(table: pa.Table) -> Int64s:
    """Returns how many bytes each row takes as numbers, [N]."""
    sizes_N = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if pa.types.is_large_list(column.type):
            sizes_N += (
                8 + column.type.value_type.bit_width // 8 * pc.list_value_length(column).to_numpy()
            )
        else:
            sizes_N += column.type.bit_width // 8
    return sizes_N


class File(NamedTuple):
    """An open file of a part."""

    path: Path
    parquet: pq.ParquetFile


@contextmanager
def open_files(folder: Path, schema: Schema) -> Iterator[dict[str | None, File]]:
    """Yields group -> the open file of a part. The file of the columns of no group has the key
    None, and comes first.

    Raises:
        UserError: for a damaged file.
    """
    with ExitStack() as stack:
        parquet_files = {}
        for group, name in zip((None, *schema.groups), files(schema), strict=True):
            with _report_damage(path := folder / name):
                parquet = stack.enter_context(pq.ParquetFile(path, page_checksum_verification=True))
            parquet_files[group] = File(path, parquet)
        yield parquet_files


def read_groups(
    files: Mapping[str | None, File], numbers: Sequence[int], columns: Sequence[str] | None = None
) -> dict[str | None, pa.Table]:
    """Returns group -> a table of some row groups.

    Args:
        files: what `open_files` gives.
        numbers: of the row groups, from 0.
        columns: the wanted columns; all by default.

    Raises:
        UserError: for a damaged file.
    """
    tables = {}
    for group, file in files.items():
        names = file.parquet.schema_arrow.names
        wanted = names
        if columns is not None:
            wanted = [name for name in names if name in columns or name == RUN]
        with _report_damage(file.path):
            tables[group] = file.parquet.read_row_groups(list(numbers), wanted, use_threads=False)
    return tables


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: damaged ({complaint(error)}); prepare the log again") from None


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

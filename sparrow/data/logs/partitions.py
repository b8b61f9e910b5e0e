"""Columns that the folders of a path name, as Hive and Spark write them:
`dt=2026-03-01/country=de/part-0.parquet`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools
from sparrow.core.errors import UserError
from sparrow.data.logs.files import File, Partition
from sparrow.data.logs.read import Log
from sparrow.data.shaping.repair import REPAIR, Repairs, Tally, shorten
from sparrow.data.shaping.steps import Types
from sparrow.features.cells import trimmed
from sparrow.features.ids import is_text
from sparrow.features.schema import Source

LOOKED_AT = 64  # partitions whose rows tell what the columns mean, at most


def partition_types(partitions: Sequence[Partition]) -> Types:
    """Returns the columns of the partitions of all files of a log, with their types.

    They are integers or dates where all values are, and else text: `01` is a code, and so is `1`
    beside it. Which file comes first does not matter.
    """
    values: dict[str, set[str]] = {}
    for partition in partitions:
        for key, value in partition.items():
            values.setdefault(key, set()).update([] if value is None else [value])
    types: Types = {}
    for key, texts in values.items():
        if texts and all(map(_is_integer, texts)):
            types[key] = pa.int64()
        else:
            types[key] = pa.date32() if texts and all(map(_is_date, texts)) else pa.string()
    return types


def spread(partitions: Sequence[Partition], sizes: Sequence[int]) -> list[int]:
    """Returns the files whose first rows tell what the columns mean, in order: the largest of each
    partition.

    Where there are many partitions, they are LOOKED_AT drawn ones, which are always the same.
    """
    largest: dict[tuple[str | None, ...], int] = {}
    for i, partition in enumerate(partitions):
        j = largest.setdefault(tuple(partition.values()), i)
        if sizes[i] > sizes[j]:
            largest[tuple(partition.values())] = i
    files = sorted(largest.values())
    if len(files) <= LOOKED_AT:
        return files
    return sorted(np.random.default_rng(0).choice(files, LOOKED_AT, replace=False).tolist())


def spread_sample(log: Log, chosen: Sequence[int], rows: int) -> pa.Table:
    """Returns the first rows of each of the chosen files of Parquet."""
    log.repairs.clear()
    pieces = []
    count = 0
    for i, (file, columns) in enumerate(zip(log.files, log.columns, strict=True)):
        log.repairs.starts.append(count)  # so that `located` knows whose row is meant
        if i in chosen:
            alone = replace(log, files=(file,), columns=(columns,), rows=0, repairs=Repairs())
            pieces.append(alone.sample(-(-rows // len(chosen))))
            count += pieces[-1].num_rows
    return pa.concat_tables(pieces).slice(0, rows)


def partition_columns(files: Sequence[File], columns: Sequence[tuple[str, ...]]) -> Types:
    """Returns the columns that the folders of a log's files name, with their types.

    Args:
        files: of the log.
        columns: that each file holds.

    Raises:
        UserError: for a file that lacks one of them.
    """
    types = partition_types([file.partition for file in files])
    for name in types:
        partitioned = next(file for file in files if name in file.partition)
        for file, own in zip(files, columns, strict=True):
            if name not in file.partition and name not in own:
                remedy = "put it into such a folder, or prepare them apart"
                raise UserError(f"{file}: in no folder {name}=..., as {partitioned} is; {remedy}")
    return types


def value_of(text: str | None, kind: pa.DataType) -> pa.Scalar:
    """Returns a partition's value in the type in which its column is read.

    Raises:
        ValueError: when it is not of that type.
    """
    return pa.scalar(text, pa.string()).cast(kind)


def with_partition(
    batch: pa.RecordBatch, file: File, types: Types, source: Source, repairs: Repairs, first: int
) -> pa.RecordBatch:
    """Returns rows of a file with the wanted columns, of which some are named by its folders.

    What the file itself holds counts. Rows in which its folder says something else are counted.

    Args:
        batch: the rows, as the file holds them.
        file: the file.
        types: the wanted columns, and the types in which the partition's are read.
        source: whether to repair what does not fit.
        repairs: counts what a person should know.
        first: the place of the first row in the file.

    Raises:
        UserError: for a folder whose value is not of its column's type.
    """
    for name, text in file.partition.items():
        if name in batch.schema.names and name in types:
            differ_N = _differing(batch.column(name), text)
            if differ_N.any():
                row = int(differ_N.argmax())
                event = f"have another {name!r} than their folder says, and the file's counts"
                tally = repairs.events.setdefault((str(file), event), Tally())
                cell = f"{batch.column(name)[row].as_py()} in {name}={text}"
                tally.add(int(differ_N.sum()), first + row, cell)
        elif name in types:
            try:
                value = value_of(text, types[name])
            except pa.ArrowInvalid:
                if source.bad_rows != "repair":
                    reason = (
                        f"column {name!r} has {shorten(str(text))}, by its folder, where"
                        f" {types[name]} is expected"
                    )
                    remedy = (
                        "name it in the column's `missing`, or give its table an encoding of kind"
                        " 'vocabulary'"
                    )
                    raise UserError(
                        f"{file}: {reason}; rename the folder, {REPAIR}, {remedy}"
                    ) from None
                line = 1 + source.header if source.format != "parquet" else 0
                cells = repairs.cells.setdefault((str(file), name), Tally())
                cells.add(batch.num_rows, first + line, str(text))
                value = pa.scalar(None, types[name])
            batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
    return batch.select(list(types))


def _differing(column: pa.Array, text: str | None) -> Bools:
    """Returns bool [N]: which cells of a file's own column are not what the file's folder says."""
    column = trimmed(column) if is_text(column.type) else column
    try:
        equal = pc.equal(column, value_of(text, column.type))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        equal = pa.nulls(len(column), pa.bool_())
    alike = column.is_null() if text is None else equal.fill_null(False)
    return ~alike.to_numpy(zero_copy_only=False)


def _is_integer(text: str) -> bool:
    return (
        re.fullmatch(r"0|-?[1-9]\d{0,18}", text, re.ASCII) is not None
        and -(2**63) <= int(text) < 2**63
    )


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        return False
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True

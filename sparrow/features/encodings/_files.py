"""Parquet files of the ids that a table knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.arrays import Array, Int64s
from sparrow.core.errors import UserError, complaint

GROUP = 1 << 24  # rows of a row group in a file


def write(path: Path, names: tuple[str, ...], pieces: Iterable[Array], known: int) -> None:
    """Writes pieces as Parquet in row groups of GROUP rows, with a note of how many row groups the
    known ids take.

    Args:
        path: of the file.
        names: of the columns.
        pieces: int64 [columns, N] each.
        known: how many of the first rows are known ids.
    """
    columns = pa.schema([(name, pa.int64()) for name in names], {"known": str(-(-known // GROUP))})
    # Of a range's counts nearly all are alike: a dictionary makes next to nothing of them.
    dictionary = len(names) == 1
    with pq.ParquetWriter(
        path, columns, compression="lz4", use_dictionary=dictionary, write_page_checksum=True
    ) as file:
        for piece in pieces:
            if piece.shape[1]:
                file.write_table(
                    pa.Table.from_arrays([pa.array(x, pa.int64()) for x in piece], schema=columns),
                    GROUP,
                )


def row_groups(path: Path) -> tuple[int, list[int]]:
    """Returns how many of a file's row groups are of known ids, and the numbers of all row groups.

    Raises:
        UserError: when the file is missing or damaged.
    """
    with _report_damage(path), pq.ParquetFile(path) as file:
        return int(file.schema_arrow.metadata[b"known"]), list(range(file.num_row_groups))


def read(path: Path, groups: list[int], columns: int) -> list[Int64s]:
    """Returns the columns of some row groups.

    Args:
        path: of the file.
        groups: the numbers of the row groups.
        columns: how many columns the file has.

    Raises:
        UserError: when the file is missing or damaged.
    """
    if not groups:
        return [np.empty(0, np.int64)] * columns
    with _report_damage(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        read_columns = file.read_row_groups(groups).columns
        if len(read_columns) != columns:
            raise ValueError(f"{len(read_columns)} columns, not {columns}")
        # by to_numpy Arrow would import pandas, which takes longer than to load a small model
        return [np.concatenate(list(map(np.from_dlpack, c.chunks))) for c in read_columns]


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: missing or damaged ({complaint(error)}); prepare the log again"
        ) from None

"""Parquet files of the ids that a table knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError

Int64s = npt.NDArray[np.int64]
GROUP = 1 << 24  # rows of a row group in a file


def write(path: Path, names: tuple[str, ...], pieces: Iterable[npt.NDArray[Any]], known: int) -> None:
    """Pieces [columns, N] as Parquet in row groups of GROUP rows, and how many of them the `known` first rows take."""
    columns = pa.schema([(name, pa.int64()) for name in names], {"known": str(-(-known // GROUP))})
    # Of a range's counts nearly all are alike: a dictionary makes next to nothing of them.
    dictionary = len(names) == 1
    with pq.ParquetWriter(
        path, columns, compression="lz4", use_dictionary=dictionary, write_page_checksum=True
    ) as file:
        for piece in pieces:
            if piece.shape[1]:
                file.write_table(pa.Table.from_arrays([pa.array(x, pa.int64()) for x in piece], schema=columns), GROUP)


def row_groups(path: Path) -> tuple[int, list[int]]:
    """How many of a file's row groups are of known ids, and all of them; UserError when it is missing or damaged."""
    with _told(path), pq.ParquetFile(path) as file:
        return int(file.schema_arrow.metadata[b"known"]), list(range(file.num_row_groups))


def read(path: Path, groups: list[int], columns: int) -> list[Int64s]:
    """The columns of some row groups."""
    if not groups:
        return [np.empty(0, np.int64)] * columns
    with _told(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        return [column.to_numpy() for column in file.read_row_groups(groups).columns]


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: missing or damaged ({words}); prepare the log again") from None

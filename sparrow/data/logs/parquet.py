"""Files of Parquet as streams of record batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError, complaint
from sparrow.data.logs.files import File
from sparrow.data.logs.tables import types_read

_BATCH_ROWS, _BATCH_BYTES = 1 << 16, 1 << 23  # at most


def open_file(file: File) -> pq.ParquetFile:
    """Returns a file, whose pages are checked.

    Raises:
        UserError: when it is not whole.
    """
    try:
        return pq.ParquetFile(
            file.system.open_input_file(file.path), page_checksum_verification=True
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{file}: not a whole Parquet file: {complaint(error)}; write it again"
        ) from None


def types_of(files: Sequence[File]) -> tuple[dict[str, pa.DataType], dict[str, str], int]:
    """Returns the columns' types, wide enough for all files, what is left out, and the number of
    rows of all files.
    """
    types: dict[str, pa.DataType] = {}
    left_out: dict[str, str] = {}
    rows = 0
    for file in files:
        with open_file(file) as parquet:
            rows += parquet.metadata.num_rows
            file_types, left_out_here = types_read(parquet.schema_arrow, str(file))
        for name, kind in file_types.items():
            fields = [pa.field(name, types.get(name, kind)), pa.field(name, kind)]
            try:
                schemas = [pa.schema([field]) for field in fields]
                unified = pa.unify_schemas(schemas, promote_options="permissive")
            except pa.ArrowException:
                words = f"{kind} where earlier files have {types[name]}; write all files alike"
                raise UserError(f"{file}: column {name!r} is {words}") from None
            types[name] = unified.field(0).type
        left_out = {**left_out_here, **left_out}  # what one file leaves out is left out of all
    with open_file(files[0]) as parquet:
        names = parquet.schema_arrow.names
    ordered = {name: types[name] for name in names if name in types and name not in left_out}
    return ordered, left_out, rows


def _batch_rows(group: pq.RowGroupMetaData, columns: int) -> int:
    """Returns how many of a row group's rows are read at a time: about _BATCH_BYTES, if it is even.

    The group is asked for its size, not those of its columns: there, a damaged footer makes Arrow
    end the process.
    """
    size = max(group.total_byte_size, 8 * columns * group.num_rows, 1)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.num_rows // size))


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Returns the batch in pieces of about _BATCH_BYTES. Text that repeats is small in the file,
    not in memory.
    """
    pieces = min(-(-batch.nbytes // _BATCH_BYTES), batch.num_rows) or 1
    edges = [batch.num_rows * i // pieces for i in range(pieces + 1)]
    return (batch.slice(low, high - low) for low, high in itertools.pairwise(edges))


def batches(file: File, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields some columns of a file in order, about _BATCH_BYTES at a time.

    Raises:
        UserError: when it is damaged.
    """
    with open_file(file) as parquet:
        rows = parquet.metadata.num_rows
        try:
            # one by one: Arrow fetches all that it is asked for at once
            for group in range(parquet.num_row_groups):
                size = _batch_rows(parquet.metadata.row_group(group), len(names))
                for batch in parquet.iter_batches(size, row_groups=[group], columns=names):
                    batch.validate(full=True)  # text that is not UTF-8, offsets beyond the data
                    rows -= batch.num_rows
                    yield from _cut(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            # one is missing, and Arrow does not read what it has written
            if "lists to be of size" in str(error):
                reason = "a fixed-size list is missing in a row, which Arrow cannot read"
                raise UserError(f"{file}: {reason}; write the column as plain lists") from None
            raise UserError(
                f"{file}: damaged Parquet: {complaint(error)}; write it again"
            ) from None
        if rows:
            words = f"{abs(rows):,} rows too {'few' if rows > 0 else 'many'}"
            raise UserError(f"{file}: damaged Parquet: {words}; write it again")

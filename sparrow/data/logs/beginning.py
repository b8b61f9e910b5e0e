"""The first rows of a log of text, which tell what its columns are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.data import logs
from sparrow.data.logs.files import File
from sparrow.data.logs.text import BLOCK_BYTES, CRITEO, codes_of, text_batches
from sparrow.data.shaping.repair import Repairs
from sparrow.data.shaping.steps import Types
from sparrow.features.schema import Source

_BYTES = 1 << 24
_ROWS = 100_000  # of a log of partitions


def beginnings(
    files: Sequence[File], source: Source, columns: Sequence[tuple[str, ...]], partitions: Types
) -> tuple[pa.Table, list[int]]:
    """Returns the first rows of the first text file that has any, and for each file up to it, how
    many come before.

    Of a log of partitions they are some rows of each, see `spread`, with the columns that the
    folders name.

    Raises:
        UserError: when there are no rows.
    """
    chosen: Sequence[int] = ()
    if partitions:
        chosen = logs.partitions.spread(
            [file.partition for file in files], [file.size for file in files]
        )
    bytes_each = _BYTES
    rows_each = 2**62
    if len(chosen) > 1:
        bytes_each = max(_BYTES // len(chosen), 1 << 20)
        rows_each = -(-_ROWS // len(chosen))
    pieces: list[pa.Table] = []
    starts: list[int] = []
    for i, (file, names) in enumerate(zip(files, columns, strict=True)):
        starts.append(sum(piece.num_rows for piece in pieces))
        is_looked_at = i in chosen if partitions else not pieces
        piece = _beginning(file, source, names, bytes_each) if is_looked_at else None
        if piece is None:
            continue
        piece = piece.slice(0, rows_each)
        for name in partitions:
            if name not in names:
                value = logs.partitions.value_of(file.partition[name], partitions[name])
                piece = piece.append_column(name, pa.repeat(value, piece.num_rows))
        if not pieces or set(pieces[0].column_names) <= set(piece.column_names):
            pieces.append(piece)  # else reading names the column that the file lacks
    if not pieces:
        raise UserError(f"{files[0]}: no rows; give a log with at least one")
    joined_columns: dict[str, pa.ChunkedArray] = {}
    for name in pieces[0].column_names:
        joined_columns[name] = _joined([piece[name] for piece in pieces])
    return pa.table(joined_columns), starts


def _joined(pieces: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Returns the beginnings of a column in one type: text where they are not all numbers or all
    alike.
    """
    kinds = {piece.type for piece in pieces if not pa.types.is_null(piece.type)}
    if len(kinds) == 1:
        (kind,) = kinds
    elif kinds and all(pa.types.is_integer(k) or pa.types.is_floating(k) for k in kinds):
        kind = pa.float64()
    else:
        kind = pa.string()
    try:
        pieces = [piece.cast(kind) for piece in pieces]
    except pa.ArrowInvalid:  # integers that a float cannot hold
        kind = pa.string()
        pieces = [piece.cast(kind) for piece in pieces]
    return pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks], kind)


def _beginning(
    file: File, source: Source, names: tuple[str, ...], most_bytes: int
) -> pa.Table | None:
    """Returns a text file's first rows in the types that they suggest, or None when it has no rows.

    Arrow takes integers beyond 2^63 for floats, which would merge ids. One cell such as 1.42e+19
    makes floats of a whole column. So a column with cells of more digits than a float keeps is read
    once more, as text. So is one with cells such as 007, of which Arrow makes 7. Words for missing
    are missing here whatever the source says, since this is what columns are guessed from.
    """
    source = replace(source, cells=None)
    try:
        criteo = {name: pa.string() if name[0] == "C" else pa.int64() for name in CRITEO}
        known = criteo if source.format == "criteo" else None
        few = (most_bytes, Repairs(), most_bytes + BLOCK_BYTES)
        first = next(text_batches(file, source, names, known, *few), None)
        if first is None:
            return None
        table = pa.table(first)
        huge = [
            f.name for f in first.schema if pa.types.is_floating(f.type) and _is_huge(first[f.name])
        ]
        coded = [
            name
            for name in codes_of(file, source, names)
            if pa.types.is_integer(first[name].type) and not known
        ]
        if huge or coded:
            texts = next(
                text_batches(file, source, names, dict.fromkeys([*huge, *coded], pa.string()), *few)
            )
            for name in (*huge, *coded):
                if (
                    name in coded
                    or pc.any(
                        pc.match_substring_regex(texts[name], r"^\s*[-+]?\d{16,}\s*$")
                    ).as_py()
                ):
                    table = table.set_column(table.column_names.index(name), name, texts[name])
    except UserError:
        file.check()
        raise
    return table


def _is_huge(column: pa.Array) -> bool:
    """Returns whether there are numbers beyond 2^53, where floats begin to merge integers."""
    x_N = column.drop_null().to_numpy(zero_copy_only=False)
    return bool(np.isfinite(x_N).any() and np.abs(x_N[np.isfinite(x_N)]).max() >= 2.0**53)

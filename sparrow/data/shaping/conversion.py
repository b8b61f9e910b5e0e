"""Text as other types, where what does not convert is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools
from sparrow.data.shaping.repair import GARBLED, Repairs, Tally
from sparrow.features.cells import as_id_texts, as_number_texts
from sparrow.features.ids import is_text
from sparrow.features.numeric import misfits
from sparrow.features.schema import Source

_LARGEST = float(np.finfo(np.float32).max)


def repaired(
    batch: pa.RecordBatch, types: dict[str, pa.DataType], *, with_words: bool = False
) -> tuple[pa.RecordBatch, dict[str, list[int]]]:
    """Returns the batch with its text columns as `types`, and column -> the rows whose values did
    not fit.

    Those values are missing now. White space around text is cut before it is read as a number.
    Numbers that float32 cannot hold do not fit either. with_words: text may be a word, see
    `sparrow.features.cells`, and that fits.
    """
    columns = []
    bad = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = types.get(name, column.type)
        if is_text(column.type):
            column, wrong_N = converted(column, kind, with_words=with_words)
            if wrong_N.any():
                bad[name] = np.flatnonzero(wrong_N).tolist()
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names), bad


def converted(
    column: pa.Array, kind: pa.DataType, *, with_words: bool = False
) -> tuple[pa.Array, Bools]:
    """Returns a text or binary array [N] as `kind`, and bool [N]: where a value did not convert and
    is missing now.
    """
    encoded = column.dictionary_encode()  # each distinct value is looked at once
    values, bad_U = _cast(encoded.dictionary, pa.string())
    garbled_U = pc.match_substring(values, GARBLED).fill_null(False)
    values = pc.if_else(garbled_U, None, values)
    bad_U = bad_U | garbled_U.to_numpy(zero_copy_only=False)
    if not is_text(kind):
        values = pc.utf8_trim_whitespace(values)
        if with_words:
            values = as_id_texts(values) if pa.types.is_integer(kind) else as_number_texts(values)
        values, worse_U = _cast(values, kind)
        bad_U = bad_U | worse_U
    if pa.types.is_floating(kind):
        huge_U = (
            pc.greater(pc.abs(values), _LARGEST).fill_null(False).to_numpy(zero_copy_only=False)
        )
        values = pc.if_else(pa.array(huge_U), None, values)
        bad_U = bad_U | huge_U
    where = np.append(bad_U, False)  # the last one is for missing values
    indices = encoded.indices.fill_null(len(bad_U)).to_numpy(zero_copy_only=False)
    return values.take(encoded.indices), where[indices]


def _cast(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Bools]:
    bad_U = np.zeros(len(values), bool)
    bad_U[misfits(values, kind)] = True
    return (
        pc.if_else(pa.array(bad_U), None, values).cast(kind) if bad_U.any() else values.cast(kind)
    ), bad_U


def repair_cells(
    file: str,
    batch: pa.RecordBatch,
    types: Mapping[str, pa.DataType],
    before: int,
    skipped: Sequence[int],
    repairs: Repairs,
    source: Source,
) -> pa.RecordBatch:
    """Returns a batch with its text converted to `types`. Cells that do not convert are counted.

    Args:
        file: its name.
        batch: the rows.
        types: of its columns.
        before: the number of the file's row just before the batch, were none skipped.
        skipped: the rows of the file that were left out.
        repairs: counts the cells.
        source: how the file is written.
    """
    fixed, bad = repaired(batch, dict(types), with_words=source.has_words)
    for name, places in bad.items():
        row = before + places[0] + 1  # as in the file, were none skipped before it
        for number in skipped:
            row += number <= row
        text = str(batch.column(name)[places[0]].as_py())
        repairs.cells.setdefault((file, name), Tally()).add(len(places), row, text)
    return fixed

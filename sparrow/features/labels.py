"""Columns by which rows are judged: labels, weights and baselines, as numbers. Those that count
impressions are in `impressions.py`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools, Float64s
from sparrow.core.errors import UserError
from sparrow.features.cells import as_id_texts, spelt_as_id
from sparrow.features.ids import is_text
from sparrow.features.numeric import as_numbers
from sparrow.features.schema import Column
from sparrow.features.types import is_number


def labels(
    raw: pa.Array, name: str, column: Column, *, training: bool, row0: int, with_words: bool = False
) -> Float64s:
    """Returns a raw column as labels 0 and 1, or in 0..1 for a probability, float64 [N]; NaN where
    one is missing.

    Args:
        raw: the column [N].
        name: the label, for errors.
        column: says which values count as 1.
        training: whether every label must be known.
        row0: the log's row of the first entry, for errors.
        with_words: whether text may be a word, see `as_numbers`.

    Raises:
        UserError: for a value that is no label, and when training for a missing one.
    """
    if column.positive is not None and not is_number(raw.type):
        spell = spelt_as_id if with_words else str
        texts = pc.ascii_trim_whitespace(raw.cast(pa.string()))
        texts = as_id_texts(texts) if with_words else texts
        raw = pc.equal(texts, spell(column.positive.strip()))
        if column.negative is not None:
            is_either = pc.or_(raw, pc.equal(texts, spell(column.negative.strip())))
            _check_either(pc.fill_null(is_either, True), texts, name, column, row0)
    remedy = f"set columns.{name}.positive to the value that counts as 1"
    is_read = is_number(raw.type) or pa.types.is_boolean(raw.type) or pa.types.is_null(raw.type)
    if not is_read and not (with_words and is_text(raw.type)):
        raise UserError(f"label {name!r}: {raw.type} where 0 and 1 are needed; {remedy}")
    try:
        y_N = as_numbers(raw, name, row0, with_words=with_words)
    except UserError as error:
        raise (
            UserError(f"{str(error).partition('; ')[0]}; {remedy}") if is_text(raw.type) else error
        ) from None
    if column.threshold is not None:
        y_N = np.where(np.isnan(y_N), np.nan, y_N >= column.threshold)
    elif column.positive is not None and is_number(raw.type):
        is_positive_N = y_N == _number(column.positive, name)
        if column.negative is not None:
            is_either_N = is_positive_N | (y_N == _number(column.negative, name)) | np.isnan(y_N)
            _check_either(pa.array(is_either_N), raw, name, column, row0)
        y_N = np.where(np.isnan(y_N), np.nan, is_positive_N)
    check_known(y_N, name, training, row0)
    is_label_N = (y_N >= 0) & (y_N <= 1) if column.probability else (y_N == 0) | (y_N == 1)
    remedy = "probabilities lie in 0..1; mend it, or set threshold instead of probability"
    if not column.probability:
        remedy = (
            f"labels are 0 and 1; for others set columns.{name}.positive to the value that counts"
            " as 1, .threshold to the least, or .probability = true for numbers in 0..1; for"
            " counts, such as clicks, give the column that they are out of kind = 'impressions'"
        )
    refuse_first(~(is_label_N | np.isnan(y_N)), y_N, f"label {name!r}", row0, remedy)
    return y_N


def _check_either(is_either: pa.Array, raw: pa.Array, name: str, column: Column, row0: int) -> None:
    """Refuses the first value that is neither the positive nor the negative one."""
    at = pc.index(is_either, False).as_py()
    if at >= 0:
        pair = f"neither {column.positive!r} nor {column.negative!r}"
        raise UserError(
            f"label {name!r}, row {row0 + at}: {raw[at].as_py()!r} is {pair}; mend it, or leave"
            f" columns.{name}.negative out of the schema, and all others count as 0"
        )


def check_known(y_N: Float64s, name: str, training: bool, row0: int) -> None:
    """Refuses a missing label when training."""
    missing = np.flatnonzero(np.isnan(y_N))
    if training and len(missing):
        raise UserError(
            f"label {name!r}, row {row0 + missing[0]}: missing; leave rows without a label out of"
            " the log"
        )


def weights(w_N: Float64s, name: str, row0: int) -> Float64s:
    """Returns weights: they are 0 or more. UserError for another, with its row."""
    refuse_first(
        ~(w_N >= 0), w_N, f"weight {name!r}", row0, "weights are 0 or more and never missing"
    )
    return w_N


def probabilities(p_N: Float64s, name: str, row0: int) -> Float64s:
    """Returns probabilities: they lie in 0..1. UserError for another, with its row."""
    refuse_first(
        ~((p_N >= 0) & (p_N <= 1)), p_N, f"baseline {name!r}", row0, "probabilities lie in 0..1"
    )
    return p_N


def refuse_first(bad_N: Bools, x_N: Float64s, place: str, row0: int, remedy: str) -> None:
    """Refuses the first of the bad numbers, if there is one."""
    bad = np.flatnonzero(bad_N)
    if len(bad):
        raise UserError(f"{place}, row {row0 + bad[0]}: {x_N[bad[0]]:g}; {remedy}")


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"columns.{name}.positive: {text!r} is not a number, as the label is; mend it"
        ) from None

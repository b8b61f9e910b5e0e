"""Raw columns -> what the model is fed: the same two steps when a log is prepared and when a
request is served.

`typed` makes of raw columns what their kinds say, and needs nothing fitted. `Transforms` holds what
was fitted and makes the model's numbers and ids of typed columns.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow import features
from sparrow.core.arrays import Array, Float64s, Ints
from sparrow.core.errors import UserError, suggest
from sparrow.features.cells import Tally, without_words
from sparrow.features.encodings import FIRST, MISSING, Known, kind_of
from sparrow.features.hashing import hash_ids
from sparrow.features.ids import as_ids, is_text
from sparrow.features.labels import labels, probabilities, weights
from sparrow.features.numeric import as_numbers, misfits, without
from sparrow.features.numeric import transform as transform_numbers
from sparrow.features.schema import ROLES, Schema, missing_of
from sparrow.features.skew import Skew
from sparrow.features.types import as_read, left_out, read_as
from sparrow.features.words import Words

REFIT = "use the schema.toml and vocabulary/ that prepare wrote"


@dataclass(frozen=True, kw_only=True, eq=False)
class Transforms:
    """What turns raw rows into a model's rows: a fitted schema, and the ids that each table knows
    that numbers them.

    counts: column -> what its ids are after training, for columns with counts.
    """

    schema: Schema
    vocabularies: Mapping[str, Known] = field(default_factory=dict)
    counts: Mapping[str, features.counts.Counted] = field(default_factory=dict)

    def transform(
        self,
        batch: pa.RecordBatch | pa.Table,
        *,
        training: bool,
        row0: int = 0,
        skew: Skew | None = None,
    ) -> pa.Table:
        """Returns raw rows [N] as a table [N] of feature columns, in the schema's order.

        Label, weight, impressions, baseline and numeric columns become float32, and vectors the
        bytes of their float32. Time, group, session and hashed columns become int64, and other
        categorical ones int32. Lists become large lists of the same types. A label that counts
        becomes its share of the impressions. The weights of a list are in a column beside it, named
        by `weights_of`.

        Args:
            batch: the raw rows.
            training: whether every column must be there and, where there is one label, every cell
                of it. Else only features must be there. A missing label is NaN.
            row0: the log's row of the batch's first one, for errors.
            skew: counts what differs from training.

        Raises:
            UserError: for an absent column, and for a value that does not fit its kind. It names
                column and row.
        """
        return self.encoded(
            typed(self.schema, batch, training=training, row0=row0, skew=skew), row0=row0, skew=skew
        )

    def encoded(
        self,
        batch: pa.RecordBatch,
        pool: Executor | None = None,
        row0: int = 0,
        skew: Skew | None = None,
    ) -> pa.Table:
        """Returns what `transform` does, for rows that are typed.

        Ids to be counted become what they are after training. Numbers in their place stay.

        Args:
            batch: rows [N] that `typed` made.
            pool: its threads take a column each.
            row0: the log's row of the batch's first one.
            skew: counts what differs from training.

        Raises:
            UserError: when the schema is not fitted.
        """
        work = {}
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            values = work[name] = self.number_of(name, values)
            mark = self.schema.columns.get(missing_of(name))
            # else the log has a column of that name
            if mark is not None and mark.transform == "missing":
                work[missing_of(name)] = values
        columns = list((pool.map if pool else map)(lambda item: self._encoded(*item), work.items()))
        if skew is not None:
            for (name, values), encoded in zip(work.items(), columns, strict=True):
                skew.add(self.schema, name, values, encoded, row0)
        return pa.table(dict(zip(work, columns, strict=True)))

    def rows_of(self, table: str, raw: pa.Array) -> Ints:
        """Returns the ids [N] by which a table knows raw ones, see `Encoding`.

        Args:
            table: its name.
            raw: ids [N] as a log has them.

        Raises:
            UserError: for values that are no ids, and when the schema is not fitted.
        """
        hashed = not kind_of(self.schema.encodings[table]).takes_integers and _is_hashed(raw.type)
        present = () if self.schema.source.has_words else None
        return self._rows(
            table, _coded(as_ids(raw, table, int, present), table, hashed=hashed, strict=False)
        )

    def number_of(self, name: str, values: pa.Array) -> pa.Array:
        """Returns a typed column, with numbers in the place of ids that are to be counted.

        Raises:
            UserError: when there are no counts of them.
        """
        column = self.schema.columns.get(name)
        if column is None or not column.counts or not pa.types.is_dictionary(values.type):
            return values
        if name not in self.counts:
            raise UserError(f"columns.{name}.counts: not fitted; {REFIT}")
        return pa.array(features.counts.frozen(column, self.counts[name], values))

    def save(self, folder: str | Path) -> None:
        """Writes schema.toml and vocabulary/ in place of those in `folder`.

        There is a file in vocabulary/ for each table that numbers its ids, and for each column with
        counts.
        """
        folder = Path(folder)
        shutil.rmtree(folder / "vocabulary", ignore_errors=True)
        for name, vocabulary in self.vocabularies.items():
            path = folder / vocabulary_file(self.schema, name)
            path.parent.mkdir(exist_ok=True)
            vocabulary.save(path)
        for name, counted in self.counts.items():
            path = folder / counts_file(self.schema, name)
            path.parent.mkdir(exist_ok=True)
            counted.save(path)
        self.schema.save(folder / "schema.toml")

    @classmethod
    def load(cls, folder: str | Path) -> Transforms:
        """Returns what `save` wrote.

        Args:
            folder: of a prepared log or of a run.

        Raises:
            UserError: when something in it is missing or damaged, or when its files do not belong
                together.
        """
        folder = Path(folder)
        schema = Schema.load(folder / "schema.toml")
        vocabularies: dict[str, Known] = {}
        for name, encoding in schema.encodings.items():
            if is_numbered(schema, name):
                path = folder / vocabulary_file(schema, name)
                known = kind_of(encoding).load(path, encoding)
                if known is None:
                    raise UserError(
                        f"{path}: not the vocabulary that schema.toml was fitted with; prepare"
                        " again"
                    )
                vocabularies[name] = known
        counts: dict[str, features.counts.Counted] = {}
        for name in schema.counted:
            path = folder / counts_file(schema, name)
            counts[name] = features.counts.Counted.load(path)
            if counts[name].digest != schema.columns[name].digest:
                raise UserError(
                    f"{path}: not the counts that schema.toml was fitted with; prepare again"
                )
        return cls(schema=schema, vocabularies=vocabularies, counts=counts)

    def _encoded(self, name: str, values: pa.Array) -> pa.Array:
        column = self.schema.columns.get(name)
        if column is None:  # the weights of a list
            return values
        # of a vector
        if column.transform == "missing" and pa.types.is_fixed_size_binary(values.type):
            return values.is_null().cast(pa.float32())
        if column.kind == "vector":
            if column.transform != "none" and (column.means is None or column.stds is None):
                raise UserError(f"columns.{name}.means: not fitted; {REFIT}")
            x_NS = features.vectors.transform_vectors(
                values, column.transform, column.means, column.stds
            )
            return features.vectors.packed(x_NS)
        if column.kind == "numeric":
            kind = column.transform
            if kind not in ("none", "missing") and (column.mean is None or column.std is None):
                raise UserError(f"columns.{name}.mean: not fitted; {REFIT}")
            limits = column.low, column.high
            return pa.array(
                transform_numbers(_numpy(values), kind, column.mean, column.std, *limits)
            )
        if column.quantiles:
            if column.boundaries is None:
                raise UserError(f"columns.{name}.boundaries: not fitted; {REFIT}")
            bucket_N = features.quantile.bucketize(_numpy(values), column.boundaries)
            return pa.array(np.where(bucket_N, bucket_N - 1 + FIRST, MISSING).astype(np.int32))
        if column.kind == "categorical":
            return pa.array(self._rows(str(column.table), values))
        # in a log that was prepared before weights had a mean they stay as they are
        if column.kind == "weight":
            return pa.array((_numpy(values) / (column.mean or 1.0)).astype(np.float32))
        if column.kind == "list":
            rows = pa.array(self._rows(str(column.table), values.values))
            return pa.LargeListArray.from_arrays(values.offsets, rows)
        return values

    def _rows(self, name: str, coded: pa.DictionaryArray) -> Ints:
        """Returns the table's ids [N] of coded ones: int32 where the encoding numbers table rows,
        else int64.
        """
        encoding = self.schema.encodings[name]
        distinct = coded.dictionary
        kind = kind_of(encoding)
        known = self.vocabularies.get(name)
        if encoding.kind is None or (encoding.is_numbered and known is None):
            raise UserError(f"encodings.{name}: not fitted; {REFIT}")
        rows_U = kind.rows_of(known, distinct)
        narrow = encoding.is_numbered and (encoding.rows or 0) < 2**31
        # the last one is for missing ids
        rows_U = np.append(rows_U, MISSING).astype(np.int32 if narrow else np.int64)
        return rows_U[_numpy(coded.indices.fill_null(len(distinct)))]


def typed(
    schema: Schema,
    batch: pa.RecordBatch | pa.Table,
    *,
    training: bool,
    row0: int = 0,
    integers: Collection[str] = (),
    pool: Executor | None = None,
    words: Words | None = None,
    skew: Skew | None = None,
) -> pa.RecordBatch:
    """Returns raw rows [N] as their kinds say, each column in one piece.

    Numeric columns become float64, where NaN is a missing number. Vectors become bytes, see
    `as_vectors`. Ids are coded: they become a dictionary array, whose distinct values are integers
    (int64) or hashes (uint64). So are the ids of columns with counts, as hashes.

    Args:
        schema: says what each column is. It need not be fitted.
        batch: the raw rows.
        training: see `Transforms.transform`.
        row0: the log's row of the batch's first one, for errors.
        integers: columns of text to be taken for integers.
        pool: its threads take a column each.
        words: takes in the texts of ids.
        skew: counts the times that are far from training's.

    Raises:
        UserError: like `Transforms.transform`.
        NotIntegersError: when one of `integers` holds something else.
    """
    names = []
    for name, column in schema.columns.items():
        optional = not training and column.kind in ROLES
        is_there = (
            all(source in batch.schema.names for source in schema.sources(name))
            if optional
            else True
        )
        # the latter of the column that it tells of
        is_made = column.kind == "ignore" or column.transform == "missing"
        # scores read its parts alone, and these may be missing
        is_made |= column.kind == "time" and not training
        if not is_made and is_there:
            names.append(name)

    def convert(name: str) -> dict[str, pa.Array]:
        return _typed(schema, batch, name, training, row0, name in integers, words, skew)

    columns: dict[str, pa.Array] = {}
    for converted in (pool.map if pool else map)(convert, names):
        columns |= converted
    return pa.RecordBatch.from_pydict(columns)


class NotIntegersError(Exception):
    """A column of text holds something else than integers as a computer writes them."""


def is_numbered(schema: Schema, table: str) -> bool:
    """Returns whether a table has a table row for each id that it knows, and a file that says
    which.

    Tables of hashes and of buckets do not.
    """
    bucketed = any(column.quantiles for column in schema.columns.values() if column.table == table)
    return schema.encodings[table].is_numbered and not bucketed


def vocabulary_file(schema: Schema, table: str) -> str:
    """Returns the path, in the schema's folder, of the file of the ids that a table knows.

    It begins with a number, because a table's name can be anything.
    """
    place = list(schema.encodings).index(table)
    return f"vocabulary/{place:03d}-{quote(table, safe='')[:80]}.parquet"


def counts_file(schema: Schema, name: str) -> str:
    """Returns the path, in the schema's folder, of the file of a column with counts."""
    return f"vocabulary/counts-{schema.counted.index(name):03d}-{quote(name, safe='')[:80]}.parquet"


def fitted_files(schema: Schema) -> list[str]:
    """Returns the paths, in the schema's folder, of all files of ids and counts."""
    numbered = [
        vocabulary_file(schema, name) for name in schema.encodings if is_numbered(schema, name)
    ]
    return [*numbered, *(counts_file(schema, name) for name in schema.counted)]


def raw_column(batch: pa.RecordBatch | pa.Table, name: str, source: str) -> pa.Array:
    """Returns a feature's raw column in one piece, in the type that it is read as.

    Args:
        batch: the raw rows.
        name: the feature, for errors.
        source: the column of the log.

    Raises:
        UserError: when the column is absent, or of a type that is not read.
    """
    if source not in batch.schema.names:
        has = suggest(source, batch.schema.names)
        raise UserError(f"columns.{name}: no column {source!r} in the log{has}")
    values = batch.column(source)
    if read_as(values.type) is None:
        raise UserError(f"columns.{name}: {left_out(source, values.type)}")
    return as_read(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)


def _typed(
    schema: Schema,
    batch: pa.RecordBatch | pa.Table,
    name: str,
    training: bool,
    row0: int,
    integers: bool,
    words: Words | None,
    skew: Skew | None,
) -> dict[str, pa.Array]:
    column = schema.columns[name]
    if column.cross:
        crossed = [_ids(schema, batch, part, row0) for part in column.cross]
        return {name: features.crosses.typed_cross(crossed, name, words)}
    if column.kind in ("label", "weight", "impressions", "baseline"):
        x_N = _judged(schema, batch, name, training, row0)
        return {name: pa.array(x_N if column.kind == "weight" else x_N.astype(np.float32))}
    raw = _raw(schema, batch, name)
    present = schema.present(name)
    tally = None if words is None else partial(words.count_missing, name)
    if column.kind == "time":
        return {name: features.times.typed_times(schema, raw, name, row0, skew)}
    if column.part is not None:
        counts = None if training else skew  # in training the column of the time itself is there
        parts = features.times.typed_parts(schema, raw, name, row0, counts)
        return {name: _coded(parts, name, hashed=False, strict=False)}
    if column.kind in ("group", "session"):
        ids_N = hash_ids(_ids(schema, batch, name, row0, tally))
        # a row without one is alone
        ids_N = np.where(ids_N == 0, -1 - row0 - np.arange(len(ids_N)), ids_N)
        return {name: pa.array(ids_N)}
    if column.counts:
        return {
            name: _coded(
                as_ids(raw, name, lambda i: row0 + i, present, tally),
                name,
                hashed=True,
                strict=False,
            )
        }
    if column.kind == "numeric" or column.quantiles:
        return {name: pa.array(as_numbers(raw, name, row0, with_words=schema.source.has_words))}
    if column.kind == "vector":
        if column.size is None:
            raise UserError(f"columns.{name}.size: not known; {REFIT}")
        return {name: features.vectors.as_vectors(raw, name, row0, column.size, column.separator)}
    table = schema.encodings[str(column.table)]
    hashed = not integers and not kind_of(table).takes_integers and _is_hashed(raw.type)
    if column.kind == "categorical":
        ids = _ids(schema, batch, name, row0, tally)
        return {name: _coded(ids, name, hashed=hashed, strict=integers, words=words, row0=row0)}
    sources = [raw]
    if column.weights not in (None, ":"):
        sources.append(raw_column(batch, name, str(column.weights)))
    coded = partial(_coded, name=name, hashed=hashed, strict=False)
    return features.lists.typed_lists(column, name, sources, row0, present, tally, coded)


def _judged(
    schema: Schema, batch: pa.RecordBatch | pa.Table, name: str, training: bool, row0: int
) -> Float64s:
    """Returns a column by which rows are judged, float64 [N]: a label, weights, impressions or a
    baseline.
    """
    column = schema.columns[name]
    with_words = schema.source.has_words
    raw = _raw(schema, batch, name)
    needed = training and len(schema.labels) == 1
    shown = schema.role("impressions")
    if column.kind == "label" and (shown is None or column.probability):
        return labels(raw, name, column, training=needed, row0=row0, with_words=with_words)
    x_N = as_numbers(raw, name, row0, with_words=with_words)
    if column.kind == "label":
        assert shown is not None
        shown_N = _judged(schema, batch, shown, training, row0)
        return features.impressions.shares(x_N, name, shown_N, training=needed, row0=row0)
    if column.kind == "impressions":
        return features.impressions.checked_impressions(x_N, name, row0)
    return (weights if column.kind == "weight" else probabilities)(x_N, name, row0)


def _raw(schema: Schema, batch: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    """Returns the raw column of a column, without values that stand for none."""
    column = schema.columns[name]
    raw = raw_column(batch, name, column.source or name)
    # of other kinds what reads them does it
    is_told_by_words = column.kind in ("time", "vector") or column.part
    if schema.source.has_words and is_told_by_words and is_text(raw.type):
        raw = without_words(raw)
        raw = raw if column.kind == "vector" else features.times.spelt_integers(raw, column.format)
    return (
        without(raw, column.missing, with_words=schema.source.has_words) if column.missing else raw
    )


def _ids(
    schema: Schema,
    batch: pa.RecordBatch | pa.Table,
    name: str,
    row0: int,
    tally: Tally | None = None,
) -> pa.Array:
    """Returns the ids of a column that has one in a row."""
    raw = _raw(schema, batch, name)
    column = schema.columns[name]
    if column.part:
        return features.times.typed_parts(schema, raw, name, row0)
    return as_ids(raw, name, lambda i: row0 + i, schema.present(name), tally)


def _is_hashed(kind: pa.DataType) -> bool:
    """Returns whether ids of a raw type can be other than int64 in some batch, so that only their
    hashes are alike.
    """
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return _is_hashed(kind.value_type)
    wide = kind == pa.uint64() or pa.types.is_decimal(kind)
    return wide or is_text(kind) or pa.types.is_boolean(kind) or pa.types.is_dictionary(kind)


def _coded(
    ids: pa.Array,
    name: str,
    *,
    hashed: bool,
    strict: bool,
    words: Words | None = None,
    row0: int | None = None,
) -> pa.DictionaryArray:
    """Returns ids as an array of the distinct ones, int64 or, hashed, uint64, and int32 places in
    it.

    row0: the log's row of the first id, for errors; None where ids are not one in a row.

    Raises:
        NotIntegersError: when `strict`, for text that is not what an integer's own text would be.
    """
    coded = ids.dictionary_encode()
    distinct = coded.dictionary
    if hashed:
        distinct = pa.array(hash_ids(distinct).view(np.uint64))
    elif is_text(distinct.type):
        try:
            numbers = _integers(distinct)
        except pa.ArrowInvalid:
            if strict:
                raise NotIntegersError(name) from None
            raise _no_integer(coded, name, row0) from None
        if strict and not numbers.cast(distinct.type).equals(distinct):
            raise NotIntegersError(name)
        distinct = numbers
    if words is not None:
        words.count(name, coded, distinct)
    return pa.DictionaryArray.from_arrays(coded.indices, distinct)


def _integers(texts: pa.Array) -> pa.Array:
    # those beyond int64 become its ends: beyond any range too
    long = pc.match_substring_regex(texts, r"^-?\d{19,}$")
    if pc.any(long).as_py():
        ends = [
            str(min(max(int(text), -(2**63)), 2**63 - 1)) for text in texts.filter(long).to_pylist()
        ]
        texts = pc.replace_with_mask(texts, long, pa.array(ends, texts.type))
    return texts.cast(pa.int64())


def _no_integer(coded: pa.DictionaryArray, name: str, row0: int | None) -> UserError:
    bad = misfits(coded.dictionary, pa.int64())[0]
    row = "" if row0 is None else f", row {row0 + pc.index(coded.indices, bad).as_py()}"
    value = coded.dictionary[bad].as_py()
    remedy = "mend it, or prepare the log with kind = 'vocabulary' or 'hash' for its encoding"
    if re.fullmatch(r"\[.*|-?\d+(\s*[^\w\s.-]\s*-?\d+)+", str(value)):
        remedy = f"if it is several ids, set the separator of columns.{name} in schema.toml"
    return UserError(
        f"column {name!r}{row}: {value!r} is no integer; its table numbers integers: {remedy}"
    )


def _numpy(values: pa.Array) -> Array:
    return values.to_numpy(zero_copy_only=False)

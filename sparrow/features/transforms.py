"""Raw columns -> what the model is fed: the same two steps when a log is prepared and when a request is served.

`typed` makes of raw columns what their kinds say, and needs nothing fitted. `Transforms` holds what was fitted and
makes the model's numbers and ids of typed columns.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Array, Bools, Float64s, Ints
from sparrow.core.errors import UserError, suggest
from sparrow.features.clipped import Clipped
from sparrow.features.counts import Counted, frozen
from sparrow.features.encodings import FIRST, MISSING, Known, kind_of
from sparrow.features.hashing import crossed, hash_ids
from sparrow.features.ids import as_ids, as_lists, is_text
from sparrow.features.numeric import as_numbers, without
from sparrow.features.numeric import transform as transform_numbers
from sparrow.features.quantile import bucketize
from sparrow.features.schema import ROLES, Column, Schema, missing_of
from sparrow.features.times import as_times, part_of
from sparrow.features.vectors import as_vectors, packed, transform_vectors
from sparrow.features.words import Words, together

WORTH = 1.5  # rows for a run of equal lists, from which on the run is converted once and repeated
REFIT = "use the schema.toml and vocabulary/ that prepare wrote"


@dataclass(frozen=True, kw_only=True, eq=False)
class Transforms:
    """What turns raw rows into a model's rows: a fitted schema, and the ids that each table knows that numbers them.

    counts: column -> what its ids are after training, for columns with counts.
    """

    schema: Schema
    vocabularies: Mapping[str, Known] = field(default_factory=dict)
    counts: Mapping[str, Counted] = field(default_factory=dict)

    def transform(
        self, batch: pa.RecordBatch | pa.Table, *, training: bool, row0: int = 0, clipped: Clipped | None = None
    ) -> pa.Table:
        """Returns raw rows [N] as a table [N] of feature columns, in the schema's order.

        Label, weight, baseline and numeric columns become float32, and vectors the bytes of their float32. Time, group,
        session and hashed columns become int64, and other categorical ones int32. Lists become large lists of the same
        types. The weights of a list are in a column beside it, named by `weights_of`.

        Args:
            batch: the raw rows.
            training: whether every column must be there and, where there is one label, every cell of it. Else only
                features must be there. A missing label is NaN.
            row0: the log's row of the batch's first one, for errors.
            clipped: counts the numbers beyond training's range.

        Raises:
            UserError: for an absent column, and for a value that does not fit its kind. It names column and row.
        """
        return self.encoded(typed(self.schema, batch, training=training, row0=row0), row0=row0, clipped=clipped)

    def encoded(
        self, batch: pa.RecordBatch, pool: Executor | None = None, row0: int = 0, clipped: Clipped | None = None
    ) -> pa.Table:
        """Returns what `transform` does, for rows that are typed.

        Ids to be counted become what they are after training. Numbers in their place stay.

        Args:
            batch: rows [N] that `typed` made.
            pool: its threads take a column each.
            row0: the log's row of the batch's first one.
            clipped: counts the numbers beyond training's range.

        Raises:
            UserError: when the schema is not fitted.
        """
        work = {}
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            values = work[name] = self.number_of(name, values)
            beside = self.schema.columns.get(missing_of(name))
            if beside is not None and beside.transform == "missing":  # else the log has a column of that name
                work[missing_of(name)] = values
            if clipped is not None and name in self.schema.of_kind("numeric"):
                clipped.add(name, self.schema.columns[name], _numpy(values), row0)
        done = (pool.map if pool else map)(lambda item: self._encoded(*item), work.items())
        return pa.table(dict(zip(work, done, strict=True)))

    def rows_of(self, table: str, raw: pa.Array) -> Ints:
        """Returns the ids [N] by which a table knows raw ones, see `Encoding`.

        Args:
            table: its name.
            raw: ids [N] as a log has them.

        Raises:
            UserError: for values that are no ids, and when the schema is not fitted.
        """
        hashed = not kind_of(self.schema.encodings[table]).takes_integers and _is_hashed(raw.type)
        return self._rows(table, _coded(as_ids(raw, table, int), table, hashed=hashed, strict=False))

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
        return pa.array(frozen(column, self.counts[name], values))

    def save(self, folder: str | Path) -> None:
        """Writes schema.toml and vocabulary/ in place of those in `folder`.

        There is a file in vocabulary/ for each table that numbers its ids, and for each column with counts.
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
            UserError: when something in it is missing or damaged, or when its files do not belong together.
        """
        folder = Path(folder)
        schema = Schema.load(folder / "schema.toml")
        vocabularies: dict[str, Known] = {}
        for name, encoding in schema.encodings.items():
            if is_numbered(schema, name):
                path = folder / vocabulary_file(schema, name)
                known = kind_of(encoding).load(path, encoding)
                if known is None:
                    raise UserError(f"{path}: not the vocabulary that schema.toml was fitted with; prepare again")
                vocabularies[name] = known
        counts: dict[str, Counted] = {}
        for name in schema.counted:
            path = folder / counts_file(schema, name)
            counts[name] = Counted.load(path)
            if counts[name].digest != schema.columns[name].digest:
                raise UserError(f"{path}: not the counts that schema.toml was fitted with; prepare again")
        return cls(schema=schema, vocabularies=vocabularies, counts=counts)

    def _encoded(self, name: str, values: pa.Array) -> pa.Array:
        column = self.schema.columns.get(name)
        if column is None:  # the weights of a list
            return values
        if column.transform == "missing" and pa.types.is_fixed_size_binary(values.type):  # of a vector
            return values.is_null().cast(pa.float32())
        if column.kind == "vector":
            if column.transform != "none" and (column.means is None or column.stds is None):
                raise UserError(f"columns.{name}.means: not fitted; {REFIT}")
            return packed(transform_vectors(values, column.transform, column.means, column.stds))
        if column.kind == "numeric":
            kind = column.transform
            if kind not in ("none", "missing") and (column.mean is None or column.std is None):
                raise UserError(f"columns.{name}.mean: not fitted; {REFIT}")
            limits = column.low, column.high
            return pa.array(transform_numbers(_numpy(values), kind, column.mean, column.std, *limits))
        if column.quantiles:
            if column.boundaries is None:
                raise UserError(f"columns.{name}.boundaries: not fitted; {REFIT}")
            bucket_N = bucketize(_numpy(values), column.boundaries)
            return pa.array(np.where(bucket_N, bucket_N - 1 + FIRST, MISSING).astype(np.int32))
        if column.kind == "categorical":
            return pa.array(self._rows(str(column.table), values))
        if column.kind == "list":
            rows = pa.array(self._rows(str(column.table), values.values))
            return pa.LargeListArray.from_arrays(values.offsets, rows)
        return values

    def _rows(self, name: str, coded: pa.DictionaryArray) -> Ints:
        """Returns the table's ids [N] of coded ones: int32 where the encoding numbers table rows, else int64."""
        encoding, distinct = self.schema.encodings[name], coded.dictionary
        kind, known = kind_of(encoding), self.vocabularies.get(name)
        if encoding.kind is None or (encoding.is_numbered and known is None):
            raise UserError(f"encodings.{name}: not fitted; {REFIT}")
        rows_U = kind.rows_of(known, distinct)
        narrow = encoding.is_numbered and (encoding.rows or 0) < 2**31
        rows_U = np.append(rows_U, MISSING).astype(np.int32 if narrow else np.int64)  # the last one is for missing ids
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
) -> pa.RecordBatch:
    """Returns raw rows [N] as their kinds say, each column in one piece.

    Numeric columns become float64, where NaN is a missing number. Vectors become bytes, see `as_vectors`. Ids are
    coded: they become a dictionary array, whose distinct values are integers (int64) or hashes (uint64). So are the ids
    of columns with counts, as hashes.

    Args:
        schema: says what each column is. It need not be fitted.
        batch: the raw rows.
        training: see `Transforms.transform`.
        row0: the log's row of the batch's first one, for errors.
        integers: columns of text to be taken for integers.
        pool: its threads take a column each.
        words: takes in the texts of ids.

    Raises:
        UserError: like `Transforms.transform`.
        NotIntegersError: when one of `integers` holds something else.
    """
    names = []
    for name, column in schema.columns.items():
        optional = not training and column.kind in ROLES
        is_made = column.kind == "ignore" or column.transform == "missing"  # the latter of the column that it tells of
        is_made |= column.kind == "time" and not training  # scores read its parts alone, and these may be missing
        if not is_made and not (optional and (column.source or name) not in batch.schema.names):
            names.append(name)

    def convert(name: str) -> dict[str, pa.Array]:
        return _typed(schema, batch, name, training, row0, name in integers, words)

    columns: dict[str, pa.Array] = {}
    for made in (pool.map if pool else map)(convert, names):
        columns |= made
    return pa.RecordBatch.from_pydict(columns)


class NotIntegersError(Exception):
    """A column of text holds something else than integers as a computer writes them."""


def weights_of(name: str) -> str:
    """Returns the name of the prepared column with the weights of a list."""
    return f"{name}:weights"


def is_numbered(schema: Schema, table: str) -> bool:
    """Returns whether a table has a table row for each id that it knows, and a file that says which.

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
    numbered = [vocabulary_file(schema, name) for name in schema.encodings if is_numbered(schema, name)]
    return [*numbered, *(counts_file(schema, name) for name in schema.counted)]


def raw_column(batch: pa.RecordBatch | pa.Table, name: str, source: str) -> pa.Array:
    """Returns a feature's raw column in one piece.

    Args:
        batch: the raw rows.
        name: the feature, for errors.
        source: the column of the log.

    Raises:
        UserError: when the column is absent.
    """
    if source not in batch.schema.names:
        has = suggest(source, batch.schema.names)
        raise UserError(f"columns.{name}: no column {source!r} in the log{has}")
    values = batch.column(source)
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def labels(raw: pa.Array, name: str, column: Column, *, training: bool, row0: int) -> Float64s:
    """Returns a raw column as labels 0 and 1, float64 [N]; NaN where one is missing.

    Args:
        raw: the column [N].
        name: the label, for errors.
        column: says which values count as 1.
        training: whether every label must be known.
        row0: the log's row of the first entry, for errors.

    Raises:
        UserError: for a value that is no label, and when training for a missing one.
    """
    if column.positive is not None and not _is_number(raw.type):
        raw = pc.equal(pc.ascii_trim_whitespace(raw.cast(pa.string())), column.positive.strip())
    elif not (_is_number(raw.type) or pa.types.is_boolean(raw.type) or pa.types.is_null(raw.type)):
        remedy = f"set columns.{name}.positive to the value that counts as 1"
        raise UserError(f"label {name!r}: {raw.type} where 0 and 1 are needed; {remedy}")
    y_N = as_numbers(raw, name, row0)
    if column.threshold is not None:
        y_N = np.where(np.isnan(y_N), np.nan, y_N >= column.threshold)
    elif column.positive is not None and _is_number(raw.type):
        y_N = np.where(np.isnan(y_N), np.nan, y_N == _number(column.positive, name))
    missing = np.flatnonzero(np.isnan(y_N))
    if training and len(missing):
        raise UserError(f"label {name!r}, row {row0 + missing[0]}: missing; leave rows without a label out of the log")
    bad = np.flatnonzero(~((y_N == 0) | (y_N == 1) | np.isnan(y_N)))
    if len(bad):
        remedy = f"labels are 0 and 1; for others set columns.{name}.positive to the value that counts as 1"
        raise UserError(f"label {name!r}, row {row0 + bad[0]}: {y_N[bad[0]]:g}; {remedy}, or .threshold to the least")
    return y_N


def _typed(
    schema: Schema,
    batch: pa.RecordBatch | pa.Table,
    name: str,
    training: bool,
    row0: int,
    integers: bool,
    words: Words | None,
) -> dict[str, pa.Array]:
    column = schema.columns[name]
    if column.cross:
        parts = [_ids(schema, batch, part, row0) for part in column.cross]
        ids_N = crossed([hash_ids(part) for part in parts])
        coded = pa.array(ids_N.view(np.uint64), mask=ids_N == 0).dictionary_encode()
        if words is not None:
            words.count(name, pa.DictionaryArray.from_arrays(coded.indices, together(parts, coded)), coded.dictionary)
        return {name: coded}
    raw = _raw(schema, batch, name)
    if column.kind == "label":
        needed = training and len(schema.labels) == 1
        return {name: pa.array(labels(raw, name, column, training=needed, row0=row0).astype(np.float32))}
    if column.kind == "weight":
        return {name: pa.array(_weights(raw, name, row0).astype(np.float32))}
    if column.kind == "baseline":
        return {name: pa.array(_probabilities(raw, name, row0).astype(np.float32))}
    if column.kind == "time":
        return {name: pa.array(as_times(raw, name, row0, column.format))}
    if column.part is not None:
        return {name: _coded(_ids(schema, batch, name, row0), name, hashed=False, strict=False)}
    if column.kind in ("group", "session"):
        ids_N = hash_ids(_ids(schema, batch, name, row0))
        ids_N = np.where(ids_N == 0, -1 - row0 - np.arange(len(ids_N)), ids_N)  # a row without one is alone
        return {name: pa.array(ids_N)}
    if column.counts:
        return {name: _coded(as_ids(raw, name, lambda i: row0 + i), name, hashed=True, strict=False)}
    if column.kind == "numeric" or column.quantiles:
        return {name: pa.array(as_numbers(raw, name, row0))}
    if column.kind == "vector":
        if column.size is None:
            raise UserError(f"columns.{name}.size: not known; {REFIT}")
        return {name: as_vectors(raw, name, row0, column.size, column.separator)}
    table = schema.encodings[str(column.table)]
    hashed = not integers and not kind_of(table).takes_integers and _is_hashed(raw.type)
    if column.kind == "categorical":
        ids = _ids(schema, batch, name, row0)
        return {name: _coded(ids, name, hashed=hashed, strict=integers, words=words)}
    sources = [raw]
    if column.weights not in (None, ":"):
        sources.append(raw_column(batch, name, str(column.weights)))
    begins_N = np.logical_or.reduce([_begins(source) for source in sources])
    first_R = np.flatnonzero(begins_N)
    if WORTH * len(first_R) > len(raw):
        return _typed_lists(column, name, sources, hashed, lambda i: row0 + i)
    once = [source.take(pa.array(first_R)) for source in sources]
    lists = _typed_lists(column, name, once, hashed, lambda i: row0 + int(first_R[i]))
    run_N = pa.array(np.cumsum(begins_N) - 1)
    return {each: values.take(run_N) for each, values in lists.items()}


def _raw(schema: Schema, batch: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    """Returns the raw column of a column, without values that stand for none."""
    column = schema.columns[name]
    raw = raw_column(batch, name, column.source or name)
    return without(raw, column.missing) if column.missing else raw


def _ids(schema: Schema, batch: pa.RecordBatch | pa.Table, name: str, row0: int) -> pa.Array:
    """Returns the ids of a column that has one in a row."""
    raw, column = _raw(schema, batch, name), schema.columns[name]
    return _parts(raw, name, column, row0) if column.part else as_ids(raw, name, lambda i: row0 + i)


def _parts(raw: pa.Array, name: str, column: Column, row0: int) -> pa.Array:
    """Returns a part of each time, an integer; none where the time is missing."""
    assert column.part is not None
    there = raw.drop_null()
    if not len(there):
        return pa.nulls(len(raw), pa.int64())
    times_N = as_times(raw.fill_null(there[0]) if raw.null_count else raw, name, row0, column.format)
    return pa.array(part_of(times_N, column.part), mask=raw.is_null().to_numpy(zero_copy_only=False))


def _begins(raw: pa.Array) -> Bools:
    """Returns where text [N] differs from the one before. What is not text counts as different everywhere.

    Such values are converted as fast as compared.
    """
    begins_N = np.ones(len(raw), np.bool_)
    if is_text(raw.type) and len(raw):
        one, other = raw.slice(1), raw.slice(0, len(raw) - 1)
        missing = pc.and_(one.is_null(), other.is_null())
        begins_N[1:] = ~pc.or_(pc.equal(one, other).fill_null(False), missing).to_numpy(zero_copy_only=False)
    return begins_N


def _typed_lists(
    column: Column, name: str, sources: Sequence[pa.Array], hashed: bool, row_of: Callable[[int], int]
) -> dict[str, pa.Array]:
    """Returns the lists, and their weights beside them. sources: the raw lists, and weights that have a column."""
    raw, weights = sources[0], sources[1] if len(sources) > 1 else column.weights
    ids, offsets, w_M = as_lists(raw, name, row_of, column.max_length, column.separator, weights)
    lists = {name: pa.LargeListArray.from_arrays(offsets, _coded(ids, name, hashed=hashed, strict=False))}
    if w_M is not None:
        lists[weights_of(name)] = pa.LargeListArray.from_arrays(offsets, pa.array(w_M))
    return lists


def _is_hashed(kind: pa.DataType) -> bool:
    """Returns whether ids of a raw type can be other than int64 in some batch, so that only their hashes are alike."""
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return _is_hashed(kind.value_type)
    wide = kind == pa.uint64() or pa.types.is_decimal(kind)
    return wide or is_text(kind) or pa.types.is_boolean(kind) or pa.types.is_dictionary(kind)


def _coded(ids: pa.Array, name: str, *, hashed: bool, strict: bool, words: Words | None = None) -> pa.DictionaryArray:
    """Returns ids as an array of the distinct ones, int64 or, hashed, uint64, and int32 places in it.

    Raises:
        NotIntegersError: when `strict`, for text that is not what an integer's own text would be.
    """
    coded = ids.dictionary_encode()
    distinct = coded.dictionary
    if hashed:
        distinct = pa.array(hash_ids(distinct).view(np.uint64))
    elif is_text(distinct.type):
        numbers = _integers(distinct, name, strict)
        if strict and not numbers.cast(distinct.type).equals(distinct):
            raise NotIntegersError(name)
        distinct = numbers
    if words is not None:
        words.count(name, coded, distinct)
    return pa.DictionaryArray.from_arrays(coded.indices, distinct)


def _integers(texts: pa.Array, name: str, strict: bool) -> pa.Array:
    long = pc.match_substring_regex(texts, r"^-?\d{19,}$")  # those beyond int64 become its ends: beyond any range too
    if not strict and pc.any(long).as_py():
        ends = [str(min(max(int(text), -(2**63)), 2**63 - 1)) for text in texts.filter(long).to_pylist()]
        texts = pc.replace_with_mask(texts, long, pa.array(ends, texts.type))
    try:
        return texts.cast(pa.int64())
    except pa.ArrowInvalid as error:
        if strict:
            raise NotIntegersError(name) from None
        remedy = "prepare the log with kind = 'vocabulary' or 'hash' for its table's encoding"
        raise UserError(f"column {name!r}: its table numbers integers, but {error}; {remedy}") from None


def _weights(raw: pa.Array, name: str, row0: int) -> Float64s:
    w_N = as_numbers(raw, name, row0)
    bad = np.flatnonzero(~(w_N >= 0))
    if len(bad):
        raise UserError(
            f"weight {name!r}, row {row0 + bad[0]}: {w_N[bad[0]]:g}; weights are 0 or more and never missing"
        )
    return w_N


def _probabilities(raw: pa.Array, name: str, row0: int) -> Float64s:
    p_N = as_numbers(raw, name, row0)
    bad = np.flatnonzero(~((p_N >= 0) & (p_N <= 1)))
    if len(bad):
        raise UserError(f"baseline {name!r}, row {row0 + bad[0]}: {p_N[bad[0]]:g}; probabilities lie in 0..1")
    return p_N


def _numpy(values: pa.Array) -> Array:
    return values.to_numpy(zero_copy_only=False)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"columns.{name}.positive: {text!r} is not a number, as the label is; mend it") from None

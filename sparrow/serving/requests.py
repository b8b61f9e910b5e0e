"""A request's Python values -> a batch: what the transforms of a log make of them.

Compiled code encodes what it knows (`sparrow.kernels.encode`). The transforms, which define it all,
encode the other columns, and say what is wrong with a value. Each value is what it would be in a
column of its own: that of a row does not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparrow.core import Batch, KeyedJagged
from sparrow.core.arrays import Bools, Float32s, Float64s, Int64s
from sparrow.core.errors import UserError
from sparrow.core.repeated import Repeated, Users
from sparrow.features.cells import are_odd
from sparrow.features.encodings import UNKNOWN
from sparrow.features.numeric import transform
from sparrow.features.schema import Column as SchemaColumn
from sparrow.features.schema import weights_of
from sparrow.features.transforms import Transforms, typed
from sparrow.features.vectors import numbers_of
from sparrow.kernels import Impl
from sparrow.kernels.encode import Column, Encoded, Rows, planned
from sparrow.serving.columns import base_of, column_of, transforms_of
from sparrow.serving.frames import as_lists
from sparrow.serving.values import (
    array_of,
    count_of,
    kind_of_value,
    lists_of_numbers,
    read_iso,
    values_of,
    weights_of_value,
)


class Part(NamedTuple):
    """A column's values in some rows: ids [N] with the lengths of rows and weights, or numbers.

    numbers: float64 [rows]; of vectors of S numbers [S * rows], the first number of all rows first.
    """

    values: Int64s
    lengths: Int64s
    weights: Float32s | None = None
    numbers: Float64s | None = None


class Known(NamedTuple):
    """What a catalogue has of candidates.

    key: the column that names them there. parts: feature -> its part for all of them. unknown_B:
    whether a candidate is not in the catalogue; then its values are missing.
    """

    key: str
    parts: dict[str, Part]
    unknown_B: Bools


class Catalogue(Protocol):
    """Gives columns of candidates that were encoded before."""

    def known(self, rows: Rows, columns: Collection[str]) -> Known | None:
        """Returns the features whose columns a request lacks; None when candidates have no key of a
        catalogue.

        Args:
            rows: of the candidates.
            columns: names of those of their users.

        Raises:
            UserError: for a key that is no id.
        """
        ...


class Encoder:
    """Makes batches of requests. Threads may share it.

    Args:
        transforms: those of the model. Labels, weights, times and groups are not read.
        impl: see `sparrow.kernels`.

    `read` has the columns that a request has to have, as `sources` does in order.
    """

    def __init__(self, transforms: Transforms, impl: Impl = "auto") -> None:
        self._transforms = transforms
        self._schema = transforms.schema
        schema = transforms.schema
        self._names = (*schema.sparse, *schema.dense)
        self._columns = [column_of(transforms, name) for name in self._names]
        self._feature_sources = {
            name: schema.sources(base_of(schema, name)) for name in self._names
        }
        self.read = frozenset(self.sources)
        self._plan = planned(self._columns, impl)
        self._alone: dict[str, Transforms] = {}
        spelt = [
            bool(column.missing) or column.lookup.kind in ("hash", "vocabulary")
            for column in self._columns
        ]
        self._keeps_words = any(column.present for column in schema.columns.values())
        self._spelt = [
            c for c, is_spelt in enumerate(spelt) if is_spelt and schema.source.has_words
        ]
        self._widths = [schema.columns[name].width for name in schema.dense]
        fits = [fit for name in schema.dense for fit in _fits(schema.columns[name])]
        kinds: dict[tuple[str | None, bool], list[int]] = {}
        for number, (kind, _, _, low, high) in enumerate(fits):
            kinds.setdefault((kind, low is not None and high is not None), []).append(number)
        self._kinds = [
            (kind, at, _stack([fits[c][1:] for c in at])) for (kind, _), at in kinds.items()
        ]

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns that a request has to have."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.feature_sources.values())))

    @property
    def feature_sources(self) -> dict[str, tuple[str, ...]]:
        """Feature -> the columns of a request that it is made of."""
        return self._feature_sources

    @property
    def kinds(self) -> dict[str, str]:
        """What a request's columns are: "list" of ids or of weights, "number", "vector", "integer"
        or other "id".
        """
        kinds: dict[str, str] = {}
        for name, column in zip(self._names, self._columns, strict=True):
            if self._schema.columns[name].cross:
                continue
            kind = {"number": "number", "buckets": "number", "range": "integer"}.get(
                column.lookup.kind, "id"
            )
            kinds |= {column.source: "list" if column.is_list else kind}
            kinds |= {column.weights: "list"} if column.weights else {}
        kinds |= dict.fromkeys(self.sizes, "vector")
        return {source: kinds.get(source, "id") for source in self.sources}

    @property
    def sizes(self) -> dict[str, int]:
        """Column of a request that holds vectors -> how many numbers these have."""
        columns = self._schema.columns
        return {columns[n].source or n: columns[n].width for n in self._schema.of_kind("vector")}

    @property
    def by_definition(self) -> tuple[str, ...]:
        """The columns that are always encoded by the transforms, which takes longer."""
        slow = [column.lookup.kind == "refused" or self._plan is None for column in self._columns]
        return tuple(itertools.compress(self._names, slow))

    def batch(self, rows: Rows) -> Batch:
        """Returns the batch of a request.

        Args:
            rows: as `Scorer.score` takes them. A value is None, a bool, an integer, a float, a
                decimal, text, bytes, a UUID or a list of these, or a time or a date.

        Raises:
            UserError: for an absent column, and for a value that does not fit its kind. It names
                column and row.
        """
        return self._encode(as_lists(rows, self.read), [], None, False, {})

    def crossed(
        self,
        users: Sequence[Mapping[str, Any]],
        rows: Rows,
        user_B: Int64s,
        *,
        shared: bool = True,
        known: Mapping[str, Part] = MappingProxyType({}),
    ) -> Batch:
        """Returns the batch of candidates of some users, in which a user's columns are stored once
        (RecD's IKJT).

        Args:
            users: their columns, the same ones for all.
            rows: the other columns of the candidates, as for `batch`.
            user_B: which user's each candidate is.
            shared: whether products are to run once for what a user's candidates share, see
                `Repeated`.
            known: features of the candidates that are encoded already, see `Known`.

        Raises:
            UserError: as `batch`, and for a column that both have.
        """
        rows = as_lists(rows, self.read)
        user_columns = self.read.intersection(users[0] if users else ())
        for row in ([rows] if isinstance(rows, Mapping) else rows) if user_columns else ():
            if not user_columns.isdisjoint(row):
                name = min(user_columns.intersection(row))
                raise UserError(
                    f"column {name!r}: both the user and the candidates have it; give it once"
                )
        return self._encode(rows, users, user_B, shared, known)

    def _encode(
        self,
        rows: Rows,
        users: Sequence[Mapping[str, Any]],
        user_B: Int64s | None,
        shared: bool,
        known: Mapping[str, Part],
    ) -> Batch:
        user_columns = users[0].keys() if users else ()
        user_features = [self._is_of(name, user_columns) for name in self._names]
        count = count_of(rows, len(users) if user_B is None else len(user_B))
        if user_B is not None and len(user_B) != count:
            raise UserError(
                f"candidates: {count} where users are named for {len(user_B)}; name one for each"
            )
        users = list(users)
        elsewhere = [
            is_user or name in known
            for name, is_user in zip(self._names, user_features, strict=True)
        ]
        encoded = (
            None if self._plan is None else self._plan.encode(rows, count, users, bytes(elsewhere))
        )
        odd = (
            set()
            if encoded is None
            else self._find_odd_columns(encoded, rows, users, user_features, elsewhere)
        )
        if encoded is None or encoded.refused or odd or known:
            encoded = self._mend(
                encoded,
                odd,
                self._with_users(rows, users, user_B),
                count,
                users,
                user_features,
                known,
            )
        whose = None if user_B is None else Users.of(user_B, len(users))
        keyed = self._keyed(encoded, count, whose, user_features)
        user_numbers: list[bool] = []
        number_features = user_features[len(self._schema.sparse) :]
        for is_user, width in zip(number_features, self._widths, strict=True):
            user_numbers += [is_user] * width
        dense_BC = self._standardise(encoded.numbers, count, user_numbers, users, user_B)
        if whose is not None and shared and any(user_features):
            dense_BC = Repeated.of(dense_BC, whose, torch.tensor([user_numbers], dtype=torch.bool))
        return Batch(dense_BC=dense_BC, ids=keyed)

    def _keyed(
        self, encoded: Encoded, count: int, whose: Users | None, user_features: Sequence[bool]
    ) -> KeyedJagged:
        """Returns the ids of candidates, and once for each user those of features of users."""
        keys = self._schema.sparse
        inverse = {}
        rows = (count,) * len(keys)
        if whose is not None:
            users = len(whose.sample_U)
            group = tuple(
                name for name, is_user in zip(keys, user_features, strict=False) if is_user
            )
            inverse = {group: whose.inverse_B} if group else {}
            rows = tuple(users if is_user else count for is_user in user_features[: len(keys)])
        return KeyedJagged(
            keys=keys,
            values_N=encoded.values_N,
            lengths=encoded.lengths,
            offsets=encoded.offsets,
            weights_N=encoded.weights_N,
            inverse_B=inverse,
            rows=rows,
            _bounds=encoded.bounds,
        )

    def _is_of(self, name: str, columns: Collection[str]) -> bool:
        """Returns whether a feature is of users, who have these columns. Of a list its weights may
        be elsewhere.
        """
        return all(source in columns for source in self._feature_sources[name])

    def _with_users(
        self, rows: Rows, users: Sequence[Mapping[str, Any]], user_B: Int64s | None
    ) -> Rows:
        """Returns candidates with the columns of their users that crosses, and lists with weights,
        need.
        """
        user_columns = users[0].keys() if users else ()
        mixed = [name for name in self._schema.sparse if not self._is_of(name, user_columns)]
        sources: dict[str, None] = {}
        for name in mixed:
            sources |= dict.fromkeys(
                source for source in self._feature_sources[name] if source in user_columns
            )
        if user_B is None or not rows or not sources:
            return rows
        whose = user_B.tolist()
        named = rows if isinstance(rows, Mapping) else rows[0] if rows else {}
        row_columns = [name for name in self.read if name in named and name not in user_columns]
        columns = {name: values_of(rows, name) for name in row_columns}
        return columns | {name: [users[user][name] for user in whose] for name in sources}

    # -- numbers -----------------------------------------------------------------------------------

    def _standardise(
        self,
        numbers: Float64s,
        count: int,
        user_numbers: Sequence[bool],
        users: Sequence[Any],
        user_B: Int64s | None,
    ) -> torch.Tensor:
        """Returns float32 [B, C]. numbers: column by column, those of users once for each of
        them.
        """
        if user_B is None or not any(user_numbers):
            x_CN = numbers.reshape(len(user_numbers), count)
        else:
            x_CN = np.empty((len(user_numbers), count))
            at = 0
            for c, is_user in enumerate(user_numbers):
                column = numbers[at : at + (len(users) if is_user else count)]
                x_CN[c] = column[user_B] if is_user else column
                at += len(column)
        out_BC = np.empty((count, len(user_numbers)), np.float32)
        for kind, at_K, fitted in self._kinds:
            out_BC[:, at_K] = transform(x_CN[at_K], kind, *fitted).T
        return torch.from_numpy(out_BC)

    # -- texts that say another id or none, see `sparrow.features.cells` ---------------------------

    def _find_odd_columns(
        self,
        encoded: Encoded,
        rows: Rows,
        users: Sequence[Mapping[str, Any]],
        user_features: list[bool],
        skipped: list[bool],
    ) -> set[int]:
        """Returns the columns with such texts, of which compiled code knows nothing: it takes each
        for itself.

        A vocabulary knows none of them unless a column keeps words, so only columns with unknown
        ids are looked at. skipped: columns to be passed over, which are users' or known.
        """
        odd = set()
        ids = len(self._schema.sparse)
        for c in self._spelt:
            if c in encoded.refused or (skipped[c] and not user_features[c]):
                continue
            has_none = (
                c < ids and self._columns[c].lookup.kind == "vocabulary" and not self._keeps_words
            )
            if (
                has_none
                and not (encoded.values_N[slice(*encoded.bounds[c : c + 2])] == UNKNOWN).any()
            ):
                continue
            if are_odd(
                _texts(
                    values_of(users if user_features[c] else rows, self._columns[c].source),
                    self._columns[c],
                )
            ):
                odd.add(c)
        return odd

    # -- by the definition -------------------------------------------------------------------------

    def _mend(
        self,
        encoded: Encoded | None,
        odd: Collection[int],
        rows: Rows,
        count: int,
        users: Sequence[Mapping[str, Any]],
        user_features: list[bool],
        known: Mapping[str, Part],
    ) -> Encoded:
        """Complete what compiled code encoded: columns that it refused, odd ones and known ones."""
        refused = range(len(self._columns)) if encoded is None else encoded.refused
        parts: list[Part] = []
        ids = len(self._schema.sparse)
        at_row = 0
        at_number = 0
        for c, is_user in enumerate(user_features):
            size = len(users) if is_user else count
            if self._names[c] in known:
                parts.append(known[self._names[c]])
                continue
            if c in refused:
                parts.append(self._define(c, users if is_user else rows, size))
                continue
            assert encoded is not None
            if c < ids:
                low, high = encoded.bounds[c : c + 2]
                weights = None if encoded.weights_N is None else encoded.weights_N[low:high].numpy()
                lengths = encoded.lengths[at_row : at_row + size].numpy()
                part = Part(encoded.values_N[low:high].numpy(), lengths, weights)
                at_row += size
            else:
                part = Part(_NONE, _NONE, None, encoded.numbers[at_number : at_number + size])
                at_number += size
            parts.append(self._define(c, users if is_user else rows, size) if c in odd else part)
        id_parts = parts[:ids]
        offsets = np.cumsum(
            np.concatenate([_NONE[:1], np.zeros(1, np.int64), *(part.lengths for part in id_parts)])
        )
        weights_N = None
        if any(column.weights for column in self._columns) or any(
            part.weights is not None for part in id_parts
        ):
            part_weights = [
                np.ones(len(p.values), np.float32) if p.weights is None else p.weights
                for p in id_parts
            ]
            weights_N = torch.from_numpy(np.concatenate(part_weights))
        return Encoded(
            values_N=torch.from_numpy(np.concatenate([_NONE, *(part.values for part in id_parts)])),
            offsets=torch.from_numpy(offsets),
            lengths=torch.from_numpy(np.diff(offsets)),
            bounds=(0, *itertools.accumulate(len(part.values) for part in id_parts)),
            numbers=np.concatenate(
                [_NONE.astype(np.float64), *(p.numbers for p in parts if p.numbers is not None)]
            ),
            weights_N=weights_N,
            refused=[],
        )

    def _define(self, c: int, rows: Rows, count: int) -> Part:
        """Encode a column by the transforms, which define it."""
        name = self._names[c]
        values = {source: values_of(rows, source) for source in self._feature_sources[name]}
        for part in (name, *(self._schema.columns[name].cross or ())):
            time = self._schema.columns[part]
            if time.part:
                source = time.source or part
                values[source] = read_iso(values[source], time.format)
        if (weights := self._columns[c].weights) is not None:
            values[weights] = [
                weights_of_value(value, weights, row) for row, value in enumerate(values[weights])
            ]
        first = next(iter(values.values()))
        base = base_of(self._schema, name)
        is_vector = self._schema.columns[base].kind == "vector"
        size = self._schema.columns[base].width
        if is_vector and (x_NS := lists_of_numbers(first, size)) is not None:
            return _vector_part(x_NS, base == name)
        groups: dict[tuple[str, ...], list[int]] = {}
        for row, row_values in enumerate(zip(*values.values(), strict=True)):
            pairs = zip(values, row_values, strict=True)
            groups.setdefault(
                tuple(kind_of_value(value, source, row) for source, value in pairs), []
            ).append(row)
        parts: list[Part] = [Part(_NONE, _NONE)] * count
        for kinds, at in groups.items():
            arrays = {
                source: array_of({row: column_values[row] for row in at}, kind, source)
                for (source, column_values), kind in zip(values.items(), kinds, strict=True)
            }
            try:
                row_parts = self._transform_rows(c, pa.table(arrays))
            except UserError:
                for place, row in enumerate(at):  # to name the row
                    try:
                        self._transform_rows(c, pa.table(arrays).slice(place, 1), row)
                    except UserError as error:
                        raise UserError(
                            self._reword_error(c, row, first[row], str(error))
                        ) from None
                raise
            for place, row in enumerate(at):
                parts[row] = row_parts[place]
        if name in self._schema.dense:
            numbers = [row_part.numbers for row_part in parts if row_part.numbers is not None]
            x_N = np.concatenate([_NONE.astype(np.float64), *numbers])
            return Part(_NONE, _NONE, None, x_N.reshape(count, -1).T.reshape(-1) if count else x_N)
        listed = [row_part.weights for row_part in parts if row_part.weights is not None]
        return Part(
            np.concatenate([_NONE, *(row_part.values for row_part in parts)]),
            np.array([len(row_part.values) for row_part in parts], np.int64),
            np.concatenate(listed) if listed else None,
        )

    def _reword_error(self, c: int, row: int, value: Any, message: str) -> str:
        """Word an error about a value for who sends requests: transforms advise who prepares a
        log.
        """
        column = self._columns[c]
        schema_column = self._schema.columns[self._names[c]]
        if schema_column.part:
            fact = f"column {column.source!r}, row {row}: {repr(value)[:100]} is no time"
            return (
                f"{fact}; give it as the log has it, or ISO 8601, such as 2026-11-21T10:00:00, or"
                " null"
            )
        if schema_column.kind == "vector":
            return (
                f"{message.rpartition('; ')[0]}; give a list of {schema_column.width} numbers, or"
                " null"
            )
        if column.weights or column.lookup.kind == "refused":
            return message
        noun = {"number": "number", "buckets": "number", "range": "integer"}.get(
            column.lookup.kind, "id"
        )
        remedy = {"number": "a number", "integer": "an integer", "id": "text or an integer"}[noun]
        if column.is_list:
            noun, remedy = f"list of {noun}s", f"a list of {noun}s"
        fact = message.rpartition("; ")[0].replace(
            f"column {self._names[c]!r}", f"column {column.source!r}", 1
        )
        if f"row {row}:" not in fact:
            fact = f"column {column.source!r}, row {row}: {repr(value)[:100]} is no {noun}"
        return f"{fact}; give {remedy}, or null"

    def _transform_rows(self, c: int, table: pa.Table, row0: int = 0) -> list[Part]:
        """Transform a column. Returns a part for each row."""
        part = self.part(self._names[c], table, row0)
        if part.numbers is not None:
            return [
                Part(_NONE, _NONE, None, x_S) for x_S in part.numbers.reshape(-1, table.num_rows).T
            ]
        parts = []
        for low, high in itertools.pairwise([0, *np.cumsum(part.lengths).tolist()]):
            weights = None if part.weights is None else part.weights[low:high]
            parts.append(Part(part.values[low:high], _NONE, weights))
        return parts

    def part(self, name: str, table: pa.Table, row0: int = 0) -> Part:
        """Encode raw rows for a feature by the transforms.

        Args:
            name: the feature.
            table: rows with the columns that it is made of.
            row0: the number of the first one, for errors.

        Raises:
            UserError: as `Transforms.transform`.
        """
        if name not in self._alone:
            self._alone[name] = transforms_of(self._transforms, name)
        alone = self._alone[name]
        if name in self._schema.dense:
            (base,) = alone.schema.dense
            values = alone.number_of(
                base, typed(alone.schema, table, training=False, row0=row0)[base]
            )
            if alone.schema.columns[base].kind == "vector":
                return _vector_part(numbers_of(values), base == name)
            return Part(_NONE, _NONE, None, values.to_numpy(zero_copy_only=False))
        transformed = alone.transform(table, training=False, row0=row0)
        column = transformed[name].combine_chunks()
        if self._schema.columns[name].kind != "list":
            ids = column.to_numpy(zero_copy_only=False).astype(np.int64)
            return Part(ids, np.ones(len(ids), np.int64))
        values = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(np.int64)
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        weights = None
        if weights_of(name) in transformed.column_names:
            weights = pc.list_flatten(transformed[weights_of(name)]).to_numpy()
        return Part(values, lengths, weights)


_NONE = np.empty(0, np.int64)


def _texts(values: Sequence[Any], column: Column) -> Iterator[str]:
    """Yields the texts among a column's values; of lists, those of their ids."""
    for value in values:
        if isinstance(value, str):
            yield from value.split(column.separator) if column.is_list else (value,)
        elif column.is_list and isinstance(value, list):
            yield from (element for element in value if isinstance(element, str))


def _fits(column: SchemaColumn) -> list[tuple[Any, ...]]:
    """Returns transform, mean, std, low and high of each number of a numeric or a vector column."""
    if column.kind == "vector":
        none = (None,) * column.width
        pairs = zip(column.means or none, column.stds or none, strict=True)
        return [(column.transform, mean, std, None, None) for mean, std in pairs]
    return [(column.transform, column.mean, column.std, column.low, column.high)]


def _stack(fits: list[tuple[Any, ...]]) -> list[Float64s | None]:
    """Returns mean, std, low and high of numbers of one kind, [C, 1] each; None where one of them
    has none.
    """
    return [
        None if None in values else np.array(values, np.float64)[:, None]
        for values in zip(*fits, strict=True)
    ]


def _vector_part(x_NS: Float64s, has_all: bool) -> Part:
    """Returns vectors, or of each only the first number, which tells whether it is missing."""
    return Part(_NONE, _NONE, None, (x_NS if has_all else x_NS[:, :1]).T.reshape(-1))

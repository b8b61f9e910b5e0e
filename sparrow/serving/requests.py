"""A request's Python values -> a batch: what the transforms of a log make of them.

Compiled code encodes what it knows (`sparrow.kernels.encode`). The transforms, which define it all, encode the other
columns, and say what is wrong with a value. Each value is what it would be in a column of its own: that of a row does
not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
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
from sparrow.features.counts import by_row
from sparrow.features.encodings import FIRST, kind_of
from sparrow.features.numeric import transform
from sparrow.features.schema import Column as Of
from sparrow.features.schema import Schema, missing_of
from sparrow.features.transforms import Transforms, typed, weights_of
from sparrow.features.vectors import numbers_of
from sparrow.kernels import Impl
from sparrow.kernels.encode import Column, Encoded, Lookup, Rows, planned
from sparrow.serving.values import array_of, as_lists, count_of, kind_of_value, lists_of_numbers, values_of


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

    key: the column that names them there. parts: feature -> its part for all of them. unknown_B: whether a candidate
    is not in the catalogue; then its values are missing.
    """

    key: str
    parts: dict[str, Part]
    unknown_B: Bools


class Catalogue(Protocol):
    """Gives columns of candidates that were encoded before."""

    def known(self, rows: Rows, given: Collection[str]) -> Known | None:
        """Returns the features whose columns are not given; None when candidates have no key of a catalogue.

        Args:
            rows: columns of the candidates.
            given: columns of their users.

        Raises:
            UserError: for a key that is no id.
        """
        ...


class Encoder:
    """Makes batches of requests. Threads may share it.

    Args:
        transforms: those of the model. Labels, weights, times and groups are not read.
        impl: see `sparrow.kernels`.
    """

    def __init__(self, transforms: Transforms, impl: Impl = "auto") -> None:
        self._transforms, self._schema = transforms, transforms.schema
        schema = transforms.schema
        self._names = (*schema.sparse, *schema.dense)
        self._columns = [_column(transforms, name) for name in self._names]
        self._made_of = {name: schema.sources(_base(schema, name)) for name in self._names}
        self._plan = planned(self._columns, impl)
        self._alone: dict[str, Transforms] = {}
        self._widths = [schema.columns[name].width for name in schema.dense]
        each = [fit for name in schema.dense for fit in _fits(schema.columns[name])]
        kinds: dict[tuple[str | None, bool], list[int]] = {}
        for number, (kind, _, _, low, high) in enumerate(each):
            kinds.setdefault((kind, low is not None and high is not None), []).append(number)
        self._kinds = [(kind, at, _stacked([each[c][1:] for c in at])) for (kind, _), at in kinds.items()]

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns that a request has to have."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.made_of.values())))

    @property
    def made_of(self) -> dict[str, tuple[str, ...]]:
        """Feature -> the columns of a request that it is made of."""
        return self._made_of

    @property
    def kinds(self) -> dict[str, str]:
        """What a request's columns are: "list" of ids or of weights, "number", "vector", "integer" or other "id"."""
        found: dict[str, str] = {}
        for name, column in zip(self._names, self._columns, strict=True):
            if self._schema.columns[name].cross:
                continue
            of = {"number": "number", "buckets": "number", "range": "integer"}.get(column.lookup.kind, "id")
            found |= {column.source: "list" if column.is_list else of}
            found |= {column.weights: "list"} if column.weights else {}
        found |= dict.fromkeys(self.sizes, "vector")
        return {source: found.get(source, "id") for source in self.sources}

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
            rows: a list of dicts, or a dict of lists of one length. A value is None, a bool, an integer, a float, text
                or a list of these.

        Raises:
            UserError: for an absent column, and for a value that does not fit its kind. It names column and row.
        """
        return self._made(rows, [], None, False, {})

    def crossed(
        self,
        users: Sequence[Mapping[str, Any]],
        rows: Rows,
        user_B: Int64s,
        *,
        shared: bool = True,
        known: Mapping[str, Part] = MappingProxyType({}),
    ) -> Batch:
        """Returns the batch of candidates of some users, in which a user's columns are stored once (RecD's IKJT).

        Args:
            users: their columns, the same ones for all.
            rows: the other columns of the candidates, as for `batch`.
            user_B: which user's each candidate is.
            shared: whether products are to run once for what a user's candidates share, see `Repeated`.
            known: features of the candidates that are encoded already, see `Known`.

        Raises:
            UserError: as `batch`, and for a column that both have.
        """
        return self._made(rows, users, user_B, shared, known)

    def _made(
        self,
        rows: Rows,
        users: Sequence[Mapping[str, Any]],
        user_B: Int64s | None,
        shared: bool,
        known: Mapping[str, Part],
    ) -> Batch:
        rows = as_lists(rows)
        given = users[0].keys() if users else ()
        of_users = [self._is_of(name, given) for name in self._names]
        count = count_of(rows, len(users) if user_B is None else len(user_B))
        if user_B is not None and len(user_B) != count:
            raise UserError(f"candidates: {count} where users are named for {len(user_B)}; name one for each")
        users = list(users)
        elsewhere = [is_user or name in known for name, is_user in zip(self._names, of_users, strict=True)]
        found = None if self._plan is None else self._plan.encode(rows, count, users, bytes(elsewhere))
        if found is None or found.refused or known:
            found = self._mended(found, self._with_users(rows, users, user_B), count, users, of_users, known)
        ids = len(self._schema.sparse)
        inverse, stored = {}, (count,) * ids
        whose = None if user_B is None else Users.of(user_B, len(users))
        if whose is not None:
            group = tuple(name for name, is_user in zip(self._schema.sparse, of_users, strict=False) if is_user)
            inverse = {group: whose.inverse_B} if group else {}
            stored = tuple(len(users) if is_user else count for is_user in of_users[:ids])
        keyed = KeyedJagged(
            keys=self._schema.sparse,
            values_N=found.values_N,
            lengths=found.lengths,
            offsets=found.offsets,
            weights_N=found.weights_N,
            inverse_B=inverse,
            rows=stored,
            _bounds=found.bounds,
        )
        of_numbers = [of for of, width in zip(of_users[ids:], self._widths, strict=True) for _ in range(width)]
        dense_BC = self._standardised(found.numbers, count, of_numbers, users, user_B)
        if whose is not None and shared and any(of_users):
            dense_BC = Repeated.of(dense_BC, whose, torch.tensor([of_numbers], dtype=torch.bool))
        return Batch(dense_BC=dense_BC, ids=keyed)

    def _is_of(self, name: str, given: Collection[str]) -> bool:
        """Returns whether a feature is of users, who have these columns."""
        made_of = self._made_of[name]
        return all(source in given for source in (made_of if self._schema.columns[name].cross else made_of[:1]))

    def _with_users(self, rows: Rows, users: Sequence[Mapping[str, Any]], user_B: Int64s | None) -> Rows:
        """Returns candidates with the columns of their users that crosses need."""
        crosses = [name for name in self._schema.sparse if self._schema.columns[name].cross]
        given = users[0].keys() if users else ()
        both = [name for name in crosses if not self._is_of(name, given)]
        sources = dict.fromkeys(source for name in both for source in self._made_of[name])
        if user_B is None or not rows or not any(source in given for source in sources):
            return rows
        whose = user_B.tolist()
        others = {name for of in self._made_of.values() for name in of} - set(given)
        named = rows if isinstance(rows, Mapping) else rows[0] if rows else {}
        columns = {name: values_of(rows, name) for name in others if name in named}
        return columns | {name: [users[user][name] for user in whose] for name in sources if name in given}

    # -- numbers --------------------------------------------------------------------------------------------------

    def _standardised(
        self, numbers: Float64s, count: int, of_users: Sequence[bool], users: Sequence[Any], user_B: Int64s | None
    ) -> torch.Tensor:
        """Returns float32 [B, C]. numbers: column by column, those of users once for each of them."""
        if user_B is None or not any(of_users):
            x_CN = numbers.reshape(len(of_users), count)
        else:
            x_CN, at = np.empty((len(of_users), count)), 0
            for c, is_user in enumerate(of_users):
                of_column = numbers[at : at + (len(users) if is_user else count)]
                x_CN[c], at = of_column[user_B] if is_user else of_column, at + len(of_column)
        out_BC = np.empty((count, len(of_users)), np.float32)
        for kind, at_K, fitted in self._kinds:
            out_BC[:, at_K] = transform(x_CN[at_K], kind, *fitted).T
        return torch.from_numpy(out_BC)

    # -- by the definition ----------------------------------------------------------------------------------------

    def _mended(
        self,
        found: Encoded | None,
        rows: Rows,
        count: int,
        users: Sequence[Mapping[str, Any]],
        of_users: list[bool],
        known: Mapping[str, Part],
    ) -> Encoded:
        """Returns what compiled code made of a request, with the columns that it refused and those that are known."""
        refused = range(len(self._columns)) if found is None else found.refused
        parts: list[Part] = []
        ids, at_row, at_number = len(self._schema.sparse), 0, 0
        for c, is_user in enumerate(of_users):
            size = len(users) if is_user else count
            if self._names[c] in known:
                parts.append(known[self._names[c]])
                continue
            if c in refused:
                parts.append(self._defined(c, users if is_user else rows, size))
                continue
            assert found is not None
            if c < ids:
                low, high = found.bounds[c : c + 2]
                weights = None if found.weights_N is None else found.weights_N[low:high].numpy()
                lengths = found.lengths[at_row : at_row + size].numpy()
                parts.append(Part(found.values_N[low:high].numpy(), lengths, weights))
                at_row += size
            else:
                numbers = found.numbers[at_number : at_number + size]
                parts.append(Part(_NONE, _NONE, None, numbers))
                at_number += size
        of_ids = parts[:ids]
        offsets = np.cumsum(np.concatenate([_NONE[:1], np.zeros(1, np.int64), *(part.lengths for part in of_ids)]))
        weights_N = None
        if any(column.weights for column in self._columns) or any(part.weights is not None for part in of_ids):
            each = [np.ones(len(p.values), np.float32) if p.weights is None else p.weights for p in of_ids]
            weights_N = torch.from_numpy(np.concatenate(each))
        return Encoded(
            values_N=torch.from_numpy(np.concatenate([_NONE, *(part.values for part in of_ids)])),
            offsets=torch.from_numpy(offsets),
            lengths=torch.from_numpy(np.diff(offsets)),
            bounds=(0, *itertools.accumulate(len(part.values) for part in of_ids)),
            numbers=np.concatenate([_NONE.astype(np.float64), *(p.numbers for p in parts if p.numbers is not None)]),
            weights_N=weights_N,
            refused=[],
        )

    def _defined(self, c: int, rows: Rows, count: int) -> Part:
        """Returns what the transforms make of a column."""
        name = self._names[c]
        values = {source: values_of(rows, source) for source in self._made_of[name]}
        first = next(iter(values.values()))
        base = _base(self._schema, name)
        is_vector, size = self._schema.columns[base].kind == "vector", self._schema.columns[base].width
        if is_vector and (x_NS := lists_of_numbers(first, size)) is not None:
            return _of_vectors(x_NS, base == name)
        groups: dict[tuple[str, ...], list[int]] = {}
        for row, of_row in enumerate(zip(*values.values(), strict=True)):
            groups.setdefault(tuple(kind_of_value(value, name, row) for value in of_row), []).append(row)
        each: list[Part] = [Part(_NONE, _NONE)] * count
        for kinds, at in groups.items():
            pairs = zip(values.items(), kinds, strict=True)
            arrays = {source: array_of([of[row] for row in at], kind) for (source, of), kind in pairs}
            try:
                made = self._transformed(c, pa.table(arrays))
            except UserError:
                for place, row in enumerate(at):  # to name the row
                    try:
                        self._transformed(c, pa.table(arrays).slice(place, 1), row)
                    except UserError as error:
                        raise UserError(self._told(c, row, first[row], str(error))) from None
                raise
            for place, row in enumerate(at):
                each[row] = made[place]
        if name in self._schema.dense:
            numbers = [one.numbers for one in each if one.numbers is not None]
            x_N = np.concatenate([_NONE.astype(np.float64), *numbers])
            return Part(_NONE, _NONE, None, x_N.reshape(count, -1).T.reshape(-1) if count else x_N)
        listed = [one.weights for one in each if one.weights is not None]
        return Part(
            np.concatenate([_NONE, *(one.values for one in each)]),
            np.array([len(one.values) for one in each], np.int64),
            np.concatenate(listed) if listed else None,
        )

    def _told(self, c: int, row: int, value: Any, told: str) -> str:
        """Returns an error about a value as who sends requests needs it: transforms advise who prepares a log."""
        column, of = self._columns[c], self._schema.columns[self._names[c]]
        if of.kind == "vector":
            return f"{told.rpartition('; ')[0]}; give a list of {of.width} numbers, or null"
        if column.weights or column.lookup.kind == "refused":
            return told
        what = {"number": "number", "buckets": "number", "range": "integer"}.get(column.lookup.kind, "id")
        remedy = {"number": "a number", "integer": "an integer", "id": "text or an integer"}[what]
        if column.is_list:
            what, remedy = f"list of {what}s", f"a list of {what}s"
        fact = told.rpartition("; ")[0]
        if f"row {row}:" not in fact:
            fact = f"column {column.source!r}, row {row}: {repr(value)[:100]} is no {what}"
        return f"{fact}; give {remedy}, or null"

    def _transformed(self, c: int, table: pa.Table, row0: int = 0) -> list[Part]:
        """Returns what the transforms make of a column, a part for each row."""
        made = self.part(self._names[c], table, row0)
        if made.numbers is not None:
            return [Part(_NONE, _NONE, None, x_S) for x_S in made.numbers.reshape(-1, table.num_rows).T]
        each = []
        for low, high in itertools.pairwise([0, *np.cumsum(made.lengths).tolist()]):
            weights = None if made.weights is None else made.weights[low:high]
            each.append(Part(made.values[low:high], _NONE, weights))
        return each

    def part(self, name: str, table: pa.Table, row0: int = 0) -> Part:
        """Returns what the transforms make of raw rows for a feature.

        Args:
            name: the feature.
            table: rows with the columns that it is made of.
            row0: the number of the first one, for errors.

        Raises:
            UserError: as `Transforms.transform`.
        """
        if name not in self._alone:
            self._alone[name] = _alone(self._transforms, name)
        alone = self._alone[name]
        if name in self._schema.dense:
            (base,) = alone.schema.dense
            values = alone.number_of(base, typed(alone.schema, table, training=False, row0=row0)[base])
            if alone.schema.columns[base].kind == "vector":
                return _of_vectors(numbers_of(values), base == name)
            return Part(_NONE, _NONE, None, values.to_numpy(zero_copy_only=False))
        made = alone.transform(table, training=False, row0=row0)
        column = made[name].combine_chunks()
        if self._schema.columns[name].kind != "list":
            ids = column.to_numpy(zero_copy_only=False).astype(np.int64)
            return Part(ids, np.ones(len(ids), np.int64))
        values = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(np.int64)
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        weights = pc.list_flatten(made[weights_of(name)]).to_numpy() if weights_of(name) in made.column_names else None
        return Part(values, lengths, weights)


_NONE = np.empty(0, np.int64)


def _fits(of: Of) -> list[tuple[Any, ...]]:
    """Returns transform, mean, std, low and high of each number of a numeric or a vector column."""
    if of.kind == "vector":
        none = (None,) * of.width
        return [(of.transform, *two, None, None) for two in zip(of.means or none, of.stds or none, strict=True)]
    return [(of.transform, of.mean, of.std, of.low, of.high)]


def _stacked(fits: list[tuple[Any, ...]]) -> list[Float64s | None]:
    """Returns mean, std, low and high of numbers of one kind, [C, 1] each; None where one of them has none."""
    return [None if None in one else np.array(one, np.float64)[:, None] for one in zip(*fits, strict=True)]


def _of_vectors(x_NS: Float64s, whole: bool) -> Part:
    """Returns vectors, or of each only the first number, which tells whether it is missing."""
    return Part(_NONE, _NONE, None, (x_NS if whole else x_NS[:, :1]).T.reshape(-1))


def _base(schema: Schema, name: str) -> str:
    """Returns the column that a feature is read as: the one of which it tells whether it is missing, or itself."""
    is_mark = schema.columns[name].transform == "missing"
    return next(n for n in schema.dense if missing_of(n) == name) if is_mark else name


def _column(transforms: Transforms, name: str) -> Column:
    """Returns how a column is encoded by compiled code."""
    schema = transforms.schema
    column, base = schema.columns[name], _base(schema, name)
    if column.kind in ("numeric", "vector"):
        is_vector = schema.columns[base].kind == "vector"
        lookup = Lookup("refused", numbers=_NONE.astype(np.float64)) if is_vector else Lookup("number")
        if schema.columns[base].counts:
            counted, places = transforms.counts[base], np.arange(len(transforms.counts[base].hashes_V))
            numbers_R = by_row(schema.columns[base], counted)
            lookup = Lookup("vocabulary", counted.hashes_V, places + FIRST, numbers=numbers_R)
    elif column.quantiles:
        lookup = Lookup("buckets", np.array(column.boundaries or (), np.float64))
    elif column.weights == ":" or column.part or column.cross:
        lookup = Lookup("refused")
    else:
        lookup = kind_of(schema.encodings[str(column.table)]).lookup(transforms.vocabularies.get(str(column.table)))
    read = schema.columns[base]
    return Column(
        source=read.source or base,
        lookup=lookup,
        is_list=column.kind == "list",
        weights=None if column.weights == ":" else column.weights,
        max_length=column.max_length,
        separator="" if column.separator == "json" else column.separator,
        missing=read.missing or (),
        missing_numbers=tuple(x for text in read.missing or () for x in _as_written(text)),
    )


def _as_written(text: str) -> list[float]:
    """Returns the float that Arrow writes so, if there is one."""
    try:
        number = float(text)
    except ValueError:
        return []
    return [number] if pa.scalar(number, pa.float64()).cast(pa.large_string()).as_py() == text else []


def _alone(transforms: Transforms, name: str) -> Transforms:
    """Returns the transforms of one column."""
    schema = transforms.schema
    name = _base(schema, name)
    column = schema.columns[name]
    tables = {str(column.table)} & schema.encodings.keys()
    parts = {part: schema.columns[part] for part in column.cross or ()}
    tables |= {str(of.table) for of in parts.values()} & schema.encodings.keys()
    columns = {name: column, **parts}
    alone = Schema(columns=columns, encodings={table: schema.encodings[table] for table in tables})
    return replace(
        transforms,
        schema=alone,
        vocabularies={t: transforms.vocabularies[t] for t in tables & transforms.vocabularies.keys()},
        counts={n: transforms.counts[n] for n in {name} & transforms.counts.keys()},
    )

"""Side tables: the columns of an items' or users' table beside each row of a log, found by a key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.data.shaping.repair import Repairs
from sparrow.data.shaping.steps import Rows, Types, tell
from sparrow.features.hashing import hash_ids
from sparrow.features.ids import as_ids, is_text
from sparrow.features.schema import Join


class Side(Protocol):
    """What a side table is read through: a `Log`."""

    @property
    def types(self) -> Types:
        """Its columns."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """See `Log.batches`."""

    def notes(self) -> list[str]:
        """See `Log.notes`."""

    def located(self, error: UserError, row0: int) -> UserError:
        """See `Log.located`."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The step (see `Step`) that adds a side table's columns. A row without a match gets missing values.

    Keys are compared as ids are everywhere: the number 12 and the text "12" are one. The columns that are wanted of the
    side table are held in memory while rows are read. held: the columns before.
    """

    join: Join
    side: Side
    held: Types

    def __post_init__(self) -> None:
        on, key, name = self.join.on, self._key, self.side.name
        if on not in self.held:
            raise UserError(f"join {name}: the log has no column {on!r}{suggest(on, self.held)}")
        if key not in self.side.types:
            remedy = f"or write on {on}=ITS_COLUMN; a side table needs a header"
            raise UserError(f"{name}: no column {key!r} to join by{suggest(key, self.side.types)}; {remedy}")
        for kind in (self.held[on], self.side.types[key]):
            if pa.types.is_nested(kind):
                raise UserError(f"join {name}: on {on!r}, which is {kind}; join by a column with one id in each row")
        for made in self._sources:
            if made in self.held:
                remedy = 'rename it, or set a prefix in [source] of a schema: joins = [{ ..., prefix = "item_" }]'
                raise UserError(f"{name}: column {made!r} is in the log too; {remedy}")

    @property
    def _key(self) -> str:
        """The side table's column of keys."""
        return self.join.key or self.join.on

    @property
    def _sources(self) -> dict[str, str]:
        """Added column -> the side table's."""
        return {f"{self.join.prefix or ''}{name}": name for name in self.side.types if name != self._key}

    def types(self) -> Types:
        """See `Step`."""
        return self.held | {made: self.side.types[name] for made, name in self._sources.items()}

    def needs(self, wanted: Types) -> Types:
        """See `Step`."""
        mine = {name: kind for name, kind in wanted.items() if name in self.held}
        if len(mine) == len(wanted):
            return mine
        on = self.held[self.join.on]
        return {self.join.on: pa.string() if pa.types.is_integer(on) else on} | mine

    def made(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        sources = {made: name for made, name in self._sources.items() if made in wanted}
        if not sources:
            yield from stream
            return
        on, found = self.join.on, None
        keys, columns = self._read({name: wanted[made] for made, name in sources.items()})
        what = f"without a match for {on} in {self.side.name}, whose columns are missing there"
        for rows in stream:
            ids = rows.batch.column(on)
            if found is None:
                found = self._index(keys, as_numbers=not is_text(ids.type))
            try:
                hash_N = hash_ids(as_ids(ids, on, rows.row))
            except UserError as error:  # it names the row
                raise UserError(f"{rows.file}: {error}") from None
            hashes_U, order_U = found
            at_N = np.searchsorted(hashes_U, hash_N)
            at_N[at_N == len(hashes_U)] = 0
            match_N = hashes_U[at_N] == hash_N
            if not match_N.all():
                i = int(np.argmin(match_N))
                tell(repairs, rows, np.flatnonzero(~match_N), what, str(ids[i].as_py()))
            take_N = pa.array(order_U[at_N], mask=~match_N)
            added = {made: columns[name].take(take_N) for made, name in sources.items()}
            yield rows.of({n: added[n] if n in added else rows.batch.column(n) for n in wanted})

    def notes(self) -> list[str]:
        """See `Step`."""
        return self.side.notes()

    def _read(self, wanted: Types) -> tuple[pa.Array, dict[str, pa.Array]]:
        """Returns the side table's keys and columns."""
        key, kind = self._key, self.side.types[self._key]
        types = {key: pa.string() if pa.types.is_integer(kind) else kind} | wanted  # "007" is not "7"
        batches = list(self.side.batches(types))
        if not batches:
            raise UserError(f"{self.side.name}: no rows; give a side table with at least one")
        table = pa.Table.from_batches(batches)
        arrays = {name: table[name].combine_chunks() for name in table.column_names}
        return arrays[key], {name: arrays[name] for name in wanted}

    def _index(self, keys: pa.Array, *, as_numbers: bool) -> tuple[Int64s, Int64s]:
        """Returns the hashes of the keys in order, and where each key stands.

        as_numbers: the log's keys are numbers; so text of numbers means those.

        Raises:
            UserError: for a key that is there twice.
        """
        if as_numbers and is_text(keys.type):
            with contextlib.suppress(pa.ArrowInvalid):  # names, which match no number
                keys = keys.cast(pa.int64())
        hash_U = hash_ids(as_ids(keys, self._key, lambda i: i))
        order_U = np.argsort(hash_U, kind="stable")
        order_U = order_U[int((hash_U == 0).sum()) :]  # missing keys, whose hash is 0, match nothing
        hashes_U = hash_U[order_U]
        if not len(order_U):
            raise UserError(f"{self.side.name}: no row has a key {self._key!r}; join by another column")
        twice = np.flatnonzero(hashes_U[1:] == hashes_U[:-1])
        if len(twice):
            row = int(order_U[twice + 1].min())
            words = f"{keys[row].as_py()!r} is there twice; leave one of the rows out, or join by another column"
            raise self.side.located(UserError(f"key {self._key!r}, row {row}: {words}"), 0)
        return hashes_U, order_U

"""Side tables: the columns of an items' or users' table beside each row of a log, found by a
key.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.data.shaping.repair import Repairs, shorten
from sparrow.data.shaping.steps import Rows, Shaped, Types, count_event
from sparrow.features.hashing import hash_ids
from sparrow.features.ids import as_ids, is_text
from sparrow.features.schema import Join
from sparrow.features.types import is_unnamed

_SHOWN = 3  # keys of each side in an error
_ENDINGS = r"(?i)(\.(csv|tsv|tab|txt|dat|parquet|pq|gz|zst|bz2|lz4|xz|zip))+$"


def shape(log: Shaped, is_earlier: bool) -> Shaped:
    """See `steps.KINDS`."""
    joins = list(log.source.joins or ())
    for i, join in enumerate(joins):
        side = log.side(join.file)
        joins[i] = join if is_earlier else with_columns(join, side, log.types)
        joined = Joined(join=joins[i], side=side, held=log.types, with_words=log.source.has_words)
        log = log.then(joined, source=replace(log.source, joins=tuple(joins)))
    return log


def with_columns(join: Join, side: Shaped, held: Types) -> Join:
    """Returns a join that names the side table's columns, see `Join.columns`. held: the log's."""
    if join.columns is not None:
        return join
    columns = {}
    for name in side.types:
        if name != (join.key or join.on) and not is_unnamed(name):
            stem = f"{_stem(join.file)}." if name in held else ""
            prefix = stem if join.prefix is None else join.prefix
            columns[name] = f"{prefix}{name}"
    return replace(join, prefix=None, columns=columns)


def _stem(file: str) -> str:
    """Returns a file's own name without folders, patterns and endings: users of
    s3://logs/users/*.parquet.
    """
    for part in reversed(re.split(r"[/\\]", file)):
        stem = re.sub(_ENDINGS, "", re.split(r"[*?\[]", part)[0])
        if stem := re.sub(r"[^\w-]+", "_", stem).strip("_-"):
            return stem
    return "side"


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The step (see `Step`) that adds a side table's columns. A row without a match gets missing
    values.

    Keys are compared as ids are everywhere: the number 12 and the text "12" are one. The columns
    that are wanted of the side table are held in memory while rows are read. held: the columns
    before. with_words: whether keys may be words, see `sparrow.features.cells`.
    """

    join: Join
    side: Shaped
    held: Types
    with_words: bool = False

    def __post_init__(self) -> None:
        on = self.join.on
        key = self.key
        name = self.side.name
        if on not in self.held:
            raise UserError(f"join {name}: the log has no column {on!r}{suggest(on, self.held)}")
        if key not in self.side.types:
            remedy = f"or write on {on}=ITS_COLUMN; a side table needs a header"
            raise UserError(
                f"{name}: no column {key!r} to join by{suggest(key, self.side.types)}; {remedy}"
            )
        for kind in (self.held[on], self.side.types[key]):
            if pa.types.is_nested(kind):
                raise UserError(
                    f"join {name}: on {on!r}, which is {kind}; join by a column with one id in"
                    " each row"
                )
        self._check_columns()

    def _check_columns(self) -> None:
        """Check how the added columns are called."""
        join = self.join
        name = self.side.name
        if join.prefix is not None and join.columns is not None:
            reason = f"prefix {join.prefix!r} beside columns, which names each column"
            raise UserError(f"join {name}: {reason}; leave one of them out")
        names = list((join.columns or {}).values())
        for column in self.sources:
            if names.count(column) > 1:
                raise UserError(
                    f"{name}: two columns would be called {column!r}; name them apart in columns"
                )
            if column in self.held:
                remedy = (
                    'rename one, or set a prefix: --prefix, or joins = [{ ..., prefix = "item_" }]'
                    " in a schema"
                )
                raise UserError(f"{name}: column {column!r} is in the log too; {remedy}")

    @property
    def key(self) -> str:
        """The side table's column of keys."""
        return self.join.key or self.join.on

    @property
    def sources(self) -> dict[str, str]:
        """Added column -> the side table's. A join of before, which names none, adds all."""
        if self.join.columns is None:
            return {
                f"{self.join.prefix or ''}{name}": name
                for name in self.side.types
                if name != self.key
            }
        return {
            column: name for name, column in self.join.columns.items() if name in self.side.types
        }

    @property
    def unmatched(self) -> str:
        """What happens to rows without a match, see `Repairs.events`."""
        return (
            f"without a match for {self.join.on} in {self.side.name}, whose columns are missing"
            " there"
        )

    def types(self) -> Types:
        """See `Step`."""
        return self.held | {joined: self.side.types[name] for joined, name in self.sources.items()}

    def needs(self, wanted: Types) -> Types:
        """See `Step`."""
        held = {name: kind for name, kind in wanted.items() if name in self.held}
        if len(held) == len(wanted):
            return held
        on = self.held[self.join.on]
        return {self.join.on: pa.string() if pa.types.is_integer(on) else on} | held

    def apply(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        sources = {joined: name for joined, name in self.sources.items() if joined in wanted}
        if not sources:
            yield from stream
            return
        on = self.join.on
        index = None
        keys, columns = self._read({name: wanted[joined] for joined, name in sources.items()})
        for rows in stream:
            ids = rows.batch.column(on)
            if index is None:
                index = self._index(keys, as_numbers=not is_text(ids.type))
            try:
                hash_N = hash_ids(as_ids(ids, on, rows.row, self._present))
            except UserError as error:  # it names the row
                raise UserError(f"{rows.file}: {error}") from None
            hashes_U, order_U = index
            at_N = np.searchsorted(hashes_U, hash_N)
            at_N[at_N == len(hashes_U)] = 0
            match_N = hashes_U[at_N] == hash_N
            if not match_N.all():
                i = int(np.argmin(match_N))
                count_event(
                    repairs, rows, np.flatnonzero(~match_N), self.unmatched, str(ids[i].as_py())
                )
            take_N = pa.array(order_U[at_N], mask=~match_N)
            added = {joined: columns[name].take(take_N) for joined, name in sources.items()}
            wanted_columns = {n: added[n] if n in added else rows.batch.column(n) for n in wanted}
            yield rows.with_columns(wanted_columns)

    def check(self, logs: Sequence[Shaped]) -> None:
        """Refuse a side table of which no row of the logs has a key. It reads until one was
        matched.
        """
        if not self.sources:
            return
        on = self.join.on
        rows = 0
        keys = dict[str, None]()
        for log in logs:
            counting = log.anew()  # what `log` has counted stays
            for batch in counting.batches(
                {name: pa.string() for name in (on, next(iter(self.sources)))}
            ):
                if self._count_unmatched(counting.repairs) < counting.repairs.rows_made:
                    return
                if len(keys) < _SHOWN:
                    keys |= dict.fromkeys(_first(batch.column(on), self.held[on]))
            rows += counting.repairs.rows_made
        if rows:
            raise _no_match(logs[0], self, rows, list(keys)[:_SHOWN])

    def _count_unmatched(self, repairs: Repairs) -> int:
        tallies = repairs.events.items()
        return sum(tally.count for (_, event), tally in tallies if event == self.unmatched)

    def notes(self) -> list[str]:
        """See `Step`."""
        notes = self.side.notes()
        added = self.sources
        for name in self.side.types:
            if is_unnamed(name) and name not in (self.key, *added.values()):
                reason = (
                    "has no name, as an index that pandas wrote, and is not joined; name it to have"
                    " it joined"
                )
                notes.append(f"{self.side.name}: column {name!r} {reason}")
        for column, name in added.items():
            if column != name and name in self.held:
                notes.append(
                    f"{self.side.name}: column {name!r} is called {column!r}, as another one has"
                    " its name"
                )
        return notes

    @property
    def _present(self) -> tuple[str, ...] | None:
        return () if self.with_words else None

    def _read(self, wanted: Types) -> tuple[pa.Array, dict[str, pa.Array]]:
        """Returns the side table's keys and columns."""
        key = self.key
        kind = self.side.types[self.key]
        # "007" is not "7"
        types = {key: pa.string() if pa.types.is_integer(kind) else kind} | wanted
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
        hash_U = hash_ids(as_ids(keys, self.key, lambda i: i, self._present))
        order_U = np.argsort(hash_U, kind="stable")
        # missing keys, whose hash is 0, match nothing
        order_U = order_U[int((hash_U == 0).sum()) :]
        hashes_U = hash_U[order_U]
        if not len(order_U):
            raise UserError(
                f"{self.side.name}: no row has a key {self.key!r}; join by another column"
            )
        twice = np.flatnonzero(hashes_U[1:] == hashes_U[:-1])
        if len(twice):
            row = int(order_U[twice + 1].min())
            words = (
                f"{keys[row].as_py()!r} is there twice; leave one of the rows out, or join by"
                " another column"
            )
            raise self.side.located(UserError(f"key {self.key!r}, row {row}: {words}"), 0)
        return hashes_U, order_U


def _first(keys: pa.Array, kind: pa.DataType) -> list[str]:
    """Returns the first distinct keys as an error quotes them. kind: what they are, which may be
    read as text.
    """
    texts = [str(key) for key in pc.unique(keys.drop_null())[:_SHOWN].to_pylist()]
    return [shorten(text) for text in texts] if is_text(kind) else texts


def _no_match(log: Shaped, join: Joined, rows: int, keys: list[str]) -> UserError:
    """Returns the error that names both sides' keys."""
    on = join.join.on
    key = join.key
    side = join.side
    log_kind = join.held[on]
    side_kind = side.types[key]
    first = next(iter(side.batches({key: pa.string()}))).column(key)
    log_keys = f"{on!r} ({log_kind}) is {', '.join(keys) or 'missing'} in the log"
    side_keys = f"{key!r} ({side_kind}) is {', '.join(_first(first, side_kind))} there"
    remedy = f"join by another column (--on {on}=ITS_COLUMN)"
    differ = is_text(log_kind) != is_text(side_kind)
    alike = "both as text or both as numbers" if differ else "both alike"
    return UserError(
        f"{side.name}: no match for any of the {rows:,} rows of {log.name}: {log_keys},"
        f" {side_keys}; write {alike}, or {remedy}"
    )

"""Logs of impressions with a list of candidates in each row: a row of each candidate, as models are fed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools, Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.data.shaping.repair import REPAIR, Repairs, converted, shorten
from sparrow.data.shaping.steps import Rows, Types, tell
from sparrow.data.shaping.structs import is_list, plain
from sparrow.features.ids import as_ids, flat_lists, is_text
from sparrow.features.schema import Source

CLICKED, REQUEST = "clicked", "request"  # the columns that are made: the label, and which row candidates come from
SAMPLE_ROWS = 1000
PIECE_ROWS, PIECE_BYTES = 1 << 16, 1 << 23  # that are made at a time, if rows are even

_FILE_ROWS_BITS = 40  # of a request's number; the bits above tell the file
_SHOWN = {"inview", "impressions", "candidates", "shown", "displayed", "slate"}
_CLICKS = {"clicked", "clicks"}
_MARKED = r"^\s*\S+-[01](\s+\S+-[01])*\s*$"


class _Fault(NamedTuple):
    """Rows [F] of a batch that cannot be used. what: is wrong. first: how, in the first of them; value: that it has."""

    rows_F: Int64s
    what: str
    first: str
    value: str


class _Opened(NamedTuple):
    """The lists of N rows. columns: those that are made of lists, [M] values; offsets: [N + 1], where a row's begin."""

    columns: dict[str, pa.Array]
    offsets: Int64s
    faults: list[_Fault]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The step (see `Step`) that makes a row of each candidate. Whatever else a row has, all its candidates get.

    source: settled, see `settled`. held: the columns before.
    """

    source: Source
    held: Types

    def __post_init__(self) -> None:
        source = self.source
        for key, name in self._named:
            if name not in self.held:
                raise UserError(f"source.{key}: no column {name!r}{suggest(name, self.held)}")
        for key, name in (*self._named, *([("clicked", source.clicked)] if source.clicked in self.held else [])):
            kind = self.held[name]
            if not (is_list(kind) or is_text(kind) or source.format != "parquet"):
                remedy = "name one of lists, or leave candidates out if each row is a candidate already"
                raise UserError(f"source.{key}: column {name!r} is {kind}, which is no list; {remedy}")
        if CLICKED in self.held and source.clicked != CLICKED:
            raise UserError(f"source.candidates: the label becomes column {CLICKED!r}, which is taken; rename that one")

    @property
    def _named(self) -> list[tuple[str, str]]:
        """Setting and column of the lists that must be there."""
        return [("candidates", str(self.source.candidates)), *(("parallel", n) for n in self.source.parallel or ())]

    @property
    def _mark(self) -> str | None:
        """What stands between a candidate's id and its click, if text says it so."""
        clicked = str(self.source.clicked)
        return None if clicked in self.held or re.search(r"\w", clicked) else clicked

    def types(self) -> Types:
        """See `Step`."""
        lists = [name for _, name in self._named]
        made = {n: self._element(kind) if n in lists else kind for n, kind in self.held.items()}
        if self._mark or self.source.clicked in self.held:
            made.pop(str(self.source.clicked), None)
            made[CLICKED] = pa.int8()
        return made if REQUEST in made else made | {REQUEST: pa.int64()}

    def needs(self, wanted: Types) -> Types:
        """See `Step`. To leave rows out in each pass alike, repairing looks at all lists."""
        source, repair = self.source, self.source.bad_rows == "repair"
        lists = [str(source.candidates), *(n for n in source.parallel or () if repair or n in wanted)]
        if source.clicked in self.held and (repair or CLICKED in wanted):
            lists.append(str(source.clicked))
        others = {n: kind for n, kind in wanted.items() if n in self.held and n not in lists}
        return {n: self.held[n] if is_list(self.held[n]) else pa.string() for n in lists} | others

    def made(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        for rows in stream:
            try:
                opened = self._opened(rows, CLICKED in wanted)
            except UserError as error:  # it names the row
                raise UserError(f"{rows.file}: {error}") from None
            if opened.faults:
                rows = self._without(rows, opened.faults, repairs)
                opened = self._opened(rows, CLICKED in wanted)
            empty = np.flatnonzero(np.diff(opened.offsets) == 0)
            if len(empty):
                text = str(rows.batch.column(str(self.source.candidates))[int(empty[0])].as_py())
                tell(repairs, rows, empty, "without candidates, which make no rows", text)
            if self.source.bad_rows == "repair":
                _convert(opened, rows, wanted, repairs)
            yield from self._pieces(rows, opened, wanted)

    def notes(self) -> list[str]:
        """See `Step`."""
        return []

    def _element(self, kind: pa.DataType) -> pa.DataType:
        return plain(kind.value_type) if is_list(kind) else pa.string()

    def _opened(self, rows: Rows, labelled: bool) -> _Opened:
        """Opens the lists, and finds what is wrong with them. labelled: clicks are asked for."""
        candidates, names = str(self.source.candidates), rows.batch.schema.names
        ids, offsets = self._flat(rows, candidates)
        lengths_N, columns, faults = np.diff(offsets), {candidates: ids}, list[_Fault]()
        for name in self.source.parallel or ():
            if name in names:
                columns[name], theirs = self._flat(rows, name)
                unlike = np.flatnonzero(np.diff(theirs) != lengths_N)
                if len(unlike):
                    counts = [int(x[unlike[0]]) for x in (lengths_N, np.diff(theirs))]
                    words = f"{counts[0]} values in {candidates!r} and {counts[1]} in {name!r}"
                    value = f"{counts[0]} and {counts[1]}"
                    faults.append(_Fault(unlike, "lists of different lengths", words, value))
        row_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
        if self._mark:
            columns[candidates], columns[CLICKED], bad_M = _unmarked(ids, self._mark)
            if bad_M.any() and (labelled or self.source.bad_rows == "repair"):
                first = int(np.argmax(bad_M))
                value, ends = str(ids[first].as_py()), f"neither {self._mark}0 nor {self._mark}1"
                words = f"{shorten(value)} in {candidates!r} ends in {ends}"
                faults.append(_Fault(np.unique(row_M[bad_M]), "a candidate that says no click", words, value))
        elif self.source.clicked in names:
            clicked = str(self.source.clicked)
            clicks, theirs = self._flat(rows, clicked)
            row_K = np.repeat(np.arange(len(lengths_N)), np.diff(theirs))
            click_M, stray_K = self._among(rows, (ids, row_M), (clicks, row_K))
            columns[CLICKED] = pa.array(click_M.astype(np.int8))
            if stray_K.any():
                first = int(np.argmax(stray_K))
                value, count = str(clicks[first].as_py()), int(lengths_N[row_K[first]])
                words = f"{shorten(value)} in {clicked!r} is not among the {count} of {candidates!r}"
                faults.append(_Fault(np.unique(row_K[stray_K]), "a clicked id that is no candidate", words, value))
        return _Opened(columns, offsets, faults)

    def _flat(self, rows: Rows, name: str) -> tuple[pa.Array, Int64s]:
        """Returns a column's elements [M], and offsets [N + 1]."""
        column, separator = rows.batch.column(name), self.source.separator
        if not (is_list(column.type) or is_text(column.type)):  # text in which the log's beginning has single numbers
            column = column.cast(pa.string())
        return flat_lists(column, name, rows.row, None if separator == " " else separator)

    def _among(self, rows: Rows, ids: tuple[pa.Array, Int64s], clicks: tuple[pa.Array, Int64s]) -> tuple[Bools, Bools]:
        """Returns which candidates [M] were clicked, and which clicks [K] are no candidates of their row.

        Args:
            rows: where they are from.
            ids: the candidates, and the row of each.
            clicks: the clicked ones, and the row of each.
        """
        name = str(self.source.candidates)
        both = [
            as_ids(ids[0], name, lambda i: rows.row(int(ids[1][i]))),
            as_ids(clicks[0], str(self.source.clicked), lambda i: rows.row(int(clicks[1][i]))),
        ]
        if any(is_text(x.type) for x in both):
            both = [(x if is_text(x.type) else x.cast(pa.string())).cast(pa.large_binary()) for x in both]
        coded = pa.concat_arrays(both).dictionary_encode()
        code = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        key = np.where(code < 0, -1, np.concatenate([ids[1], clicks[1]]) * len(coded.dictionary) + code)
        key_M, key_K = key[: len(ids[0])], key[len(ids[0]) :]
        return np.isin(key_M, key_K) & (key_M >= 0), ~np.isin(key_K, key_M) & (key_K >= 0)

    def _without(self, rows: Rows, faults: Sequence[_Fault], repairs: Repairs) -> Rows:
        """Returns the rows without the faulty ones, counted, or refuses them."""
        if self.source.bad_rows == "stop":
            fault = min(faults, key=lambda fault: fault.rows_F[0])
            place = rows.place(int(rows.row_N[fault.rows_F[0]]))
            raise UserError(f"{rows.file}, {place}: {fault.first}; mend it, {REPAIR}, which leaves such rows out")
        keep_N = np.ones(len(rows.row_N), bool)
        for fault in faults:
            tell(repairs, rows, fault.rows_F[keep_N[fault.rows_F]], f"left out ({fault.what})", fault.value)
            keep_N[fault.rows_F] = False
        return rows.where(keep_N)

    def _pieces(self, rows: Rows, opened: _Opened, wanted: Types) -> Iterator[Rows]:
        """Yields the made rows. A request is in one piece."""
        offsets, types, count = opened.offsets, self.types(), len(rows.row_N)
        made = int(offsets[-1])
        size = rows.batch.nbytes * made // max(count, 1)
        pieces = max(-(-made // PIECE_ROWS), min(-(-size // PIECE_BYTES), count), 1)
        inner = np.searchsorted(offsets, made * np.arange(1, pieces) // pieces)
        for low, high in itertools.pairwise([0, *np.unique(inner).tolist(), count]):
            first, last = int(offsets[low]), int(offsets[high])
            if first == last:
                continue
            of_P = np.repeat(np.arange(low, high), np.diff(offsets[low : high + 1]))
            columns = {}
            for name in wanted:
                if name in opened.columns:
                    columns[name] = opened.columns[name].slice(first, last - first).cast(types[name])
                elif name == REQUEST and REQUEST not in self.held:
                    columns[name] = pa.array((rows.number << _FILE_ROWS_BITS) + rows.row_N[of_P])
                else:
                    columns[name] = rows.batch.column(name).take(pa.array(of_P))
            yield replace(rows.of(columns), row_N=rows.row_N[of_P])


def settled(source: Source, held: Types, sample: pa.Table) -> Source:
    """Returns a source with candidates, and with what it does not say found out in a sample: separator, parallel lists.

    Lists are parallel if they are as long as the candidates' in all rows, and these differ in length.

    Raises:
        UserError: for text in which no row has two candidates.
    """
    names = [n for n in (source.candidates, source.clicked) if n in held]
    if source.separator is None and (texts := [n for n in names if not is_list(held[n])]):
        source = replace(source, separator=_separator(sample[texts[0]]))
    step = Candidates(source=replace(source, parallel=source.parallel or ()), held=held)
    rows = _rows(sample)
    lengths_N = np.diff(step._opened(rows, False).offsets)
    if not is_list(held[str(source.candidates)]) and len(lengths_N) and lengths_N.max() < 2:
        remedy = "name a column of lists, or say what cuts them: separator in [source] of a schema"
        raise UserError(f"source.candidates: no row's {source.candidates!r} is a list of two or more; {remedy}")
    if source.parallel is None:
        others = [n for n, kind in held.items() if is_list(kind) and n not in names]
        alike = [n for n in others if np.array_equal(np.diff(step._flat(rows, n)[1]), lengths_N)]
        source = replace(source, parallel=tuple(alike) if len(np.unique(lengths_N)) > 1 else ())
    return source


def found(source: Source, held: Types, sample: pa.Table) -> Source:
    """Returns the source with the lists of candidates that a sample plainly has, or as it is.

    They are a list column named like one beside another one named like clicks, whose ids are among them in nine of ten
    rows; or text such as "N1-1 N2-0", as MIND has it.
    """
    lists = [name for name, kind in held.items() if is_list(kind) or is_text(kind)]
    single = [name for name, kind in held.items() if pa.types.is_integer(kind) and source.format != "parquet"]  # ids
    named = {name: set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())) for name in held}
    pairs = [(a, b) for a in lists for b in lists + single if a != b and named[a] & _SHOWN and named[b] & _CLICKS]
    pairs += [(name, "-") for name in lists if is_text(held[name]) and _is_marked(sample[name])]
    for candidates, clicked in pairs:
        try:
            told = settled(replace(source, candidates=candidates, clicked=clicked), held, sample)
            opened = Candidates(source=told, held=held)._opened(_rows(sample), True)
        except UserError:
            continue
        clicks = pc.sum(opened.columns[CLICKED]).as_py() or 0
        strays = sum(len(fault.rows_F) for fault in opened.faults)  # few of them are told when the log is prepared
        if 10 * strays < len(opened.offsets) and 0 < clicks < len(opened.columns[CLICKED]):
            return told
    return source


def _is_marked(column: pa.ChunkedArray) -> bool:
    texts = column.drop_null()
    return len(texts) > 0 and pc.all(pc.match_substring_regex(texts, _MARKED)).as_py()


def _unmarked(ids: pa.Array, mark: str) -> tuple[pa.Array, pa.Array, Bools]:
    """Returns the ids [M] of texts, their clicks int8 [M], and where there is none."""
    if not is_text(ids.type):
        ids = ids.cast(pa.string())
    parts = pc.extract_regex(ids, rf"(?s)^(?P<id>.*){re.escape(mark)}(?P<click>[01])$")
    clicks = pc.struct_field(parts, 1).cast(pa.int8())
    bare = pc.if_else(parts.is_valid(), pc.struct_field(parts, 0), ids)
    return bare, clicks, parts.is_null().to_numpy(zero_copy_only=False)


def _separator(texts: pa.ChunkedArray) -> str:
    """Returns what cuts lists that are text: "json", a sign, or " " for white space."""
    texts = texts.drop_null().cast(pa.string())
    if len(texts) and pc.all(pc.match_substring_regex(texts, r"^\s*\[")).as_py():
        return "json"
    return next((sign for sign in "|;,^" if pc.any(pc.match_substring(texts, sign)).as_py()), " ")


def _convert(opened: _Opened, rows: Rows, wanted: Types, repairs: Repairs) -> None:
    """Takes texts for missing that are not of their column's kind, and counts them."""
    row_M = np.repeat(np.arange(len(rows.row_N)), np.diff(opened.offsets))
    for name, values in opened.columns.items():
        if is_text(values.type) and name in wanted and not (is_text(wanted[name]) or pa.types.is_nested(wanted[name])):
            opened.columns[name], bad_M = converted(values, wanted[name])
            if bad_M.any():
                text = str(values[int(np.argmax(bad_M))].as_py())
                tell(repairs, rows, row_M[bad_M], f"made without {name!r}, which is not of its kind", text)


def _rows(sample: pa.Table) -> Rows:
    columns = [column.combine_chunks() for column in sample.slice(0, SAMPLE_ROWS).columns]
    batch = pa.RecordBatch.from_arrays(columns, schema=sample.schema)
    return Rows(batch=batch, row_N=np.arange(batch.num_rows), file="the log", number=0, place=lambda row: f"row {row}")

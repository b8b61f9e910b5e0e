"""Logs of impressions with a list of candidates in each row: a row of each candidate, as models are
fed.
"""

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
from sparrow.data.shaping.conversion import converted
from sparrow.data.shaping.repair import REPAIR, Repairs, shorten
from sparrow.data.shaping.steps import CLICKED, REQUEST, Rows, Shaped, Types, count_event
from sparrow.features.cells import without_words
from sparrow.features.ids import as_ids, is_text
from sparrow.features.lists import flat_lists
from sparrow.features.schema import WORDS, Source
from sparrow.features.types import is_list

SAMPLE_ROWS = 1000
PIECE_ROWS, PIECE_BYTES = 1 << 16, 1 << 23  # that are made at a time, if rows are even

_FILE_ROWS_BITS = 40  # of a request's number; the bits above tell the file
_SHOWN = {"inview", "impressions", "candidates", "shown", "displayed", "slate"}
_CLICKS = {"clicked", "clicks"}
_MARKED = r"^\s*\S+-[01](\s+\S+-[01])*\s*$"


class _Fault(NamedTuple):
    """Rows [F] of a batch that cannot be used. what: is wrong. first: how, in the first of them;
    value: that it has.
    """

    rows_F: Int64s
    event: str
    first: str
    value: str


class _Opened(NamedTuple):
    """The lists of N rows. columns: those that are made of lists, [M] values; offsets: [N + 1],
    where a row's begin.
    """

    columns: dict[str, pa.Array]
    offsets: Int64s
    faults: list[_Fault]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The step (see `Step`) that makes a row of each candidate. Whatever else a row has, all its
    candidates get.

    source: completed, see `complete_source`. held: the columns before.
    """

    source: Source
    held: Types

    def __post_init__(self) -> None:
        source = self.source
        for key, name in self._named:
            if name not in self.held:
                raise UserError(f"source.{key}: no column {name!r}{suggest(name, self.held)}")
        for key, name in (
            *self._named,
            *([("clicked", source.clicked)] if source.clicked in self.held else []),
        ):
            kind = self.held[name]
            if not (is_list(kind) or is_text(kind) or source.format != "parquet"):
                remedy = (
                    "name one of lists, or leave candidates out if each row is a candidate already"
                )
                raise UserError(
                    f"source.{key}: column {name!r} is {kind}, which is no list; {remedy}"
                )
        if CLICKED in self.held and source.clicked != CLICKED:
            raise UserError(
                f"source.candidates: the label becomes column {CLICKED!r}, which is taken; rename"
                " that one"
            )

    @property
    def _named(self) -> list[tuple[str, str]]:
        """Setting and column of the lists that must be there."""
        return [
            ("candidates", str(self.source.candidates)),
            *(("parallel", n) for n in self.source.parallel or ()),
        ]

    @property
    def _mark(self) -> str | None:
        """What stands between a candidate's id and its click, if text says it so."""
        clicked = str(self.source.clicked)
        return None if clicked in self.held or re.search(r"\w", clicked) else clicked

    def types(self) -> Types:
        """See `Step`."""
        lists = [name for _, name in self._named]
        types = {n: self._element(kind) if n in lists else kind for n, kind in self.held.items()}
        if self._mark or self.source.clicked in self.held:
            types.pop(str(self.source.clicked), None)
            types[CLICKED] = pa.int8()
        return types if REQUEST in types else types | {REQUEST: pa.int64()}

    def needs(self, wanted: Types) -> Types:
        """See `Step`. To leave rows out in each pass alike, repairing looks at all lists."""
        source = self.source
        repair = source.bad_rows == "repair"
        lists = [str(source.candidates)]
        lists += [n for n in source.parallel or () if repair or n in wanted]
        if source.clicked in self.held and (repair or CLICKED in wanted):
            lists.append(str(source.clicked))
        needed = {n: self.held[n] if is_list(self.held[n]) else pa.string() for n in lists}
        for name, kind in wanted.items():
            if name in self.held and name not in lists:
                needed[name] = kind
        return needed

    def apply(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        for rows in stream:
            try:
                opened = self._open(rows, CLICKED in wanted)
            except UserError as error:  # it names the row
                raise UserError(f"{rows.file}: {error}") from None
            if opened.faults:
                rows = self._without(rows, opened.faults, repairs)
                opened = self._open(rows, CLICKED in wanted)
            empty = np.flatnonzero(np.diff(opened.offsets) == 0)
            if len(empty):
                text = str(rows.batch.column(str(self.source.candidates))[int(empty[0])].as_py())
                count_event(repairs, rows, empty, "without candidates, which make no rows", text)
            if self.source.bad_rows == "repair":
                _convert(opened, rows, wanted, repairs, self.source.has_words)
            yield from self._pieces(rows, opened, wanted)

    def check(self, logs: Sequence[Shaped]) -> None:
        """See `Step`."""

    def notes(self) -> list[str]:
        """See `Step`."""
        return []

    def _element(self, kind: pa.DataType) -> pa.DataType:
        return kind.value_type if is_list(kind) else pa.string()

    def _open(self, rows: Rows, labelled: bool) -> _Opened:
        """Opens the lists, and finds what is wrong with them. labelled: clicks are asked for."""
        candidates = str(self.source.candidates)
        names = rows.batch.schema.names
        ids, offsets = self._flat(rows, candidates)
        lengths_N = np.diff(offsets)
        columns = {candidates: ids}
        faults: list[_Fault] = []
        for name in self.source.parallel or ():
            if name in names:
                columns[name], parallel_offsets = self._flat(rows, name)
                unlike = np.flatnonzero(np.diff(parallel_offsets) != lengths_N)
                if len(unlike):
                    counts = [int(x[unlike[0]]) for x in (lengths_N, np.diff(parallel_offsets))]
                    words = f"{counts[0]} values in {candidates!r} and {counts[1]} in {name!r}"
                    value = f"{counts[0]} and {counts[1]}"
                    faults.append(_Fault(unlike, "lists of different lengths", words, value))
        row_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
        if self._mark:
            columns[candidates], columns[CLICKED], bad_M = _unmarked(ids, self._mark)
            if bad_M.any() and (labelled or self.source.bad_rows == "repair"):
                first = int(np.argmax(bad_M))
                value = str(ids[first].as_py())
                words = (
                    f"{shorten(value)} in {candidates!r} ends in neither {self._mark}0 nor"
                    f" {self._mark}1"
                )
                rows_F = np.unique(row_M[bad_M])
                faults.append(_Fault(rows_F, "a candidate that says no click", words, value))
        elif self.source.clicked in names:
            clicked = str(self.source.clicked)
            clicks, click_offsets = self._flat(rows, clicked)
            row_K = np.repeat(np.arange(len(lengths_N)), np.diff(click_offsets))
            click_M, stray_K = self._among(rows, (ids, row_M), (clicks, row_K))
            columns[CLICKED] = pa.array(click_M.astype(np.int8))
            if stray_K.any():
                first = int(np.argmax(stray_K))
                value = str(clicks[first].as_py())
                count = int(lengths_N[row_K[first]])
                words = (
                    f"{shorten(value)} in {clicked!r} is not among the {count} of {candidates!r}"
                )
                rows_F = np.unique(row_K[stray_K])
                faults.append(_Fault(rows_F, "a clicked id that is no candidate", words, value))
        return _Opened(columns, offsets, faults)

    def _flat(self, rows: Rows, name: str) -> tuple[pa.Array, Int64s]:
        """Returns a column's elements [M], and offsets [N + 1]."""
        column = rows.batch.column(name)
        separator = self.source.separator
        # text in which the log's beginning has single numbers
        if not (is_list(column.type) or is_text(column.type)):
            column = column.cast(pa.string())
        if self.source.has_words and is_text(column.type):
            column = without_words(column)
        return flat_lists(column, name, rows.row, None if separator == " " else separator)

    def _among(
        self, rows: Rows, ids: tuple[pa.Array, Int64s], clicks: tuple[pa.Array, Int64s]
    ) -> tuple[Bools, Bools]:
        """Returns which candidates [M] were clicked, and which clicks [K] are no candidates of
        their row.

        Args:
            rows: where they are from.
            ids: the candidates, and the row of each.
            clicks: the clicked ones, and the row of each.
        """
        present = WORDS if self.source.has_words else None  # its column may keep any
        ids_M, row_M = ids
        clicks_K, row_K = clicks
        lists = [
            as_ids(ids_M, str(self.source.candidates), lambda i: rows.row(int(row_M[i])), present),
            as_ids(clicks_K, str(self.source.clicked), lambda i: rows.row(int(row_K[i])), present),
        ]
        if any(is_text(x.type) for x in lists):
            texts = [x if is_text(x.type) else x.cast(pa.string()) for x in lists]
            lists = [x.cast(pa.large_binary()) for x in texts]
        coded = pa.concat_arrays(lists).dictionary_encode()
        code = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        row = np.concatenate([row_M, row_K])
        key = np.where(code < 0, -1, row * len(coded.dictionary) + code)
        key_M = key[: len(ids_M)]
        key_K = key[len(ids_M) :]
        return np.isin(key_M, key_K) & (key_M >= 0), ~np.isin(key_K, key_M) & (key_K >= 0)

    def _without(self, rows: Rows, faults: Sequence[_Fault], repairs: Repairs) -> Rows:
        """Returns the rows without the faulty ones, counted, or refuses them."""
        if self.source.bad_rows == "stop":
            fault = min(faults, key=lambda fault: fault.rows_F[0])
            place = rows.place(int(rows.row_N[fault.rows_F[0]]))
            raise UserError(
                f"{rows.file}, {place}: {fault.first}; mend it, {REPAIR}, which leaves such"
                " rows out"
            )
        keep_N = np.ones(len(rows.row_N), bool)
        for fault in faults:
            count_event(
                repairs,
                rows,
                fault.rows_F[keep_N[fault.rows_F]],
                f"left out ({fault.event})",
                fault.value,
            )
            keep_N[fault.rows_F] = False
        return rows.where(keep_N)

    def _pieces(self, rows: Rows, opened: _Opened, wanted: Types) -> Iterator[Rows]:
        """Yields the made rows. A request is in one piece."""
        offsets = opened.offsets
        types = self.types()
        count = len(rows.row_N)
        total = int(offsets[-1])
        size = rows.batch.nbytes * total // max(count, 1)
        pieces = max(-(-total // PIECE_ROWS), min(-(-size // PIECE_BYTES), count), 1)
        inner = np.searchsorted(offsets, total * np.arange(1, pieces) // pieces)
        for low, high in itertools.pairwise([0, *np.unique(inner).tolist(), count]):
            first = int(offsets[low])
            last = int(offsets[high])
            if first == last:
                continue
            source_P = np.repeat(np.arange(low, high), np.diff(offsets[low : high + 1]))
            columns = {}
            for name in wanted:
                if name in opened.columns:
                    piece = opened.columns[name].slice(first, last - first)
                    columns[name] = piece.cast(types[name])
                elif name == REQUEST and REQUEST not in self.held:
                    columns[name] = pa.array(
                        (rows.number << _FILE_ROWS_BITS) + rows.row_N[source_P]
                    )
                else:
                    columns[name] = rows.batch.column(name).take(pa.array(source_P))
            yield replace(rows.with_columns(columns), row_N=rows.row_N[source_P])


def shape(log: Shaped, is_earlier: bool) -> Shaped:
    """See `steps.KINDS`."""
    source = log.source
    joins = source.joins or ()
    on_list = any(is_list(log.types.get(join.on, pa.null())) for join in joins)
    is_new = not is_earlier and any(join.columns is None for join in joins)
    # candidates make columns, whose names are taken then
    if source.candidates is None and (on_list or is_new):
        source = find_candidates(source, log.types, log.sample(SAMPLE_ROWS))
    if source.candidates in log.types and (source.parallel is None or source.separator is None):
        source = complete_source(source, log.types, log.sample(SAMPLE_ROWS))
    if not source.candidates:
        return log
    return log.then(Candidates(source=source, held=log.types), source=source, rows=0)


def complete_source(source: Source, held: Types, sample: pa.Table) -> Source:
    """Returns a source with candidates, and with what it does not say found out in a sample:
    separator, parallel lists.

    Lists are parallel if they are as long as the candidates', see `_go_along`.

    Raises:
        UserError: for text in which no row has two candidates.
    """
    names = [n for n in (source.candidates, source.clicked) if n in held]
    if source.separator is None and (texts := [n for n in names if not is_list(held[n])]):
        source = replace(source, separator=_separator(sample[texts[0]]))
    step = Candidates(source=replace(source, parallel=source.parallel or ()), held=held)
    rows = _rows(sample)
    lengths_N = np.diff(step._open(rows, False).offsets)
    if not is_list(held[str(source.candidates)]) and len(lengths_N) and lengths_N.max() < 2:
        remedy = "name a column of lists, or say what cuts them: separator in [source] of a schema"
        raise UserError(
            f"source.candidates: no row's {source.candidates!r} is a list of two or more; {remedy}"
        )
    if source.parallel is None:
        lists = [n for n, kind in held.items() if is_list(kind) and n not in names]
        alike = [n for n in lists if _go_along(np.diff(step._flat(rows, n)[1]), lengths_N)]
        source = replace(source, parallel=tuple(alike))
    return source


def _go_along(lengths_N: Int64s, candidates_N: Int64s) -> bool:
    """Returns whether lists are as long as those of the candidates. A few may not be: they are told
    as faults.

    Lists that are cut at one length agree by chance where that is the most frequent one. So the
    rows that agree at another length must be more than ten times those that differ.
    """
    alike_N = lengths_N == candidates_N
    most = np.bincount(candidates_N).argmax() if len(candidates_N) else 0
    return bool((alike_N & (candidates_N != most)).sum() > 10 * (~alike_N).sum())


def find_candidates(source: Source, held: Types, sample: pa.Table) -> Source:
    """Returns the source with the lists of candidates that a sample plainly has, or as it is.

    They are a list column named like one beside another one named like clicks, whose ids are among
    them in nine of ten rows; or text such as "N1-1 N2-0", as MIND has it.
    """
    lists = [name for name, kind in held.items() if is_list(kind) or is_text(kind)]
    ids = [] if source.format == "parquet" else [n for n in held if pa.types.is_integer(held[n])]
    shown_names = [name for name in lists if _words(name) & _SHOWN]
    clicks_names = [name for name in lists + ids if _words(name) & _CLICKS]
    pairs = [(a, b) for a, b in itertools.product(shown_names, clicks_names) if a != b]
    pairs += [(name, "-") for name in lists if is_text(held[name]) and _is_marked(sample[name])]
    for candidates, clicked in pairs:
        try:
            described = replace(source, candidates=candidates, clicked=clicked)
            completed = complete_source(described, held, sample)
            opened = Candidates(source=completed, held=held)._open(_rows(sample), True)
        except UserError:
            continue
        clicks = pc.sum(opened.columns[CLICKED]).as_py() or 0
        # few of them are told when the log is prepared
        strays = sum(len(fault.rows_F) for fault in opened.faults)
        if 10 * strays < len(opened.offsets) and 0 < clicks < len(opened.columns[CLICKED]):
            return completed
    return source


def _words(name: str) -> set[str]:
    """The lower-case words of a column's name, cut at capitals too."""
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))


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


def _convert(
    opened: _Opened, rows: Rows, wanted: Types, repairs: Repairs, with_words: bool
) -> None:
    """Takes texts for missing that are not of their column's kind, and counts them."""
    row_M = np.repeat(np.arange(len(rows.row_N)), np.diff(opened.offsets))
    for name, values in opened.columns.items():
        if (
            is_text(values.type)
            and name in wanted
            and not (is_text(wanted[name]) or pa.types.is_nested(wanted[name]))
        ):
            opened.columns[name], bad_M = converted(values, wanted[name], with_words=with_words)
            if bad_M.any():
                text = str(values[int(np.argmax(bad_M))].as_py())
                event = f"made without {name!r}, which is not of its kind"
                count_event(repairs, rows, row_M[bad_M], event, text)


def _rows(sample: pa.Table) -> Rows:
    columns = [column.combine_chunks() for column in sample.slice(0, SAMPLE_ROWS).columns]
    batch = pa.RecordBatch.from_arrays(columns, schema=sample.schema)
    return Rows(
        batch=batch,
        row_N=np.arange(batch.num_rows),
        file="the log",
        number=0,
        place=lambda row: f"row {row}",
    )

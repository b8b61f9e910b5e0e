"""Columns of lists: whether text is one and at what it is cut, what its ids are, and which column
weighs them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError
from sparrow.data.meaning.sample import SampledColumn
from sparrow.features.ids import as_ids, is_text
from sparrow.features.lists import as_lists
from sparrow.features.schema import Column
from sparrow.features.types import is_list

_VALUES = 20_000
_TOKEN = 40  # characters; a longer one is prose
_WEIGHTED = r"^[^:]+:\s*-?\d+(\.\d+)?([eE][-+]?\d+)?$"
_WEIGHT_SUFFIXES = ("_weights", "_weight", "_scores", "_score")  # of a column's name


def list_of(values: pa.Array) -> tuple[str | None, str | None] | None:
    """Returns separator and weights of a list column, or None when the texts (none missing) do not
    look like lists.

    Lists have a changing number of short tokens, which come again in other rows and in other
    places. Prose, names, dates, coordinates and prices do not. Words with spaces between them are a
    list only if few words make many values.
    """
    texts = pc.utf8_trim_whitespace(values[:_VALUES].cast(pa.large_string()))
    distinct = texts.unique()
    array = pc.match_substring_regex(distinct, r"(?s)^\[.*\]$")
    if len(distinct) and pc.all(array).as_py():
        try:
            as_lists(distinct, "", int, None, "json")
            return "json", None
        except UserError:
            return None
    for separator in ("|", "^", ";", ",", None):
        share = pc.mean(pc.match_substring(distinct, separator or " ").cast(pa.int8())).as_py()
        weighted = _weighted_list(texts, distinct, separator) if share else None
        if weighted is not None:
            return separator, ":" if weighted else None
    return None


def _weighted_list(texts: pa.Array, distinct: pa.Array, separator: str | None) -> bool | None:
    """Returns whether the ids of lists cut at the separator have weights; None when it gives no
    lists.
    """
    tokens, offsets, _ = as_lists(texts, "", int, None, separator)
    lengths = np.diff(offsets)
    if (
        not len(tokens)
        or (lengths > 1).mean() < 0.05
        or pc.max(pc.utf8_length(tokens)).as_py() > _TOKEN
    ):
        return None
    weighted = bool(pc.all(pc.match_substring_regex(tokens, _WEIGHTED)).as_py())
    if weighted:
        tokens = pc.replace_substring_regex(tokens, r":[^:]*$", "")
    kinds = tokens.unique()
    integers = pc.all(pc.match_substring_regex(kinds, r"^-?\d+$")).as_py()
    if not integers and pc.any(pc.match_substring_regex(kinds, r"^[-+]?\d*\.\d+$")).as_py():
        return None  # numbers with a fraction: coordinates, prices, an embedding
    if separator == "," and integers and _are_numbers(distinct):
        return None
    moves = _moves(tokens, offsets, lengths)
    strong = separator in ("|", "^")
    counts = pc.value_counts(tokens).field("counts").to_numpy(zero_copy_only=False)
    often = counts.mean() >= 2
    rare = (counts == 1).mean()
    codes = integers or pc.all(pc.match_substring_regex(kinds, r"^[A-Za-z]+\d+$")).as_py()
    if weighted or (codes and (moves or strong)) or (strong and (often or moves)):
        return weighted
    few = len(distinct) > len(kinds) and rare <= 0.1 and len(kinds) <= 1000
    return weighted if moves and often and few else None


def _are_numbers(distinct: pa.Array) -> bool:
    """Returns whether the texts are numbers written with commas, such as 1,234,567 and 3,14."""
    grouped = pc.match_substring_regex(distinct, r"^-?\d{1,3}(,\d{3})*$")
    decimal = pc.match_substring_regex(distinct, r"^-?\d+(,\d+)?$")
    return pc.all(grouped).as_py() or pc.all(decimal).as_py()


def _moves(tokens: pa.Array, offsets: Int64s, lengths: Int64s) -> bool:
    """Returns whether lists differ in length or are long, and tokens at their ends also stand
    elsewhere.
    """
    if len(np.unique(lengths[lengths > 0])) < 2 and lengths.max() < 3:
        return False
    many = np.flatnonzero(lengths > 1)
    last = np.zeros(len(tokens), bool)
    last[offsets[1:][many] - 1] = True
    elsewhere = tokens.filter(pa.array(~last)).unique()
    return (
        pc.mean(
            pc.is_in(tokens.filter(pa.array(last)), value_set=elsewhere).cast(pa.int8())
        ).as_py()
        >= 0.3
    )


def list_column(sampled: SampledColumn) -> Column:
    """Returns the feature that a column of lists is."""
    kind = sampled.values.type
    if sampled.declared == "float_seq" or (
        len(sampled.distinct) and not (pa.types.is_integer(kind) or is_text(kind))
    ):
        return Column(kind="ignore", note=f"a list of {kind}; ids are integers or strings")
    if sampled.spelled is None:
        return Column(kind="list", table=sampled.name)
    separator, weights = sampled.spelled
    at = f"cut at {separator!r}" if separator else "cut at white space"
    if separator == "json":
        at = "as JSON"
    note = f"text that looks like a list, {at}; categorical if it is one value"
    note = f"text that looks like a list of id:weight, {at}" if weights else note
    return Column(kind="list", table=sampled.name, separator=separator, weights=weights, note=note)


def pair_weights(columns: dict[str, Column], sampled: dict[str, SampledColumn]) -> None:
    """Takes a list of numbers for the weights of a list of ids, if it is named after it and as long
    in every row.

    If few rows differ, the first of them is told.
    """
    unweighted = [n for n, c in columns.items() if c.kind == "list" and c.weights is None]
    for name in [n for n in unweighted if is_list(sampled[n].type)]:
        for weights_name, candidate in sampled.items():
            suffix = candidate.called.removeprefix(sampled[name].called)
            if not is_list(candidate.type) or suffix not in _WEIGHT_SUFFIXES:
                continue
            if columns[weights_name].kind not in ("ignore", "list", "vector"):
                continue
            ids_N = np.array(pc.list_value_length(sampled[name].bare).fill_null(0))
            weights_N = np.array(pc.list_value_length(candidate.bare).fill_null(0))
            unlike = np.flatnonzero(ids_N != weights_N)
            if not len(unlike):
                note = f"weighted by {weights_name}, by its name"
                columns[name] = replace(columns[name], weights=weights_name, note=note)
                columns[weights_name] = Column(kind="ignore", note=f"the weights of {name}")
            elif 10 * len(unlike) < len(ids_N):
                row = int(unlike[0])
                counts = f"row {row} has {ids_N[row]} ids and {weights_N[row]} weights"
                note = f"by its name the weights of {name}, but {counts}; mend it to have them used"
                columns[weights_name] = replace(columns[weights_name], note=note)


def share_tables(columns: dict[str, Column], sampled: dict[str, SampledColumn]) -> None:
    """Gives a list the table of the column whose ids it repeats: by its values or, where some are
    shared, its name.
    """
    singles = [name for name, c in columns.items() if c.kind == "categorical"]
    for name in [n for n, c in columns.items() if c.kind == "list"]:
        ids = sampled[name].distinct
        best = None
        best_score = 0.0
        for single in singles:
            single_ids = sampled[single].distinct
            if not len(ids) or (
                sampled[name].spelled is None and is_text(ids.type) != is_text(single_ids.type)
            ):
                continue
            hashed = _comparable(ids)
            single_hashed = _comparable(single_ids)
            common = pc.sum(pc.is_in(hashed, value_set=single_hashed)).as_py()
            either = len(hashed) + len(single_hashed) - common
            score = common / either  # Jaccard: dense small integers overlap by accident
            strong = common >= 0.5 * len(ids) and score >= 0.2
            if (strong or (common and single.lower() in name.lower())) and score > best_score:
                best = single
                best_score = score
        if best is not None:
            note = f"shares the table of {best}, whose ids it repeats"
            columns[name] = replace(columns[name], table=columns[best].table, note=note)
        singles.append(name)


def _comparable(ids: pa.Array) -> pa.Array:
    """Returns ids as the bytes that are hashed, so that 12 is the same in text and out of it."""
    ids = as_ids(ids, "", lambda i: i)
    return (ids if is_text(ids.type) else ids.cast(pa.large_string())).cast(pa.large_binary())

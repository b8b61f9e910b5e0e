from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sparrow.features.encodings.vocabulary import Vocabulary
from sparrow.features.hashing import hash_ids
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.skew import Cells, Far, Skew, new_columns
from sparrow.features.transforms import Transforms

WORDS = hash_ids(pa.array(["a", "b"]))
TABLES = {
    "words": Encoding(kind="vocabulary", min_count=2, rows=4, distinct=2),
    "hashes": Encoding(kind="hash", rows=99),
    "buckets": Encoding(kind="range", rows=5, low=1, high=3),
    "hours": Encoding(kind="vocabulary", min_count=2, rows=4, distinct=2),
}
COLUMNS = {
    "label": Column(kind="label"),
    "when": Column(kind="time", source="ts", low=1_772_000_000.0, high=1_773_000_000.0),
    "word": Column(kind="categorical", table="words"),
    "hashed": Column(kind="categorical", table="hashes"),
    "bucket": Column(kind="categorical", table="buckets", quantiles=3, boundaries=(0.0, 1.0)),
    "list": Column(kind="list", table="words"),
    "x": Column(kind="numeric", mean=0.0, std=1.0, low=0.0, high=1.0),
    "x:missing": Column(kind="numeric", source="x", transform="missing"),
    "vector": Column(kind="vector", size=2, transform="none"),
    "hour": Column(kind="categorical", source="ts", part="hour", table="hours"),
    "weekday": Column(kind="categorical", source="ts", part="weekday", table="hours"),
}
TRANSFORMS = Transforms(
    schema=Schema(columns=COLUMNS, encodings=TABLES),
    vocabularies={name: Vocabulary(WORDS, np.ones(2, np.int64)) for name in ("words", "hours")},
)
ROWS = {
    "label": [0, 1, 0, 1],
    "word": ["a", "new", None, "newer"],
    "hashed": ["new", None, None, "newer"],
    "bucket": [0.5, None, 7.0, -7.0],
    "list": pa.array([["a", "new"], [], None, ["b"]], pa.list_(pa.string())),
    "x": [0.5, None, 2.0, None],
    "vector": pa.array([[1.0, 2.0], None, [0.0, 0.0], None], pa.list_(pa.float64())),
    "ts": [datetime(2026, 3, 4), None, datetime(1970, 1, 1, 5), datetime(2262, 1, 1)],
}


def skew_of(rows: pa.Table, training: bool = False, row0: int = 0) -> Skew:
    skew = Skew()
    TRANSFORMS.transform(rows, training=training, row0=row0, skew=skew)
    return skew


def test_each_kind_of_column_is_counted() -> None:
    skew = skew_of(pa.table(ROWS), row0=10)
    assert skew.cells == {
        "word": Cells(4, 1, 3, 2),
        "hashed": Cells(4, 2, 2, 0),  # any id of a hash is known
        "bucket": Cells(4, 1, 3, 0),
        "list": Cells(4, 2, 3, 1),
        "x": Cells(4, 2, 0, 0),
        "vector": Cells(4, 2, 0, 0),
        "hour": Cells(4, 1, 3, 3),
        "weekday": Cells(4, 1, 3, 3),
    }
    assert skew.clipped.counts == {"x": (1, 12, 2.0)}
    assert skew.far == {"ts": Far(2, 12, 5 * 3600)}  # once, though two features are made of it
    notes = list(skew.notes(TRANSFORMS.schema))
    assert [note.partition(":")[0] for note in notes] == [
        "x",
        "ts",
        "ids that their tables do not know",
    ]
    assert (
        notes[2]
        == "ids that their tables do not know: weekday 100.0%, hour 100.0%, word 66.7%, list 33.3%"
    )
    assert list(skew.notes(TRANSFORMS.schema, grown=True)) == notes[:2]


def test_a_log_to_prepare_has_a_time_for_each_row() -> None:
    rows = pa.table(ROWS).filter(pa.array([True, False, True, True]))
    assert skew_of(rows, training=True).far == {"ts": Far(2, 1, 5 * 3600)}


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 1, 3, 4]])
def test_counts_of_pieces_in_any_order_are_those_of_all_rows(
    cuts: list[int], tmp_path: Path
) -> None:
    table, merged = pa.table(ROWS), Skew()
    pieces = [(table.slice(low, high - low), low) for low, high in itertools.pairwise(cuts)]
    for number, (piece, low) in enumerate(reversed(pieces)):
        skew_of(piece, row0=low).save(tmp_path / f"{number}.json")
        merged.merge(Skew.load(tmp_path / f"{number}.json"))
    assert merged == skew_of(table)


def test_columns_that_are_missing_in_all_rows() -> None:
    table = pa.table(ROWS).slice(1, 1)
    (told,) = (
        note for note in skew_of(table).notes(TRANSFORMS.schema) if note.startswith("missing")
    )
    assert told == "missing in all rows: bucket, hashed, hour, list, vector, weekday, ..."
    assert not list(Skew().notes(TRANSFORMS.schema))
    assert not list(skew_of(pa.table(ROWS).slice(0, 0)).notes(TRANSFORMS.schema))


def test_columns_that_a_schema_does_not_name() -> None:
    schema = Schema(columns=COLUMNS | {"not read": Column(kind="ignore")}, encodings=TABLES)
    assert new_columns(schema, [*ROWS, "fresh", "not read", ":score:label", "when"]) == (
        "fresh",
        "when",
    )

"""Ids become known in the order of time, whatever the order of the log, and in each row without
looking at others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow import data
from sparrow.data.preparation import moments
from sparrow.data.preparation.moments import Clock, Request
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.features.transforms import Transforms, typed

NAMED = {kind: Column(kind=kind) for kind in ("time", "group")} | {
    "word": Column(kind="categorical", table="word"),
    "code": Column(kind="categorical", table="code"),
    "list": Column(kind="list", table="code"),
}
ROW = st.tuples(
    st.integers(0, 4),
    st.sampled_from(["g", "h", None]),
    st.sampled_from([None, *"abcdef"]),
    st.one_of(st.none(), st.integers(0, 9)),
    st.lists(st.integers(0, 9), max_size=3),
)


def rows_of(log: list[tuple], first: int = 0) -> pa.Table:
    names = pa.schema(zip(NAMED, ("i8", "str", "str", "i8", pa.list_(pa.int64())), strict=True))
    table = pa.Table.from_pylist(
        [dict(zip(names.names, row, strict=True)) for row in log], schema=names
    )
    number = first + np.arange(len(log))
    return table.append_column("row", pa.array(number * 1.0)).append_column(
        "label", pa.array(number % 2)
    )


def moments_by_definition(log: list[tuple], kinds: frozenset[str]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    start = 0
    for i, (time, group, *_) in enumerate(log):
        last = log[i - 1] if i else None
        joins = last is not None and bool(kinds) and ("time" not in kinds or last[0] == time)
        joins &= "group" not in kinds or (
            group is not None and last is not None and last[1] == group
        )
        start = start if joins else i
        found.append(
            (time if "time" in kinds else 0, start + (i - start) // moments.MOST * moments.MOST)
        )
    return found


def schema_of(kinds: frozenset[str], min_count: int, **split: float) -> Schema:
    columns = {n: c for n, c in NAMED.items() if n in kinds or c.table} | {
        "row": Column(kind="numeric", transform="none"),
        "label": Column(kind="label"),
    }
    tables = {
        "word": Encoding(kind="vocabulary", min_count=min_count),
        "code": Encoding(min_count=min_count),
    }
    return Schema(
        columns=columns, encodings=tables, split=Split(**{"valid": 0, "test": 0, **split})
    )


KINDS = st.frozensets(st.sampled_from(["time", "group"]))


@settings(max_examples=10)
@given(
    st.lists(ROW, min_size=4, max_size=30),
    st.lists(ROW, max_size=12),
    KINDS,
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_an_id_is_known_where_earlier_moments_have_it(
    tmp_path_factory: pytest.TempPathFactory, log, later, kinds, min_count: int, most: int
) -> None:
    """As a vocabulary and as a range, alone and in lists; then grown by a later log, which goes on
    counting.
    """
    log = [*log, (4, None, "a", 0, [])]
    folder = tmp_path_factory.mktemp("log")
    before: Counter = Counter()
    known_before: set = set()
    previous: Path | None = None
    for name, rows in (
        ("one", log),
        ("two", [*later, (2, "g", "b", 3, [1, 1]), (3, "h", "z", 9, [])]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moments, "MOST", most)
            pq.write_table(rows_of(rows), folder / f"{name}.parquet", row_group_size=3)
            given = schema_of(kinds, min_count) if previous is None else Transforms.load(previous)
            made = data.prepare(
                [folder / f"{name}.parquet"], folder / name, schema=given, grow=previous is not None
            )
            at = moments_by_definition(rows, kinds)
        held = [
            [("word", row[2]), ("code", row[3]), *(("code", i) for i in row[4])] for row in rows
        ]
        held = [[item for item in items if item[1] is not None] for items in held]
        all_of = [(item, at[i]) for i, items in enumerate(held) for item in items]

        old = known_before.copy()

        def is_known(item: tuple, i: int, at=at, all_of=all_of, old=old) -> bool:
            return (
                item in old
                or before[item] + sum(x == item and then < at[i] for x, then in all_of)
                >= min_count - 1
            )

        table = pq.read_table(made.out / "train" / "part-00000.parquet").to_pylist()
        assert len(table) == len(rows)
        seen: set = set()
        for row in table:
            i = int(row["row"])
            assert (row["word"] >= 2) == (
                rows[i][2] is not None and is_known(("word", rows[i][2]), i)
            )
            assert (row["word"] == 0) == (rows[i][2] is None)
            assert (row["code"] >= 2) == (
                rows[i][3] is not None and is_known(("code", rows[i][3]), i)
            )
            assert [r >= 2 for r in row["list"]] == [is_known(("code", x), i) for x in rows[i][4]]
            seen.update(item for item in held[i] if is_known(item, i))
        known_before |= seen
        before.update(item for items in held for item in items)
        transforms = Transforms.load(made.out)  # what valid, test and serving see
        asked = [
            (0, None, word, code, [code])
            for word, code in zip("abcdefz-+*", range(10), strict=True)
        ]
        served = transforms.transform(rows_of(asked), training=False).to_pylist()
        low = transforms.schema.encodings["code"].low
        for (_, _, word, code, _), row in zip(asked, served, strict=True):
            assert (row["word"] >= 2) == (("word", word) in known_before), word
            assert row["code"] == (code - low + 2 if ("code", code) in known_before else 1)
            assert row["list"] == [row["code"]]
        again = data.prepare(
            [folder / f"{name}.parquet"], folder / f"{name} again", schema=transforms
        )
        frozen = pq.read_table(again.out / "train" / "part-00000.parquet").to_pylist()
        assert all(
            (row["word"] >= 2) == (("word", rows[int(row["row"])][2]) in known_before)
            for row in frozen
        )
        previous = made.out


@settings(max_examples=30)
@given(
    st.lists(ROW, min_size=1, max_size=40),
    KINDS,
    st.lists(st.integers(0, 40), max_size=4),
    st.integers(1, 5),
)
def test_moments_do_not_depend_on_where_a_log_is_cut(log, kinds, cuts, most: int) -> None:
    """Batches of one clock, and pieces with clocks of their own that know what the piece before
    ended with.
    """
    schema = schema_of(kinds, 2)
    rows = typed(schema, rows_of(log), training=True)
    edges = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "MOST", most)
        want = np.array(moments_by_definition(log, kinds)).T
        one, found, pieces, last = Clock(schema), [], [], Request()
        for low, high in itertools.pairwise(edges):
            piece = rows.slice(low, high - low)
            found.append(one.moments(piece, low))
            clock = Clock(schema, last)
            pieces.append(clock.moments(piece, low))
            last = clock.last
    assert np.array_equal(np.concatenate(found, axis=1), want)
    assert np.array_equal(np.concatenate(pieces, axis=1), want)


def explored(rows: int, seed: int) -> pa.Table:
    """Coin flips; of 20 ids on show, one without a click makes room for a new one: what was clicked
    is shown again.
    """
    random = np.random.default_rng(seed)
    shown, new, items, label = list(range(20)), 20, [], random.integers(0, 2, rows)
    for y in label.tolist():
        place = int(random.integers(len(shown)))
        items.append(f"item {shown[place]}")
        if not y or random.random() < 0.2:
            shown[place], new = new, new + 1
    return pa.table({"label": label, "ts": np.arange(rows), "item": items})


def test_what_is_unknown_says_nothing_of_later_clicks(tmp_path: Path) -> None:
    """Whether an id ever came again tells whether it was clicked; whether it came before does
    not.
    """
    table = explored(20_000, 0)
    pq.write_table(table, tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "out")
    train = pq.read_table(tmp_path / "out" / "train" / "part-00000.parquet")
    label, unknown = train["label"].to_numpy(), train["item"].to_numpy() == 1
    assert 0.2 < unknown.mean() < 0.8
    error = 0.5 / np.sqrt(min(unknown.sum(), (~unknown).sum()))
    assert abs(label[unknown].mean() - label[~unknown].mean()) < 5 * error
    counts = Counter(table["item"].to_pylist()[: len(label)])
    ever = np.array([counts[item] > 1 for item in table["item"].to_pylist()[: len(label)]])
    # what a vocabulary of the whole part would tell
    assert label[ever].mean() - label[~ever].mean() > 50 * error

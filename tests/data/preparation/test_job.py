from __future__ import annotations

import errno
import math
import shutil
import tomllib
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow import data
from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.data.batches import parts
from sparrow.data.logs import read
from sparrow.data.logs.files import File
from sparrow.data.logs.read import open_log
from sparrow.data.meaning.inference import infer_log
from sparrow.data.preparation import job
from sparrow.features.encodings import UNKNOWN
from sparrow.features.hashing import hash_ids
from sparrow.features.schema import Column, Encoding, Schema, Source, Split
from sparrow.features.transforms import Transforms
from sparrow.metrics import evaluate
from tests.data.preparation.coarse import days_of, file_of
from tests.data.preparation.logs import SCHEMA, log_of, part, written


def test_text_and_parquet_give_the_same_ids_and_numbers(tmp_path: Path) -> None:
    raw = log_of(400)
    log = written(tmp_path, raw)
    lines = ["label,n,code,sparse_id,row"]
    lines += [
        f"{y},{n!r},{c},{s},{r!r}"
        for y, n, c, s, r in zip(*(raw[k].tolist() for k in raw), strict=True)
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    prepare([log], tmp_path / "a", schema=SCHEMA)
    prepare([tmp_path / "log.csv"], tmp_path / "b", schema=SCHEMA)
    assert part(tmp_path / "a", "train").equals(part(tmp_path / "b", "train"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": [0] * 200}, r"label 'label': all 200 rows are 0; "),
        ({"label": [1] * 200}, r"label 'label': all 200 rows are 1; "),
        ({"label": [0, 2] * 100}, r"label 'label', row 1: 2; .*columns\.label\.positive"),
        ({"label": [0, None] * 100}, r"label 'label', row 1: missing"),
        (
            {"n": pa.nulls(200, pa.float64())},
            r"columns\.n: missing in all \d+ training rows; make it kind 'ignore'",
        ),
        (
            {"n": ["1"] * 150 + ["a"] * 50},
            r"log\.parquet, row 150: column 'n', row 150: 'a' is no number; mend it, name",
        ),
        ({"n": [0.0] * 150 + [math.inf] * 50}, r"column 'n', row 150: inf is infinite"),
        (
            {"code": [1.5] * 200},
            r"column 'code', row 0: 1.5 .*is not an id; write ids as integers or strings",
        ),
        (
            {"code": [1.0] * 9 + [2.0**54] * 191},
            r"column 'code', row 9: 1.8014398509481984e\+16 .*is not an id",
        ),
    ],
)
def test_what_is_wrong_with_a_log_is_said_and_nothing_is_left(
    tmp_path: Path, change: dict, words: str
) -> None:
    log = written(tmp_path, {**log_of(200), **change})
    with pytest.raises(UserError, match=words) as caught:
        prepare([log], tmp_path / "out", schema=SCHEMA)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_columns_are_explained_once(tmp_path: Path) -> None:
    """A log without a header is told what its columns are called. The next day's, which is like it,
    is told nothing.
    """
    (tmp_path / "log.csv").write_text("".join(f"{i % 2},{i % 9},word{i % 5}\n" for i in range(300)))
    made = prepare([tmp_path / "log.csv"], tmp_path / "out")
    header = "no header was found, so the columns are called c0 to c2; write one to name them"
    assert header in made.notes and any(
        note.startswith("c0: taken for the label") for note in made.notes
    )
    transforms = data.open(tmp_path / "out").transforms
    again = prepare([tmp_path / "log.csv"], tmp_path / "again", schema=transforms)
    assert set(made.notes) - set(again.notes) == {
        header,
        *(n for n in made.notes if n.startswith("c")),
    }


@pytest.mark.parametrize(("part_of", "value"), [("valid", 0), ("test", 1)])
def test_a_label_that_is_constant_in_a_part_is_told(
    tmp_path: Path, part_of: str, value: int
) -> None:
    raw = log_of(200)
    raw["label"][slice(160, 180) if part_of == "valid" else slice(180, 200)] = value
    raw["ts"] = np.arange(200)
    schema = replace(SCHEMA, columns=SCHEMA.columns | {"ts": Column(kind="time")})
    made = prepare([written(tmp_path, raw)], tmp_path / "out", schema=schema)
    told = [note for note in made.notes if "no value there" in note]
    remedy = f"give it more rows (--{part_of}), or divide the log in another way (--split)"
    assert told == [
        f"{part_of}: all 20 rows have label {value}, so AUC and NE have no value there; {remedy}"
    ]


def test_what_is_wrong_with_a_schema_is_said(tmp_path: Path) -> None:
    raw = log_of(200)
    log = written(tmp_path, {k: v for k, v in raw.items() if k != "code"})
    with pytest.raises(
        UserError, match=r"columns\.code: no column 'code' in .*; it has label, n, sparse_id, row"
    ):
        prepare([log], tmp_path / "out", schema=SCHEMA)
    log = written(tmp_path, raw)
    with pytest.raises(UserError, match=r"split\.by: 'time' needs a column of kind time"):
        prepare([log], tmp_path / "out", schema=SCHEMA, split=Split(by="time"))
    with pytest.raises(UserError, match=r"label: the schema's is None"):
        prepare([log], tmp_path / "out", schema=Schema(columns={"n": Column(kind="numeric")}))
    with pytest.raises(UserError, match="no feature to learn from"):
        prepare([log], tmp_path / "out", schema=Schema(columns={"label": Column(kind="label")}))
    tables = {"code": Encoding(kind="range", rows=4), "ids": Encoding()}
    with pytest.raises(
        UserError, match=r"encodings\.code\.rows: 4 for kind 'range', but 10\.\.14 needs 7"
    ):
        prepare([log], tmp_path / "out", schema=Schema(columns=SCHEMA.columns, encodings=tables))
    log = written(tmp_path, {**raw, "g": [7] * 200})
    schema = Schema(
        columns={**SCHEMA.columns, "g": Column(kind="group")}, encodings=SCHEMA.encodings
    )
    with pytest.raises(UserError, match="no row is left for training") as caught:
        for seed in range(20):  # until the one group is drawn for another part
            prepare([log], tmp_path / f"out-{seed}", schema=schema, split=Split(seed=seed))
    assert "ask for none (--valid 0 --test 0)" in str(caught.value)
    assert (
        prepare([log], tmp_path / "all", schema=schema, split=Split(valid=0, test=0)).rows["train"]
        == 200
    )
    with pytest.raises(UserError, match=r"nowhere: no such file"):
        prepare([tmp_path / "nowhere"], tmp_path / "out")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_part_that_has_no_files_has_no_rows(tmp_path: Path, kind: str) -> None:
    logs = [tmp_path / f"{day}.{kind}" for day in (1, 2)]
    for log in logs:
        table = pa.table(log_of(200))
        pq.write_table(table, log) if kind == "parquet" else pacsv.write_csv(table, log)
    made = prepare(
        logs[:1],
        tmp_path / "out",
        schema=SCHEMA,
        split=Split(by="file", valid_files=(str(logs[1]),)),
    )
    assert made.rows == {"train": 200, "valid": 200, "test": 0}


def test_no_file_is_in_two_parts_or_twice_in_one(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        pq.write_table(pa.table(log_of(100 * day)), tmp_path / f"{day}.parquet")
    pattern, last = str(tmp_path / "*.parquet"), str(tmp_path / "3.parquet")
    made = prepare(
        [pattern], tmp_path / "out", schema=SCHEMA, split=Split(by="file", valid_files=(last,))
    )
    assert made.rows == {"train": 300, "valid": 300, "test": 0}
    with pytest.raises(UserError, match=r"3\.parquet: named twice"):
        prepare([pattern, last], tmp_path / "twice", schema=SCHEMA)
    with pytest.raises(UserError, match=r"3\.parquet: named twice"):
        both = Split(by="file", valid_files=(last,), test_files=(last,))
        prepare([pattern], tmp_path / "twice", schema=SCHEMA, split=both)
    with pytest.raises(UserError, match="every file is named for valid or test"):
        prepare(
            [last], tmp_path / "twice", schema=SCHEMA, split=Split(by="file", valid_files=(last,))
        )


def test_row_groups_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GROUP_ROWS", 128)
    told: list[tuple[str, int, int]] = []
    split = Split(valid=0, test=0)
    log = written(tmp_path, log_of(1000))
    shutil.copy(log, tmp_path / "again.parquet")
    logs = [log, tmp_path / "again.parquet"]
    prepare(
        logs, tmp_path / "out", schema=SCHEMA, split=split, progress=lambda *step: told.append(step)
    )
    meta = pq.ParquetFile(tmp_path / "out" / "train" / "part-00000.parquet").metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [128] * 15 + [80]
    assert [step for step in told if step[1] == step[2]] == [
        (what, 2000, 2000) for what in ("read", "fit", "write")
    ]


ROW = st.fixed_dictionaries(
    {
        "label": st.integers(0, 1),
        "n": st.one_of(st.none(), st.integers(-80_000, 80_000).map(lambda i: i / 8)),
        "word": st.one_of(st.none(), st.text("ab", max_size=3)),
        "code": st.one_of(st.none(), st.integers(-3, 3)),
        "tags": st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=4)),
        "user": st.integers(0, 3),
    }
)
TYPES = {
    "label": "i1",
    "n": "f8",
    "word": "str",
    "code": "i2",
    "tags": pa.list_(pa.int32()),
    "user": "i8",
}


@settings(max_examples=25)
@given(st.lists(ROW, min_size=2, max_size=30), st.integers(1, 9))
def test_a_row_is_what_reading_the_docs_makes_of_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], batch_size: int
) -> None:
    rows[0]["label"], rows[1]["label"], rows[0]["n"], rows[0]["code"], rows[0]["tags"] = (
        0,
        1,
        1.0,
        0,
        [1],
    )
    folder = tmp_path_factory.mktemp("log")
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(TYPES)), folder / "log.parquet")
    columns = {
        "label": Column(kind="label"),
        "tags": Column(kind="list", table="tags", max_length=2),
        "n": Column(kind="numeric", transform="log"),
        "word": Column(kind="categorical", table="word"),
        "code": Column(kind="categorical", table="code"),
        "user": Column(kind="group"),
    }
    tables = {name: Encoding(min_count=1) for name in ("tags", "word", "code")}
    schema = Schema(columns=columns, encodings=tables)
    made = prepare(
        [folder / "log.parquet"], folder / "out", schema=schema, split=Split(valid=0, test=0)
    )

    def squashed(x: float | None) -> float:
        return math.nan if x is None else math.copysign(math.log1p(abs(x)), x)

    seen = [squashed(row["n"]) for row in rows if row["n"] is not None]
    mean = sum(seen) / len(seen)
    std = 1.0 if len(set(seen)) == 1 else math.sqrt(sum((x - mean) ** 2 for x in seen) / len(seen))
    codes = [row["code"] for row in rows if row["code"] is not None]
    tags = [[t for t in row["tags"] or [] if t is not None][-2:] for row in rows]
    low = min(t for tag in tags for t in tag)
    words = Counter(row["word"] for row in rows if row["word"])
    ids = {word: hash_ids(pa.array([word]))[0] for word in words}
    places = {None: 0, "": 0} | {
        w: i + 2 for i, w in enumerate(sorted(words, key=lambda w: (-words[w], ids[w])))
    }
    at = 0
    for batch in data.open(folder / "out").loader(batch_size):
        now = rows[at : at + batch.batch_size]
        assert batch.labels_BT is not None
        assert batch.session_B is not None
        assert batch.labels_BT[:, 0].tolist() == [row["label"] for row in now]
        want = [0.0 if row["n"] is None else (squashed(row["n"]) - mean) / std for row in now]
        np.testing.assert_allclose(batch.dense_BC[:, 0].numpy(), want, rtol=1e-4, atol=1e-5)
        assert batch.ids.keys == ("tags", "word", "code")
        assert batch.ids["word"].values_N.tolist() == [places[row["word"]] for row in now]
        want_codes = [0 if row["code"] is None else row["code"] - min(codes) + 2 for row in now]
        assert batch.ids["code"].values_N.tolist() == want_codes
        lists = batch.ids["tags"].values_N.split(batch.ids["tags"].lengths_B.tolist())
        assert [ids.tolist() for ids in lists] == [
            [t - low + 2 for t in tag] for tag in tags[at : at + len(now)]
        ]
        users = [row["user"] for row in now]
        same = batch.session_B[:, None] == batch.session_B[None, :]
        assert same.tolist() == [[a == b for b in users] for a in users]
        at += batch.batch_size
    assert at == len(rows) == made.rows["train"]


def test_rows_without_a_group_are_none(tmp_path: Path) -> None:
    """50 groups in perfect order, and 900 rows without a group in no order: GAUC is 1."""
    rng, groups = np.random.default_rng(0), [*np.repeat(np.arange(50), 4), *[None] * 900]
    label = np.concatenate([np.tile([0, 0, 1, 1], 50), rng.integers(0, 2, 900)])
    score = np.where(np.arange(1100) < 200, label * 0.5 + 0.25, rng.random(1100))
    raw = pa.table({"label": label, "request_id": pa.array(groups, pa.int64()), "score": score})
    columns = {"label": Column(kind="label"), "request_id": Column(kind="group")}
    columns["score"] = Column(kind="numeric", transform="none")
    pq.write_table(raw.take(pa.array(rng.permutation(1100))), tmp_path / "log.parquet")
    whole = Split(by="ratio", valid=0, test=0)
    prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", schema=Schema(columns=columns), split=whole
    )
    found = evaluate(lambda batch: batch.dense_BC[:, 0], data.open(tmp_path / "out").loader(64))
    assert (found["gauc"], found["gauc_groups"]) == (1.0, 50)
    assert found["auc"] < 0.8


def test_ids_of_64_bits_are_exact(tmp_path: Path) -> None:
    """Neighbours that a float would merge, some of them rounded, in a column whose name says
    nothing.
    """
    rng = np.random.default_rng(0)
    pool = rng.integers(1 << 63, (1 << 64) - 1, 40, dtype=np.uint64, endpoint=True)
    pool = np.concatenate([pool, pool - np.uint64(1), np.uint64([(1 << 64) - 1, 5])])
    h = pool[rng.integers(0, len(pool), 2000)]
    raw = pa.table({"label": np.arange(2000) % 2, "h": h})
    pq.write_table(raw, tmp_path / "log.parquet")
    texts = [f"{x:.2e}" if i % 50 == 3 else str(x) for i, x in enumerate(h.tolist())]
    (tmp_path / "log.csv").write_text(
        "label,h\n" + "".join(f"{i % 2},{t}\n" for i, t in enumerate(texts))
    )
    whole = Split(valid=0, test=0, by="ratio")
    by_kind = {
        k: prepare([tmp_path / f"log.{k}"], tmp_path / k, split=whole) for k in ("parquet", "csv")
    }
    assert {made.schema.columns["h"].kind for made in by_kind.values()} == {"categorical"}
    assert any("40 of 2,000 are written like" in note for note in by_kind["csv"].notes)
    fitted = data.open(tmp_path / "parquet").transforms
    rows_N = np.array(fitted.transform(raw, training=False)["h"])
    trained_N = np.array(part(tmp_path / "parquet", "train")["h"])
    assert ((trained_N == rows_N) | (trained_N == UNKNOWN)).all() and (
        trained_N == UNKNOWN
    ).sum() == len({*h.tolist()})
    assert (
        len({*zip(rows_N.tolist(), h.tolist(), strict=True)})
        == len({*rows_N.tolist()})
        == len({*h.tolist()})
        > 60
    )
    full_N = np.array(["e" not in t for t in texts])
    for ids in (h, h.astype(str)):  # as frames hold them
        assert (
            np.array(fitted.transform(pa.table({"h": ids}), training=False)["h"]) == rows_N
        ).all()
    again_N = np.array(
        part(
            prepare([tmp_path / "log.csv"], tmp_path / "again", schema=fitted, split=whole).out,
            "train",
        )["h"]
    )
    assert ((again_N == rows_N) == full_N).all()
    assert set(again_N[~full_N]) == {UNKNOWN}
    # what arrow makes of such text
    with pytest.raises(UserError, match=r"column 'h', row 0: .* is not an id"):
        fitted.transform(pacsv.read_csv(tmp_path / "log.csv"), training=False)


@pytest.mark.parametrize("bad_rows", ["stop", "repair"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_values_that_stand_for_none(
    tmp_path: Path, kind: str, bad_rows: Literal["stop", "repair"]
) -> None:
    n, means = 300, {"?": None, "-999": None, "2.5": 2.5, "7": 7.0, "": None}
    words = [list(means)[i % len(means)] for i in range(n)]
    raw = {
        "label": [0, 1] * (n // 2),
        "n": words,
        "m": [float(i % 7 - 1) for i in range(n)],
        "c": words,
    }
    log = tmp_path / f"log.{kind}"
    pq.write_table(pa.table(raw), log) if kind == "parquet" else pacsv.write_csv(pa.table(raw), log)
    columns = {
        "label": Column(kind="label"),
        "n": Column(kind="numeric", transform="none", missing=("?", "-999")),
        # of numbers, as they are written
        "m": Column(kind="numeric", transform="none", missing=("-1",)),
        "bucket": Column(
            kind="categorical", table="bucket", source="n", quantiles=3, missing=("?", "-999")
        ),
        "c": Column(kind="categorical", table="c", missing=("?",)),
    }
    tables = {"bucket": Encoding(), "c": Encoding(kind="vocabulary", min_count=1)}
    schema = Schema(columns=columns, encodings=tables)
    made = prepare(
        [log],
        tmp_path / "out",
        schema=schema,
        source=Source(bad_rows=bad_rows),
        split=Split(valid=0, test=0),
    )
    rows = part(tmp_path / "out", "train")
    if bad_rows == "stop":
        assert (np.array(rows["n"].to_pylist()) == [means[w] or 0.0 for w in words]).all()
        assert [b == 0 for b in rows["bucket"].to_pylist()] == [means[w] is None for w in words]
        assert not any("taken for missing" in note for note in made.notes)
    assert rows["m"].to_pylist() == [0.0 if m == -1 else m for m in raw["m"]]
    assert [c == 0 for c in rows["c"].to_pylist()] == [w in ("?", "") for w in words]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_row_that_does_not_fit_is_named_with_its_file(tmp_path: Path, kind: str) -> None:
    for day in (1, 2, 3):
        columns = log_of(200) | ({"n": [1.0] * 20 + [math.inf] * 180} if day == 2 else {})
        log = tmp_path / f"{day}.{kind}"
        (
            pq.write_table(pa.table(columns), log)
            if kind == "parquet"
            else pacsv.write_csv(pa.table(columns), log)
        )
    place = "row 20" if kind == "parquet" else "line 22"
    for split in (Split(), Split(by="file", valid_files=(str(tmp_path / f"2.{kind}"),))):
        names = ["1", "2", "3"] if split.by is None else ["1", "3"]
        with pytest.raises(
            UserError, match=rf"2\.{kind}, {place}: column 'n', row \d20: inf is infinite"
        ):
            prepare(
                [tmp_path / f"{name}.{kind}" for name in names],
                tmp_path / "out",
                schema=SCHEMA,
                split=split,
            )


@pytest.fixture
def known(tmp_path: Path) -> Transforms:
    """The transforms of two weeks."""
    prepare([file_of(days_of(3000, 14), tmp_path / "known.parquet")], tmp_path / "known")
    return data.open(tmp_path / "known").transforms


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("grow", [True, False])
def test_a_day_with_one_outcome_is_added_to_what_is_known(
    known: Transforms, tmp_path: Path, value: int, grow: bool
) -> None:
    """It is refused as a log of its own. What is said of its parts does not advise what cannot
    help.
    """
    log = file_of(days_of(500, 1, click=[value] * 500), tmp_path / "log.parquet")
    with pytest.raises(
        UserError, match=f"label 'click': all 500 rows are {value}; a model needs both outcomes"
    ):
        prepare([log], tmp_path / "alone")
    made = prepare([log], tmp_path / "out", schema=known, grow=grow)
    assert sum(made.rows.values()) == 500 and min(made.rows.values()) > 0
    assert set(made.label_means["train"].values()) == {float(value)}
    told = [note for note in made.notes if "have click" in note]
    assert [note.split(":")[0] for note in told] == ["train", "valid", "test"]
    assert "go on with one that knows other rows" in told[0]
    assert all(
        "--split" not in note and "judge by rows with both outcomes" in note for note in told[1:]
    )
    assert np.isfinite(data.open(tmp_path / "out").log_odds()).all()


@pytest.mark.parametrize("like", [True, False])
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_log_without_rows_is_said(
    known: Transforms, tmp_path: Path, like: bool, suffix: str
) -> None:
    table = days_of(10, 1).slice(0, 0)
    log = file_of(table, tmp_path / "log.parquet")
    if suffix == "csv":
        log = tmp_path / "log.csv"
        pacsv.write_csv(table, log)
    with pytest.raises(UserError, match="no rows"):
        prepare([log], tmp_path / "out", schema=known if like else None)
    assert not (tmp_path / "out").exists()


def test_what_differs_from_a_known_log_is_said(known: Transforms, tmp_path: Path) -> None:
    """Once by prepare and again from the folder; a log of the same days has nothing of it."""
    days = days_of(3000, 14, seed=1)
    same = prepare([file_of(days, tmp_path / "same.parquet")], tmp_path / "same", schema=known)
    words = (
        "missing in all rows",
        "ids that their tables",
        "columns that the model",
        "far from training's",
    )
    assert not [note for note in same.notes if note.startswith(words) or "far from" in note]
    new = days_of(
        400,
        1,
        user_id=np.arange(400) + 1000,
        price=pa.nulls(400, pa.float64()),
        ts=[datetime(1970, 1, 21, 12, 20, 10)] * 400,
    )
    log = file_of(new.append_column("fresh", [range(400)]), tmp_path / "new.parquet")
    want = [
        (
            "ts: 400 times far from training's; the first, in row 0, is 1970-01-21 12:20:10, and"
            " training's are 2026-03-02 .. 2026-03-15; 1,000 times larger it would be 2026-03-02"
            " 00:06:40: check its unit"
        ),
        "missing in all rows: price",
        "ids that their tables do not know: user_id 100.0%",
        "columns that the model does not know, and passes over: fresh",
    ]
    made = prepare([log], tmp_path / "new", schema=known)
    assert [note for note in made.notes if note in want] == want
    assert list(data.open(tmp_path / "new").skew().notes(made.schema)) == want
    grown = prepare([log], tmp_path / "grown", schema=known, grow=True)
    assert not any(note.startswith("ids that their tables") for note in grown.notes)
    ends = [
        transforms.schema.columns["ts"]
        for transforms in (known, data.open(tmp_path / "grown").transforms)
    ]
    assert ends[0] == ends[1]  # wrong times do not widen the range by which they are told
    later = days_of(400, 1, ts=[date(2026, 4, 1)] * 400)
    more = prepare(
        [file_of(later, tmp_path / "later.parquet")], tmp_path / "later", schema=known, grow=True
    )
    assert more.schema.columns["ts"].low == ends[0].low
    assert more.schema.columns["ts"].high == datetime(2026, 4, 1, tzinfo=UTC).timestamp()


def test_ids_that_training_cannot_know_are_said(tmp_path: Path) -> None:
    """A small log of one time and without requests is one moment; the remedy that is printed makes
    ids known.
    """
    log = file_of(days_of(400, 1), tmp_path / "log.parquet")
    made = prepare([log], tmp_path / "out")
    reason = "an id is known after its first moment, and rows of one time can be one"
    told = (
        f"all ids of training are unknown in user_id, item_id: {reason}; give their tables"
        " min_count = 1"
    )
    assert told in made.notes
    text = (tmp_path / "out" / "schema.toml").read_text()
    (tmp_path / "schema.toml").write_text(text.replace("min_count = 2", "min_count = 1"))
    mended = prepare([log], tmp_path / "mended", schema=Schema.load(tmp_path / "schema.toml"))
    assert told not in mended.notes
    ids = part(tmp_path / "mended", "train")["user_id"].to_numpy()
    assert (ids != UNKNOWN).all()


def test_the_remedy_for_a_missing_time_works(tmp_path: Path) -> None:
    """Its row is named. Without it as a time, the parts of the times that there are remain."""
    days = days_of(2000, 14)["ts"].to_pylist()
    log = file_of(days_of(2000, 14, ts=[*days[:-1], None]), tmp_path / "log.parquet")
    with pytest.raises(
        UserError, match=r"'ts', row 1999: missing; fill it in, or split by ratio \(--split"
    ):
        prepare([log], tmp_path / "out")
    columns = infer_log(open_log([log])).columns
    columns["ts"] = Column(kind="ignore")
    schema = replace(infer_log(open_log([log])), columns=columns)
    made = prepare([log], tmp_path / "out", schema=schema, split=Split(by="ratio"))
    assert "ts_weekday" in made.schema.sparse


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_words_read_as_missing_are_told_with_what_keeps_them(tmp_path: Path, kind: str) -> None:
    log, n = tmp_path / f"log.{kind}", 300
    countries = [["NA", "DE", "\\N", "US", ""][i % 5] for i in range(n)]
    raw = pa.table(
        {"label": [0, 1] * (n // 2), "country": countries, "n": ["7", "NA", "8.5"] * (n // 3)}
    )
    pq.write_table(raw, log) if kind == "parquet" else pacsv.write_csv(raw, log)
    columns = {
        "label": Column(kind="label"),
        "country": Column(kind="categorical", table="country"),
        "n": Column(kind="numeric"),
    }
    schema = Schema(columns=columns, encodings={"country": Encoding(min_count=1)})
    made = prepare([log], tmp_path / "out", schema=schema, split=Split(valid=0, test=0))
    (note,) = [note for note in made.notes if "read as missing" in note]  # of ids alone
    assert note.startswith(
        "country: 60 times 'NA' and 60 times '\\\\N' are read as missing; to keep such ids set "
    )
    told = tomllib.loads(
        note.partition(" set ")[2].partition(" in columns.country of the schema")[0]
    )
    assert told == {"present": ["NA", "\\N"]} and made.schema.source.cells == 2
    columns["country"] = replace(columns["country"], present=tuple(told["present"]))
    schema = replace(schema, columns=columns)
    made = prepare(
        [log], tmp_path / "out", schema=schema, split=Split(valid=0, test=0), overwrite=True
    )
    assert not any("read as missing" in note for note in made.notes)
    ids = part(tmp_path / "out", "train")["country"].to_pylist()
    assert [i == 0 for i in ids] == [country == "" for country in countries] and len(set(ids)) == 5


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_soon_after_1970_are_the_log_of_themselves(tmp_path: Path, unit: str) -> None:
    """As a made-up log has them: their size would tell another unit, and each time would be far
    from training's.
    """
    table = days_of(600, 14)
    ts = pa.array(np.arange(600) * 300, pa.int64()).cast(pa.timestamp("s")).cast(pa.timestamp(unit))
    log = file_of(
        table.set_column(table.column_names.index("ts"), "ts", ts), tmp_path / "log.parquet"
    )
    prepare([log], tmp_path / "first")
    known = data.open(tmp_path / "first").transforms
    assert (known.schema.columns["ts"].low, known.schema.columns["ts"].high) == (0.0, 599 * 300.0)
    assert not [
        note
        for note in prepare([log], tmp_path / "again", schema=known).notes
        if "far from" in note
    ]


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowMemoryError("malloc of size 64 failed"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_out_of_memory_is_said_and_no_file_is_called_damaged(
    error: Exception, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes: when a file is opened, while it is read, when threads begin."""
    raw = log_of(400)
    path = written(tmp_path, raw)
    if suffix == "csv":
        path = tmp_path / "log.csv"
        pacsv.write_csv(pq.read_table(tmp_path / "log.parquet"), path)
    before = sorted(tmp_path.iterdir())

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    places = {
        "parquet": [
            (pq, "ParquetFile"),
            (pq.ParquetFile, "iter_batches"),
            (job, "ThreadPoolExecutor"),
        ],
        "csv": [(read, "text_batches"), (File, "stream"), (job, "ThreadPoolExecutor")],
    }
    for owner, name in places[suffix]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(
                UserError, match="^prepare: out of memory; .*ulimit -v.*kind = 'hash'"
            ):
                prepare([path], tmp_path / "prepared")
        assert sorted(tmp_path.iterdir()) == before

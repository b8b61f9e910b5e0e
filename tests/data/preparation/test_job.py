from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

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
from sparrow.features.encodings import UNKNOWN
from sparrow.features.hashing import hash_ids
from sparrow.features.schema import Column, Encoding, Schema, Source, Split
from sparrow.metrics import evaluate
from tests.data.preparation.logs import SCHEMA, log_of, part, written


def test_text_and_parquet_give_the_same_ids_and_numbers(tmp_path: Path) -> None:
    raw = log_of(400)
    log = written(tmp_path, raw)
    lines = ["label,n,code,sparse_id,row"]
    lines += [f"{y},{n!r},{c},{s},{r!r}" for y, n, c, s, r in zip(*(raw[k].tolist() for k in raw), strict=True)]
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
        ({"n": pa.nulls(200, pa.float64())}, r"columns\.n: missing in all \d+ training rows; make it kind 'ignore'"),
        (
            {"n": ["1"] * 150 + ["a"] * 50},
            r"log\.parquet, row 150: column 'n', row 150: 'a' is no number; mend it, name",
        ),
        ({"n": [0.0] * 150 + [math.inf] * 50}, r"column 'n', row 150: inf is infinite"),
        ({"code": [1.5] * 200}, r"column 'code', row 0: 1.5 .*is not an id; write ids as integers or strings"),
        ({"code": [1.0] * 9 + [2.0**54] * 191}, r"column 'code', row 9: 1.8014398509481984e\+16 .*is not an id"),
    ],
)
def test_what_is_wrong_with_a_log_is_said_and_nothing_is_left(tmp_path: Path, change: dict, words: str) -> None:
    log = written(tmp_path, {**log_of(200), **change})
    with pytest.raises(UserError, match=words) as caught:
        prepare([log], tmp_path / "out", schema=SCHEMA)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_columns_are_explained_once(tmp_path: Path) -> None:
    """A log without a header is told what its columns are called. The next day's, which is like it, is told nothing."""
    (tmp_path / "log.csv").write_text("".join(f"{i % 2},{i % 9},word{i % 5}\n" for i in range(300)))
    made = prepare([tmp_path / "log.csv"], tmp_path / "out")
    header = "no header was found, so the columns are called c0 to c2; write one to name them"
    assert header in made.notes and any(note.startswith("c0: taken for the label") for note in made.notes)
    transforms = data.open(tmp_path / "out").transforms
    again = prepare([tmp_path / "log.csv"], tmp_path / "again", schema=transforms)
    assert set(made.notes) - set(again.notes) == {header, *(n for n in made.notes if n.startswith("c"))}


@pytest.mark.parametrize(("part_of", "value"), [("valid", 0), ("test", 1)])
def test_a_label_that_is_constant_in_a_part_is_told(tmp_path: Path, part_of: str, value: int) -> None:
    raw = log_of(200)
    raw["label"][slice(160, 180) if part_of == "valid" else slice(180, 200)] = value
    raw["ts"] = np.arange(200)
    schema = replace(SCHEMA, columns=SCHEMA.columns | {"ts": Column(kind="time")})
    made = prepare([written(tmp_path, raw)], tmp_path / "out", schema=schema)
    told = [note for note in made.notes if "no value there" in note]
    remedy = f"give it more rows (--{part_of}), or divide the log in another way (--split)"
    assert told == [f"{part_of}: all 20 rows have label {value}, so AUC and NE have no value there; {remedy}"]


def test_what_is_wrong_with_a_schema_is_said(tmp_path: Path) -> None:
    raw = log_of(200)
    log = written(tmp_path, {k: v for k, v in raw.items() if k != "code"})
    with pytest.raises(UserError, match=r"columns\.code: no column 'code' in .*; it has label, n, sparse_id, row"):
        prepare([log], tmp_path / "out", schema=SCHEMA)
    log = written(tmp_path, raw)
    with pytest.raises(UserError, match=r"split\.by: 'time' needs a column of kind time"):
        prepare([log], tmp_path / "out", schema=SCHEMA, split=Split(by="time"))
    with pytest.raises(UserError, match=r"label: the schema's is None"):
        prepare([log], tmp_path / "out", schema=Schema(columns={"n": Column(kind="numeric")}))
    with pytest.raises(UserError, match="no feature to learn from"):
        prepare([log], tmp_path / "out", schema=Schema(columns={"label": Column(kind="label")}))
    tables = {"code": Encoding(kind="range", rows=4), "ids": Encoding()}
    with pytest.raises(UserError, match=r"encodings\.code\.rows: 4 for kind 'range', but 10\.\.14 needs 7"):
        prepare([log], tmp_path / "out", schema=Schema(columns=SCHEMA.columns, encodings=tables))
    log = written(tmp_path, {**raw, "ts": [7] * 200})
    schema = Schema(columns={**SCHEMA.columns, "ts": Column(kind="time")}, encodings=SCHEMA.encodings)
    with pytest.raises(UserError, match="no row is left for training"):
        prepare([log], tmp_path / "out", schema=schema)
    with pytest.raises(UserError, match=r"nowhere: no such file"):
        prepare([tmp_path / "nowhere"], tmp_path / "out")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_part_that_has_no_files_has_no_rows(tmp_path: Path, kind: str) -> None:
    logs = [tmp_path / f"{day}.{kind}" for day in (1, 2)]
    for log in logs:
        table = pa.table(log_of(200))
        pq.write_table(table, log) if kind == "parquet" else pacsv.write_csv(table, log)
    made = prepare(logs[:1], tmp_path / "out", schema=SCHEMA, split=Split(by="file", valid_files=(str(logs[1]),)))
    assert made.rows == {"train": 200, "valid": 200, "test": 0}


def test_no_file_is_in_two_parts_or_twice_in_one(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        pq.write_table(pa.table(log_of(100 * day)), tmp_path / f"{day}.parquet")
    pattern, last = str(tmp_path / "*.parquet"), str(tmp_path / "3.parquet")
    made = prepare([pattern], tmp_path / "out", schema=SCHEMA, split=Split(by="file", valid_files=(last,)))
    assert made.rows == {"train": 300, "valid": 300, "test": 0}
    with pytest.raises(UserError, match=r"3\.parquet: named twice"):
        prepare([pattern, last], tmp_path / "twice", schema=SCHEMA)
    with pytest.raises(UserError, match=r"3\.parquet: named twice"):
        both = Split(by="file", valid_files=(last,), test_files=(last,))
        prepare([pattern], tmp_path / "twice", schema=SCHEMA, split=both)
    with pytest.raises(UserError, match="every file is named for valid or test"):
        prepare([last], tmp_path / "twice", schema=SCHEMA, split=Split(by="file", valid_files=(last,)))


def test_row_groups_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GROUP_ROWS", 128)
    told: list[tuple[str, int, int]] = []
    split = Split(valid=0, test=0)
    log = written(tmp_path, log_of(1000))
    shutil.copy(log, tmp_path / "again.parquet")
    logs = [log, tmp_path / "again.parquet"]
    prepare(logs, tmp_path / "out", schema=SCHEMA, split=split, progress=lambda *step: told.append(step))
    meta = pq.ParquetFile(tmp_path / "out" / "train" / "part-00000.parquet").metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [128] * 15 + [80]
    assert [step for step in told if step[1] == step[2]] == [(what, 2000, 2000) for what in ("read", "fit", "write")]


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
TYPES = {"label": "i1", "n": "f8", "word": "str", "code": "i2", "tags": pa.list_(pa.int32()), "user": "i8"}


@settings(max_examples=25)
@given(st.lists(ROW, min_size=2, max_size=30), st.integers(1, 9))
def test_a_row_is_what_reading_the_docs_makes_of_it(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], batch_size: int
) -> None:
    rows[0]["label"], rows[1]["label"], rows[0]["n"], rows[0]["code"], rows[0]["tags"] = 0, 1, 1.0, 0, [1]
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
    made = prepare([folder / "log.parquet"], folder / "out", schema=schema, split=Split(valid=0, test=0))

    def squashed(x: float | None) -> float:
        return math.nan if x is None else math.copysign(math.log1p(abs(x)), x)

    seen = [squashed(row["n"]) for row in rows if row["n"] is not None]
    mean = sum(seen) / len(seen)
    std = 1.0 if len(set(seen)) == 1 else math.sqrt(sum((x - mean) ** 2 for x in seen) / len(seen))
    codes = [row["code"] for row in rows if row["code"] is not None]
    tags = [[t for t in row["tags"] or [] if t is not None][-2:] for row in rows]
    low = min(t for tag in tags for t in tag)
    words = Counter(row["word"] for row in rows if row["word"] is not None)
    ids = {word: hash_ids(pa.array([word]))[0] for word in words}
    places = {None: 0} | {w: i + 2 for i, w in enumerate(sorted(words, key=lambda w: (-words[w], ids[w])))}
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
        assert [ids.tolist() for ids in lists] == [[t - low + 2 for t in tag] for tag in tags[at : at + len(now)]]
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
    prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=Schema(columns=columns), split=whole)
    found = evaluate(lambda batch: batch.dense_BC[:, 0], data.open(tmp_path / "out").loader(64))
    assert (found["gauc"], found["gauc_groups"]) == (1.0, 50)
    assert found["auc"] < 0.8


def test_ids_of_64_bits_are_exact(tmp_path: Path) -> None:
    """Neighbours that a float would merge, some of them rounded, in a column whose name says nothing."""
    rng = np.random.default_rng(0)
    pool = rng.integers(1 << 63, (1 << 64) - 1, 40, dtype=np.uint64, endpoint=True)
    pool = np.concatenate([pool, pool - np.uint64(1), np.uint64([(1 << 64) - 1, 5])])
    h = pool[rng.integers(0, len(pool), 2000)]
    raw = pa.table({"label": np.arange(2000) % 2, "h": h})
    pq.write_table(raw, tmp_path / "log.parquet")
    texts = [f"{x:.2e}" if i % 50 == 3 else str(x) for i, x in enumerate(h.tolist())]
    (tmp_path / "log.csv").write_text("label,h\n" + "".join(f"{i % 2},{t}\n" for i, t in enumerate(texts)))
    whole = Split(valid=0, test=0, by="ratio")
    by_kind = {k: prepare([tmp_path / f"log.{k}"], tmp_path / k, split=whole) for k in ("parquet", "csv")}
    assert {made.schema.columns["h"].kind for made in by_kind.values()} == {"categorical"}
    assert any("40 of 2,000 are written like" in note for note in by_kind["csv"].notes)
    fitted = data.open(tmp_path / "parquet").transforms
    rows_N = np.array(fitted.transform(raw, training=False)["h"])
    trained_N = np.array(part(tmp_path / "parquet", "train")["h"])
    assert ((trained_N == rows_N) | (trained_N == UNKNOWN)).all() and (trained_N == UNKNOWN).sum() == len({*h.tolist()})
    assert len({*zip(rows_N.tolist(), h.tolist(), strict=True)}) == len({*rows_N.tolist()}) == len({*h.tolist()}) > 60
    full_N = np.array(["e" not in t for t in texts])
    for ids in (h, h.astype(str)):  # as frames hold them
        assert (np.array(fitted.transform(pa.table({"h": ids}), training=False)["h"]) == rows_N).all()
    again_N = np.array(
        part(prepare([tmp_path / "log.csv"], tmp_path / "again", schema=fitted, split=whole).out, "train")["h"]
    )
    assert ((again_N == rows_N) == full_N).all()
    assert set(again_N[~full_N]) == {UNKNOWN}
    with pytest.raises(UserError, match=r"column 'h', row 0: .* is not an id"):  # what arrow makes of such text
        fitted.transform(pacsv.read_csv(tmp_path / "log.csv"), training=False)


@pytest.mark.parametrize("bad_rows", ["stop", "repair"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_values_that_stand_for_none(tmp_path: Path, kind: str, bad_rows: Literal["stop", "repair"]) -> None:
    n, means = 300, {"?": None, "-999": None, "2.5": 2.5, "7": 7.0, "": None}
    words = [list(means)[i % len(means)] for i in range(n)]
    raw = {"label": [0, 1] * (n // 2), "n": words, "m": [float(i % 7 - 1) for i in range(n)], "c": words}
    log = tmp_path / f"log.{kind}"
    pq.write_table(pa.table(raw), log) if kind == "parquet" else pacsv.write_csv(pa.table(raw), log)
    columns = {
        "label": Column(kind="label"),
        "n": Column(kind="numeric", transform="none", missing=("?", "-999")),
        "m": Column(kind="numeric", transform="none", missing=("-1",)),  # of numbers, as they are written
        "bucket": Column(kind="categorical", table="bucket", source="n", quantiles=3, missing=("?", "-999")),
        "c": Column(kind="categorical", table="c", missing=("?",)),
    }
    tables = {"bucket": Encoding(), "c": Encoding(kind="vocabulary", min_count=1)}
    schema = Schema(columns=columns, encodings=tables)
    made = prepare(
        [log], tmp_path / "out", schema=schema, source=Source(bad_rows=bad_rows), split=Split(valid=0, test=0)
    )
    rows = part(tmp_path / "out", "train")
    if bad_rows == "stop":
        assert (np.array(rows["n"].to_pylist()) == [means[w] or 0.0 for w in words]).all()
        assert [b == 0 for b in rows["bucket"].to_pylist()] == [means[w] is None for w in words]
        assert not any("taken for missing" in note for note in made.notes)
    assert rows["m"].to_pylist() == [0.0 if m == -1 else m for m in raw["m"]]
    missing = ("?", "") if kind == "csv" else ("?",)  # an empty cell of Parquet is an empty text
    assert [c == 0 for c in rows["c"].to_pylist()] == [w in missing for w in words]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_row_that_does_not_fit_is_named_with_its_file(tmp_path: Path, kind: str) -> None:
    for day in (1, 2, 3):
        columns = log_of(200) | ({"n": [1.0] * 20 + [math.inf] * 180} if day == 2 else {})
        log = tmp_path / f"{day}.{kind}"
        pq.write_table(pa.table(columns), log) if kind == "parquet" else pacsv.write_csv(pa.table(columns), log)
    place = "row 20" if kind == "parquet" else "line 22"
    for split in (Split(), Split(by="file", valid_files=(str(tmp_path / f"2.{kind}"),))):
        names = ["1", "2", "3"] if split.by is None else ["1", "3"]
        with pytest.raises(UserError, match=rf"2\.{kind}, {place}: column 'n', row \d20: inf is infinite"):
            prepare([tmp_path / f"{name}.{kind}" for name in names], tmp_path / "out", schema=SCHEMA, split=split)

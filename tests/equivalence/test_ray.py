"""A preparation on a Ray cluster is that of one machine, to the bit: every file, every note, every
mistake.
"""

from __future__ import annotations

import hashlib
import itertools
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.batches import parts
from sparrow.data.logs.tables import table_log
from sparrow.data.preparation.job import Prepared
from sparrow.features.schema import Cluster, Column, Encoding, Join, Schema, Source, Split
from sparrow.features.transforms import Transforms

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'sparrow-rec[ray]')")
pytest.importorskip("daft", reason="daft is not installed (pip install 'sparrow-rec[ray]')")
pytestmark = [pytest.mark.multi, pytest.mark.filterwarnings("ignore")]  # warnings of theirs

ROWS, START_MS = 5000, 1_700_000_000_000
COLUMNS = {
    "label": Column(kind="label"),
    "ts": Column(kind="time"),
    "session": Column(kind="session"),
    "number": Column(kind="numeric"),
    "long": Column(kind="numeric", transform="log"),
    "bucket": Column(kind="categorical", source="number", quantiles=7, table="bucket"),
    "code": Column(kind="categorical", table="code"),
    "word": Column(kind="categorical", table="word"),
    "hashed": Column(kind="categorical", table="hashed"),
    "weight": Column(kind="weight", source="long"),
    "list": Column(kind="list", table="word", separator="|", pooling="mean"),
}
SCHEMA = Schema(
    columns=COLUMNS,
    encodings={
        **{name: Encoding() for name in ("bucket", "code", "word")},
        "hashed": Encoding(kind="hash", rows=99),
    },
    split=Split(by="time", valid=0.2, test=0.1, negatives=0.8),
)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "GROUP_ROWS", 500)  # many row groups, cut by rows and by bytes
        patch.setattr(parts, "GROUP_BYTES", 40_000)
        yield
    ray.shutdown()


def made(seed: int = 0) -> pa.Table:
    """Rows out of time order, of a few sessions; many share their time."""
    random = np.random.default_rng(seed)
    words = np.array([f"w{i}" for i in range(200)])[random.zipf(1.5, (ROWS, 3)) % 200]
    lists = [
        "|".join(row[:n]) or None
        for row, n in zip(words.tolist(), random.integers(0, 3, ROWS).tolist(), strict=True)
    ]
    return pa.table(
        {
            "label": random.integers(0, 2, ROWS),
            "ts": START_MS + random.integers(0, 600, ROWS) * 20_000,
            "session": pa.array(
                [f"s{i}" if i else None for i in random.integers(0, 300, ROWS).tolist()]
            ),
            "number": pa.array(random.normal(1e6, 1, ROWS), mask=random.random(ROWS) < 0.1),
            "long": random.lognormal(0, 4, ROWS),
            "code": random.integers(0, 500, ROWS),
            "word": words[:, 0],
            "hashed": words[:, 1],
            "list": pa.array(lists, pa.string()),
        }
    )


def cut(table: pa.Table, folder: Path, suffix: str = "parquet") -> list[str]:
    """Files of unlike sizes, one of them with a single row."""
    folder.mkdir()
    edges = [0, 1, 700, 3000, table.num_rows]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        piece = table.slice(low, high - low)
        if suffix == "csv":
            pyarrow.csv.write_csv(piece, folder / f"{i}.csv")
        else:
            pq.write_table(piece, folder / f"{i}.parquet", row_group_size=1000)
    return [str(folder / f"{i}.{suffix}") for i in range(4)]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def both(files: list[str], tmp_path: Path, rows: int = ROWS, **settings: Any) -> Prepared:
    """Prepared on this machine and on the cluster, and the same."""
    here, there = (
        data.prepare(files, tmp_path / str(address), ray=address, **settings)
        for address in (None, "local")
    )
    assert digests(there.out) == digests(here.out)
    assert replace(there, out=here.out) == replace(here, label_means=there.label_means)
    assert sum(here.rows.values()) + here.left_out == rows
    assert pq.ParquetFile(here.out / "train" / parts.ROWS).num_row_groups > 3
    return here


@pytest.mark.parametrize(
    "cluster",  # tests below have the others
    [
        *(pytest.param(of, marks=pytest.mark.slow) for of in (None, Cluster(by="session"))),
        Cluster(by="session", hours=0),
    ],
)
def test_parquet(tmp_path: Path, cluster: Cluster | None) -> None:
    groups = {"once": ("word", "number")} if cluster else {}
    found = both(
        cut(made(), tmp_path / "log"),
        tmp_path,
        schema=replace(SCHEMA, cluster=cluster, groups=groups),
    )
    assert min(found.rows.values()) > 0 and found.left_out > 0
    assert (
        found.schema.encodings["word"].kind == "vocabulary"
        and found.schema.encodings["code"].kind == "range"
    )


def test_vectors_and_crosses(tmp_path: Path) -> None:
    """Rows are sorted by time and by session with them; a vector is missing here and there."""
    random = np.random.default_rng(3)
    vectors = [x.tolist() if i % 9 else None for i, x in enumerate(random.normal(0, 1, (ROWS, 5)))]
    columns = {
        "vector": Column(kind="vector"),
        "cross": Column(kind="categorical", table="word", cross=("word", "code")),
    }
    schema = replace(
        SCHEMA,
        columns=COLUMNS | columns,
        cluster=Cluster(by="session"),
        groups={"once": ("vector", "cross")},
    )
    table = made().append_column("vector", [vectors])
    # words are kept of all ids of a cross that has up to 512
    few = pa.array(table["code"].to_numpy() % 2)
    table = table.set_column(table.column_names.index("code"), "code", few)
    found = both(cut(table, tmp_path / "log"), tmp_path, schema=schema)
    assert (
        found.schema.columns["vector"].size == 5 and "vector:missing" in found.schema.groups["once"]
    )


def test_counts_of_impressions(tmp_path: Path) -> None:
    """Some rows have none, and the clicks of some are not known."""
    random = np.random.default_rng(4)
    shown_N = random.integers(0, 5, ROWS)
    clicks = pa.array(random.binomial(shown_N, 0.3), mask=random.random(ROWS) < 0.1)
    table = made().append_column("shown", pa.array(shown_N)).append_column("clicks", clicks)
    columns = {"shown": Column(kind="impressions"), "clicks": Column(kind="label")}
    columns["teacher"] = Column(kind="label", source="p", probability=True)
    table = table.append_column("p", pa.array(random.random(ROWS))).drop_columns("label")
    columns |= {name: column for name, column in COLUMNS.items() if name != "label"}
    split = replace(SCHEMA.split, negatives=1.0)
    found = both(
        cut(table, tmp_path / "log"), tmp_path, schema=replace(SCHEMA, columns=columns, split=split)
    )
    zeros = int((shown_N == 0).sum())
    assert found.left_out == zeros > 0
    assert any(f"shown: 0 in {zeros:,} rows" in note for note in found.notes)
    assert found.label_means["train"] == pytest.approx({"clicks": 0.3, "teacher": 0.5}, abs=0.03)


@pytest.mark.parametrize("suffix", [pytest.param("parquet", marks=pytest.mark.slow), "csv"])
def test_partitions(tmp_path: Path, suffix: str) -> None:
    """The session, the ids and the time are in the names of folders; a file alone would make
    integers of the ids.
    """
    table = made().drop_columns(["session", "code", "ts"])
    edges = [*range(0, ROWS, 600), ROWS]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        folder = (
            tmp_path / f"log/dt=2026-03-{i // 2 + 1:02}/code={'7' if i % 3 else '07'}/visit={i % 5}"
        )
        folder.mkdir(parents=True)
        piece = table.slice(low, high - low)
        (pyarrow.csv.write_csv if suffix == "csv" else pq.write_table)(
            piece, folder / f"part.{suffix}"
        )
    (tmp_path / "log/_SUCCESS").touch()
    columns = COLUMNS | {
        "ts": Column(kind="time", source="dt"),
        "session": Column(kind="session", source="visit"),
    }
    schema = replace(SCHEMA, columns=columns, cluster=Cluster(by="session", hours=48))
    found = both([str(tmp_path / "log")], tmp_path, schema=schema)
    assert found.schema.encodings["code"].distinct == 2
    assert found.notes[0] == "columns from the names of folders: dt, code, visit"


def test_text(tmp_path: Path) -> None:
    """Cells and lines are repaired and counted; ids that began as integers do not go on so in the
    last file.
    """
    table = made()
    codes = [str(code) for code in table["code"].to_pylist()]
    codes[-9:] = ["007"] * 9
    numbers = [str(x) for x in table["number"].to_pylist()]
    numbers[800] = "much"
    table = table.set_column(5, "code", pa.array(codes)).set_column(3, "number", pa.array(numbers))
    files = cut(table, tmp_path / "log", "csv")
    lines = Path(files[2]).read_text().splitlines(keepends=True)
    lines[10] = lines[10].split(",", 2)[2]
    Path(files[2]).write_text("".join(lines))
    found = both(
        files, tmp_path, ROWS - 1, schema=SCHEMA, source=Source(format="csv", bad_rows="repair")
    )
    assert any("lines left out" in note for note in found.notes) and any(
        "'much'" in note for note in found.notes
    )


def test_names_are_the_callers_and_repairs_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers stand in the folder in which Ray was started."""
    table = made()
    numbers = [None if x is None else str(x) for x in table["number"].to_pylist()]
    numbers[800] = "much"
    monkeypatch.chdir(tmp_path)
    files = cut(table.set_column(3, "number", pa.array(numbers)), Path("log"))
    found = both(files, Path(), schema=SCHEMA, source=Source(bad_rows="repair"))
    assert any("log/2.parquet" in note and "at row 100: 'much'" in note for note in found.notes)


def test_split_by_file_and_by_ratio(tmp_path: Path) -> None:
    files = cut(made(), tmp_path / "log")
    untimed = {**COLUMNS, "ts": Column(kind="ignore")}
    by_file = replace(SCHEMA, columns=untimed, split=Split(by="file", valid_files=(files[2],)))
    (tmp_path / "a").mkdir()
    assert both(files, tmp_path / "a", schema=by_file).rows["valid"] == 2300
    found = both(
        files, tmp_path, schema=replace(SCHEMA, columns=untimed, split=Split(by="ratio", valid=0.3))
    )
    assert any("all rows of one session in one part" in note for note in found.notes)


@pytest.mark.parametrize("suffix", ["csv", pytest.param("parquet", marks=pytest.mark.slow)])
def test_split_by_a_column_and_up_to_a_time(tmp_path: Path, suffix: str) -> None:
    """The ids of the column are integers, which text may be read as or not."""
    files = cut(made(), tmp_path / "log", suffix)
    found = both(files, tmp_path, schema=replace(SCHEMA, split=Split(key="code", valid=0.3)))
    assert any("all rows of one code in one part" in note for note in found.notes)
    (tmp_path / "until").mkdir()
    until = Split(by="time", valid=0.2, test=0.1, negatives=0.8, until=0.8)
    found = both(files, tmp_path / "until", schema=replace(SCHEMA, split=until))
    assert sum(found.rows.values()) < 0.8 * ROWS and found.left_out > 0.2 * ROWS


def test_grown_from_another_log(tmp_path: Path) -> None:
    before = data.prepare(
        cut(made().slice(0, 4000), tmp_path / "before"), tmp_path / "first", schema=SCHEMA
    )
    like = Transforms.load(before.out)
    grown = both(cut(made(1), tmp_path / "log"), tmp_path, schema=like, grow=True)
    assert (grown.schema.encodings["word"].rows or 0) > (like.schema.encodings["word"].rows or 0)


def test_candidates_and_side_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are numbered alike, and what has no match is counted alike."""
    random = np.random.default_rng(0)
    shown = [
        random.choice(40, int(random.integers(0, 6)), replace=False).tolist() for _ in range(3000)
    ]
    chosen = [x[:1] if i != 1000 else [99] for i, x in enumerate(shown)]
    table = pa.table({"user": random.integers(0, 50, 3000), "inview": shown, "clicks": chosen})
    monkeypatch.chdir(tmp_path)
    pq.write_table(
        pa.table({"item": range(30), "topic": [f"t{i % 4}" for i in range(30)]}), "items.parquet"
    )
    join = Join(file="items.parquet", on="inview", key="item")
    source = Source(bad_rows="repair", candidates="inview", clicked="clicks", joins=(join,))
    rows = sum(map(len, shown)) - len(shown[1000])
    files = cut(table, tmp_path / "log")
    found = both(files, tmp_path, rows, source=source, split=Split(by="ratio"))
    assert found.schema.role("group") == "request" and "topic" in found.schema.sparse
    assert any("without a match for inview in items.parquet" in note for note in found.notes)
    assert any("left out (a clicked id that is no candidate)" in note for note in found.notes)


def test_mistakes_are_told_alike_and_leave_nothing(tmp_path: Path) -> None:
    labels = made()["label"].to_pylist()
    labels[3500] = 7
    files = cut(made().set_column(0, "label", pa.array(labels)), tmp_path / "log")
    told = []
    for address in (None, "local"):
        with pytest.raises(UserError) as error:
            data.prepare(files, tmp_path / "out", schema=SCHEMA, ray=address)
        told.append(str(error.value))
    assert told[0] == told[1] and "3.parquet, row 500" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]
    with pytest.raises(UserError, match="in memory"):
        data.prepare(table_log(made()), tmp_path / "out", schema=SCHEMA, ray="local")


def test_a_cluster_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(
        UserError, match=f"ray: no cluster answers at '{address}' .*ray start --head"
    ):
        data.prepare(cut(made(), tmp_path / "log"), tmp_path / "out", schema=SCHEMA, ray=address)


def test_coarse_times_and_what_differs_from_a_known_log(tmp_path: Path) -> None:
    """Rows of a day are drawn alike, and far times, new ids and missing numbers are counted
    alike.
    """
    table = made()
    day_ms = 86_400_000
    ts = pa.array(START_MS // day_ms * day_ms + np.arange(ROWS) % 2 * day_ms)
    days = table.set_column(1, "ts", ts)
    schema = replace(SCHEMA, split=Split(by="time"))
    known = both(cut(days, tmp_path / "log"), tmp_path, schema=schema)
    assert any(
        "are drawn at random, all rows of one session in one part" in note for note in known.notes
    )
    far = pa.array(np.where(np.arange(ROWS) % 9 == 4, 1000 * day_ms, ts.to_numpy()))
    later = days.set_column(1, "ts", far).set_column(5, "code", pa.array(np.arange(ROWS)))
    later = later.set_column(3, "number", pa.nulls(ROWS, pa.float64()))
    (tmp_path / "like").mkdir()
    settings = {"schema": Transforms.load(known.out), "split": Split(by="ratio")}
    like = both(cut(later, tmp_path / "later"), tmp_path / "like", **settings)
    assert any(
        note.startswith("ts: 556 times far from training's; the first, in row 4,")
        for note in like.notes
    )
    assert any(note.startswith("missing in all rows: bucket, number") for note in like.notes)
    (tmp_path / "grown").mkdir()
    both(cut(later, tmp_path / "more"), tmp_path / "grown", grow=True, **settings)

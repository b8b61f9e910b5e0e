"""Sessions side by side, groups of features once for every run of equal rows: the same rows as without."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow import data
from sparrow.core import Batch, UserError
from sparrow.data.batches import parts
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.repeats import repeats
from sparrow.data.preparation import engine, sessions, time_order
from sparrow.features.hashing import hash_ids
from sparrow.features.quantile import Ordered
from sparrow.features.runs import RUN, begins, bits, first_equal, mixed
from sparrow.features.schema import Cluster, Column, Encoding, Schema, Split

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
SCHEMA = Schema(
    columns={
        "label": Column(kind="label"), "ts": Column(kind="time"), "session": Column(kind="session"),
        "request": Column(kind="group"), "row": Column(kind="numeric", transform="none"),
        "age": Column(kind="numeric", transform="none"), "item": Column(kind="categorical", table="item"),
        "user": Column(kind="categorical", table="user"),
        "history": Column(kind="list", table="item", weights="stars", pooling="mean"),
        "tags": Column(kind="list", table="tag", pooling="sum"),
    },
    encodings={name: Encoding(kind="hash", rows=50) for name in ("item", "user", "tag")},
    split=Split(by="time", valid=0.2, test=0.0),
    cluster=Cluster(by="session"),
    groups={"user": ("user", "history", "age"), "tags": ("tags",)},
)  # fmt: skip
PLAIN = replace(SCHEMA, cluster=None, groups={})


def made(sessions: int = 60, hours: int = 3, seed: int = 0) -> pa.Table:
    """Requests of up to four candidates; a session shares its user, age and a history that sometimes grows."""
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for session in range(sessions):
        begin = START_MS + int(random.integers(0, hours * HOUR_MS))
        history = [int(i) for i in random.integers(0, 30, random.integers(0, 4))]
        user, age = f"u{random.integers(20)}", float(random.integers(3))
        for request in range(random.integers(1, 5)):
            history = [*history, int(random.integers(30))] if random.random() < 0.3 else history
            for _ in range(random.integers(1, 5)):
                rows.append({
                    "label": int(random.integers(2)), "ts": begin + 1000 * request, "session": f"s{session}",
                    "request": 100 * session + request, "age": age, "item": int(random.integers(30)), "user": user,
                    "history": history, "stars": [0.5 + i for i in range(len(history))],
                    "tags": [int(i) for i in random.integers(0, 30, random.integers(0, 3))],
                })  # fmt: skip
    rows.sort(key=lambda row: row["ts"])
    return pa.Table.from_pylist([{**row, "row": float(i)} for i, row in enumerate(rows)])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(made(), path)
    return path


@pytest.fixture
def dataset(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """In many row groups."""
    monkeypatch.setattr(parts, "GROUP_ROWS", 64)
    data.prepare([log], tmp_path / "out", schema=SCHEMA)
    return data.open(tmp_path / "out")


def everything(dataset: Dataset, split: str = "train") -> list[dict[str, Any]]:
    """All rows of a part, as a reader of Parquet finds them: columns of groups repeated."""
    folder = dataset.path / split
    table = pq.read_table(folder / parts.ROWS)
    for group, names in dataset.schema.groups.items():
        runs = pq.read_table(folder / parts.group_file(group))
        at = np.repeat(np.arange(runs.num_rows), runs[RUN].to_numpy())
        for name in parts.columns_of(dataset.schema, group):
            table = table.append_column(name, runs[name].take(pa.array(at)))
        assert names
    return table.to_pylist()


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """A batch's samples as plain values, expanded."""
    ids = batch.ids.expanded()
    lists = [
        [(v.tolist(), w.tolist()) for v, w in zip(ids[k].values_N.split(n), ids[k].weights_N.split(n), strict=True)]  # type: ignore[union-attr]
        for k in ids.keys
        for n in [ids[k].lengths_B.tolist()]
    ]
    return list(zip(batch.dense_BC.tolist(), *lists, batch.labels_BT.tolist(), batch.session_B.tolist(), strict=True))  # type: ignore[union-attr]


def same(one: Batch, other: Batch) -> None:
    """expanded(dedup(batch)) = batch, to the bit."""
    a, b = one.ids.expanded(), other.ids.expanded()
    assert a.keys == b.keys and torch.equal(a.values_N, b.values_N)
    assert torch.equal(a.lengths, b.lengths) and torch.equal(a.weights_N, b.weights_N)  # type: ignore[arg-type]
    for x, y in ((one.dense_BC, other.dense_BC), (one.labels_BT, other.labels_BT), (one.session_B, other.session_B)):
        assert torch.equal(x, y)  # type: ignore[arg-type]


ROWS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=2), st.sampled_from([0.0, -0.0])))


@given(ROWS)
def test_runs_are_those_of_a_loop(rows: list[tuple[int, list[int], float]]) -> None:
    columns = [
        pa.array([a for a, _, _ in rows], pa.int32()), pa.array([b for _, b, _ in rows], pa.large_list(pa.int64())),
        pa.array([c for _, _, c in rows], pa.float32()),
    ]  # fmt: skip
    plain = [(a, b, str(c)) for a, b, c in rows]  # -0.0 is another number
    want = [i == 0 or row != plain[i - 1] for i, row in enumerate(plain)]
    assert begins([bits(c) for c in columns], len(rows)).tolist() == want
    assert first_equal([bits(c) for c in columns], len(rows)).tolist() == [plain.index(row) for row in plain]


def test_equal_fingerprints_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.features.runs.mixed", lambda x: np.zeros(len(x), np.uint64))
    columns = [bits(pa.array([1, 2, 1, 2]))]
    assert first_equal(columns, 4).tolist() == [0, 1, 0, 3]  # what differs from the first of its print is by itself


def test_the_file_has_the_log_by_hour_session_and_time(dataset: Dataset, log: Path) -> None:
    want = []
    plain = pq.read_table(log).to_pylist()
    for part in ("train", "valid"):
        found = everything(dataset, part)
        here = {row["row"] for row in found}
        number = {row["session"]: 0 for row in plain}
        codes = dict(zip(number, mixed(hash_ids(pa.array(number))).tolist(), strict=True))
        rows = [row for row in plain if row["row"] in here]
        rows.sort(key=lambda row: (row["ts"] // HOUR_MS, codes[row["session"]], row["row"]))
        assert [row["row"] for row in found] == [row["row"] for row in rows]
        want += rows
    assert len(want) == len(plain)


def test_a_group_is_stored_once_for_a_run(dataset: Dataset) -> None:
    rows = everything(dataset)
    for group in dataset.schema.groups:
        names = parts.columns_of(dataset.schema, group)
        runs, at, saved = 0, 0, 0
        file = pq.ParquetFile(dataset.path / "train" / parts.group_file(group))
        whole = pq.ParquetFile(dataset.path / "train" / parts.ROWS)
        assert file.num_row_groups == whole.num_row_groups > 2
        for i in range(whole.num_row_groups):
            here = rows[at : at + whole.metadata.row_group(i).num_rows]
            at += len(here)
            want = sum(j == 0 or any(here[j][n] != here[j - 1][n] for n in names) for j in range(len(here)))
            assert file.metadata.row_group(i).num_rows == want
            runs += want
            stored = file.read_row_group(i)
            at_N = np.repeat(np.arange(stored.num_rows), stored[RUN].to_numpy())
            each_N = np.zeros(stored.num_rows, np.int64)  # bytes of a stored row: numbers, and where a list ends
            for name, column in zip(stored.column_names, stored.columns, strict=True):
                is_list = pa.types.is_large_list(column.type)
                width = (column.type.value_type if is_list else column.type).bit_width // 8
                each_N += 8 + width * pc.list_value_length(column).to_numpy() if is_list else width * (name != RUN)
            saved += each_N[at_N].sum() - each_N.sum() - 4 * stored.num_rows
        assert dataset.manifest["runs"]["train"][group] == runs < len(rows)
        assert dataset.manifest["saved_bytes"]["train"][group] == saved
        assert dataset.factor(group) == len(rows) / runs


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 10_000])
def test_expanded_is_the_batch_without(dataset: Dataset, shuffle: bool, batch_size: int) -> None:
    one, other = (dataset.loader(batch_size, shuffle=shuffle, seed=3, dedup=d) for d in ("on", "off"))  # type: ignore[arg-type]
    for _ in range(2):
        stored = 0
        for deduped, plain in zip(one, other, strict=True):
            same(deduped, plain)
            assert plain.ids.inverse_B == {} and set(deduped.ids.inverse_B) == {("user", "history"), ("tags",)}
            stored += sum(deduped.ids.stored(key) for key in ("user", "tags"))
            for inverse_B in deduped.ids.inverse_B.values():
                seen = list(dict.fromkeys(inverse_B.tolist()))
                assert seen == list(range(len(seen)))  # in the order in which they first occur
        assert batch_size == 1 or stored < 2 * dataset.rows()


def test_unique_rows_are_unique(log: Path, tmp_path: Path) -> None:
    """Also those that stand apart: a batch within one window has each content once."""
    data.prepare([log], tmp_path / "out", schema=SCHEMA)
    (batch,) = data.open(tmp_path / "out").loader(10_000, dedup="on")
    ids = batch.ids["tags"]
    each = [tuple(v.tolist()) for v in ids.values_N.split(ids.offsets_B1.diff().tolist())]
    assert len(set(each)) == len(each) < data.open(tmp_path / "out").manifest["runs"]["train"]["tags"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_no_request_is_split_and_no_row_is_lost(dataset: Dataset, shuffle: bool) -> None:
    loader = dataset.loader(10, shuffle=shuffle, seed=1)
    for _ in range(2):
        seen: list[float] = []
        requests: set[int] = set()
        batches = list(loader)
        assert len(batches) == len(loader) == -(-dataset.rows() // 10)
        for batch in batches:
            assert batch.session_B is not None and batch.batch_size < 20
            here = set(batch.session_B.tolist())
            assert not here & requests
            requests |= here
            seen += batch.dense_BC[:, 0].tolist()
        everyone = [row["row"] for row in everything(dataset)]
        assert sorted(seen) == sorted(everyone) and (seen != everyone) == shuffle


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dedup", ["on", "off"])
def test_readers_divide_batches_between_requests(
    dataset: Dataset, shuffle: bool, ranks: int, dedup: Literal["on", "off"]
) -> None:
    for batch_size in (12, 70):
        given: dict[str, Any] = {"shuffle": shuffle, "seed": 1, "dedup": dedup}
        readers = [dataset.loader(batch_size, rank=rank, ranks=ranks, **given) for rank in range(ranks)]
        for whole, *mine in zip(dataset.loader(batch_size, **given), *readers, strict=True):
            rows = [row for one in mine for row in one.dense_BC[:, 0].tolist()]
            assert sorted(rows) == sorted(whole.dense_BC[:, 0].tolist())
            requests = [set(one.session_B.tolist()) for one in mine if one.session_B is not None]
            assert sum(len(of_one) for of_one in requests) == len(set.union(*requests))
            if not shuffle:
                assert rows == whole.dense_BC[:, 0].tolist()
                parts = [one.ids.expanded() for one in mine]
                for key in whole.ids.keys:
                    values = torch.cat([part[key].values_N for part in parts])
                    assert torch.equal(values, whole.ids.expanded()[key].values_N)


def test_a_request_of_more_rows_than_a_batch_is_cut(log: Path, tmp_path: Path) -> None:
    table = made(3).drop(["request"])
    table = table.append_column("request", pa.array(np.zeros(table.num_rows, np.int64)))
    pq.write_table(table, tmp_path / "one.parquet")
    one = replace(SCHEMA, columns={**SCHEMA.columns, "session": Column(kind="session", source="request")})
    data.prepare([tmp_path / "one.parquet"], tmp_path / "out", schema=one)
    dataset = data.open(tmp_path / "out")
    batches = list(dataset.loader(4))
    assert [batch.batch_size for batch in batches][:-1] == [4] * (len(batches) - 1) and len(batches) > 3
    seen = [x for batch in batches for x in batch.dense_BC[:, 0].tolist()]
    assert seen == [row["row"] for row in everything(dataset)]


def test_a_run_of_more_rows_than_a_row_group_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session, one request, whose user never changes."""
    monkeypatch.setattr(parts, "GROUP_ROWS", 64)
    (row,) = made(1).slice(0, 1).to_pylist()
    pq.write_table(
        pa.Table.from_pylist([{**row, "row": float(i), "label": i % 2} for i in range(300)]), tmp_path / "log"
    )
    data.prepare([tmp_path / "log"], tmp_path / "out", schema=replace(SCHEMA, split=Split(by="time", valid=0, test=0)))
    dataset = data.open(tmp_path / "out")
    assert dataset.manifest["runs"]["train"] == {"user": 5, "tags": 5}
    assert [row["row"] for row in everything(dataset)] == list(range(300))
    for on, off in zip(dataset.loader(300, dedup="on"), dataset.loader(300, dedup="off"), strict=True):
        same(on, off)


def test_taken_up_at_any_batch(dataset: Dataset) -> None:
    whole = list(dataset.loader(9, shuffle=True, seed=5, dedup="on"))
    for at in range(len(whole)):
        again = dataset.loader(9, shuffle=True, seed=5, dedup="on")
        again.load_state_dict({"epoch": 0, "batch": at, "batch_size": 9})
        rest = list(again)
        assert len(rest) == len(whole) - at
        same(rest[0], whole[at])
        same(rest[-1], whole[-1])


def test_memory_holds_no_partition(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by session, again and again, down to one session that is larger than memory."""
    data.prepare([log], tmp_path / "one", schema=SCHEMA)
    monkeypatch.setattr(sessions, "HELD_BYTES", 500)
    monkeypatch.setattr(sessions, "BITS", 1)
    data.prepare([log], tmp_path / "other", schema=SCHEMA)
    for part in ("train", "valid"):
        assert everything(data.open(tmp_path / "one"), part) == everything(data.open(tmp_path / "other"), part)
    digests = [json.loads((tmp_path / n / "manifest.json").read_text())["parts_sha256"] for n in ("one", "other")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", ["one session", "late rows"])
def test_memory_holds_little_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Rows that are put aside in small pieces must not keep all of the batches that they are pieces of."""
    monkeypatch.setattr(sessions, "HELD_BYTES", 1 << 18)
    monkeypatch.setattr(time_order, "RANGE_BYTES", 1 << 18)
    random, peak = np.random.default_rng(0), 0

    def batches() -> Iterator[tuple[int, pa.Table]]:
        nonlocal peak
        for i in range(60):
            session, ts = np.full(4000, 7), 4000 * i + np.arange(4000)
            some = random.random(4000) < 0.01
            if kind == "one session":
                session[some] = random.integers(0, 1 << 40, some.sum())
            else:
                ts[some] = random.integers(0, 240_000, some.sum())
            rows = {f"x{j}": random.random(4000) for j in range(20)}
            yield 0, pa.table({"session": session, "ts": ts, **rows})
            peak = max(peak, pa.total_allocated_bytes() - before)

    before = pa.total_allocated_bytes()
    if kind == "one session":
        found = sessions.clustered(batches(), "session", "ts", 0, tmp_path)
    else:
        times = Ordered(tmp_path / "times", np.int64)
        times.add(np.arange(240_000))
        found = time_order.in_time_order(batches(), times, "ts", tmp_path)
    count = 0
    for _, table in found:
        count += table.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert count == 240_000
    assert peak < 15 << 20  # of 42 MB


def test_a_log_in_any_order_gives_the_same_folder(log: Path, tmp_path: Path) -> None:
    """Rows of one time keep the order of the log, so that only those are shuffled apart."""
    table = pq.read_table(log)
    times = np.unique(table["ts"].to_numpy())
    order = np.concatenate(
        [np.flatnonzero(table["ts"].to_numpy() == t) for t in np.random.default_rng(0).permutation(times)]
    )
    pq.write_table(table.take(pa.array(order)), tmp_path / "log.parquet")
    for name, source in (("one", log), ("other", tmp_path / "log.parquet")):
        data.prepare([source], tmp_path / name, schema=SCHEMA)
    assert everything(data.open(tmp_path / "one")) == everything(data.open(tmp_path / "other"))


def test_rows_without_a_session_are_alone(log: Path, tmp_path: Path) -> None:
    table = pq.read_table(log)
    sessions = [None if i % 3 == 0 else s for i, s in enumerate(table["session"].to_pylist())]
    table = table.set_column(table.column_names.index("session"), "session", pa.array(sessions))
    half = table.num_rows // 2  # sessions lie in both files
    pq.write_table(table.slice(0, half), tmp_path / "1.parquet")
    pq.write_table(table.slice(half), tmp_path / "2.parquet")
    data.prepare([tmp_path / "1.parquet", tmp_path / "2.parquet"], tmp_path / "out", schema=SCHEMA)
    rows = everything(data.open(tmp_path / "out")) + everything(data.open(tmp_path / "out"), "valid")
    alone = [row for row in rows if row["session"] < 0]
    assert {row["row"] for row in alone} == {float(i) for i in range(table.num_rows) if i % 3 == 0}
    assert len({row["session"] for row in alone}) == len(alone)


def test_suggested_groups_change_together(dataset: Dataset) -> None:
    found = repeats(dataset)
    rows = everything(dataset)
    for name in ("user", "tags", "item"):
        behind = [(a, b) for a, b in itertools.pairwise(rows) if a["session"] == b["session"]]
        equal = sum(a[name] == b[name] for a, b in behind)
        assert found.equal[name] == pytest.approx(
            equal / len(behind), abs=0.1
        )  # a session may go on in another row group
    assert found.rows == len(rows)
    for group, names in found.groups.items():
        assert found.rows >= 1.5 * found.group_runs[group]
        same = sum(all(a[n] == b[n] for n in names) for a, b in behind)
        assert found.group_runs[group] == pytest.approx(len(rows) - same, rel=0.1)
    ((group, names),) = ((g, n) for g, n in found.groups.items() if "user" in n)
    assert "age" in names and "item" not in names and found.rows / found.group_runs[group] > 1.5


@pytest.mark.parametrize("hours", [0.0, 1.0])
def test_parts_that_interleave_are_clustered_too(log: Path, tmp_path: Path, hours: float) -> None:
    """A split by ratio gives the sessions of each batch to all parts, and a log without a time is one partition."""
    ratio = replace(SCHEMA, split=Split(by="ratio", valid=0.3, test=0.3), cluster=Cluster(by="session", hours=hours))
    if not hours:
        ratio = replace(ratio, columns={**ratio.columns, "ts": Column(kind="ignore")})
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(engine, "BATCH_ROWS", 50)  # rows that are read at a time
        data.prepare([log], tmp_path / "out", schema=ratio)
    for part in ("train", "valid", "test"):
        rows = everything(data.open(tmp_path / "out"), part)
        stretches = [key for key, _ in itertools.groupby((row["session"], row.get("ts", 0) // HOUR_MS) for row in rows)]
        assert len(stretches) == len(set(stretches)) > 20


def test_what_groups_are_worth_is_said(log: Path, tmp_path: Path) -> None:
    made = data.prepare([log], tmp_path / "out", schema=SCHEMA)
    said = "\n".join(made.notes)
    assert (
        f"group user: {data.open(tmp_path / 'out').factor('user'):.2f} rows a run, " in said
        and "looked up once" in said
    )


@pytest.mark.parametrize(
    ("rows", "lists", "ids"), [(1000, "", ""), (1090, "", ""), (1100, "1 2", "2"), (4000, "1 2", "2")]
)
def test_auto_looks_up_once_from_eleven_rows_for_ten_runs_on(tmp_path: Path, rows: int, lists: str, ids: str) -> None:
    """lists, ids: how many readers do so for a group with a list, and for one of ids alone."""
    user_N = np.arange(rows) % 1000  # side by side, as they are one session
    log = pa.table({
        "label": np.arange(rows) % 2, "user": user_N, "tags": [[i] for i in user_N.tolist()], "session": user_N,
        "item": np.arange(rows),
    })  # fmt: skip
    schema = Schema(
        columns={name: SCHEMA.columns[name] for name in log.column_names}, encodings=SCHEMA.encodings,
        split=Split(by="ratio", valid=0, test=0), cluster=Cluster(by="session"),
        groups={"lists": ("tags",), "ids": ("user",)},
    )  # fmt: skip
    pq.write_table(log, tmp_path / "log.parquet")
    made = data.prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=schema)
    dataset = data.open(tmp_path / "out")
    assert dataset.factor("lists") == dataset.factor("ids") == rows / 1000
    for ranks in (1, 2):
        (batch,) = dataset.loader(10_000, ranks=ranks)
        want = {("tags",): str(ranks) in lists, ("user",): str(ranks) in ids}
        assert set(batch.ids.inverse_B) == {group for group, once in want.items() if once}
    said = ["looked up once" in note for note in made.notes if note.startswith("group ")]
    assert said == ["1" in lists, "1" in ids]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cluster": Cluster(by="sesion")}, "cluster.by: 'sesion' is no column of kind session or group; did you mean"),
        ({"groups": {"g": ()}}, "groups.g: empty; name its features"),
        ({"groups": {"g": ("usr",)}}, "groups.g: no feature 'usr'; did you mean 'user'"),
        ({"groups": {"g": ("label",)}}, "groups.g: no feature 'label'"),
        ({"groups": {"g": ("user",), "h": ("user",)}}, "groups.g: 'user' is named twice"),
    ],
)
def test_what_a_schema_cannot_say(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(SCHEMA, **changes)


def test_hours_need_a_time_since_1970(log: Path, tmp_path: Path) -> None:
    odd = replace(SCHEMA, columns={**SCHEMA.columns, "ts": Column(kind="time", source="row")})
    table = pq.read_table(log)
    table = table.set_column(table.column_names.index("row"), "row", pa.array(np.arange(table.num_rows)))
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(UserError, match=r"cluster\.hours: column 'ts' ends with \d+, which is no time since 1970"):
        data.prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=odd)
    data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", schema=replace(odd, cluster=Cluster(by="session", hours=0))
    )

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

import sparrow.apps.generate.synthetic as module
from sparrow.apps.generate import generate
from sparrow.apps.generate.settings import Settings
from sparrow.core import UserError

ROWS = 30_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "log.parquet"
    generate(path, rows=ROWS, users=3000, items=800, seed=3)
    return path


@pytest.fixture(scope="module")
def log(made: Path) -> pa.Table:
    return pq.read_table(made)


def column(log: pa.Table, name: str) -> np.ndarray:
    return log[name].to_numpy()


def test_columns(log: pa.Table) -> None:
    kinds = {f.name: str(f.type) for f in log.schema}
    expected = {"session": "int64", "ts": "int64", "user": "int64", "item": "int64"}
    expected |= {"history": "list<element: int64>", "tags": "list<element: string>"}
    expected |= {f"cat_{i}": "string" for i in range(8)}
    expected |= {f"num_{i}": "float" if i % 2 else "int64" for i in range(6)}
    assert kinds == {**expected, "label": "int8", "true_p": "float"}
    assert log.num_rows == ROWS
    assert set(column(log, "label")) == {0, 1}
    assert column(log, "user").min() >= 0 and column(log, "user").max() < 3000
    liked = pc.list_flatten(log["history"]).to_numpy()
    assert liked.min() >= 0 and liked.max() < 800
    assert set(liked) & set(column(log, "item"))
    lengths = pc.list_value_length(log["history"]).to_numpy()
    assert lengths.min() == 0 and lengths.max() == 20
    assert set(pc.list_value_length(log["tags"]).to_numpy()) == {0, 1, 2, 3, 4, 5}
    assert all(len(set(tags)) == len(tags) for tags in log["tags"][:500].to_pylist())
    counts = log["num_0"].drop_null().to_numpy()
    assert counts.min() == 0 and counts.max() > 30 * np.median(counts)


def test_sessions_are_whole_and_in_order(log: pa.Table) -> None:
    session = column(log, "session")
    assert set(np.diff(session)) == {0, 1}
    assert ROWS / (session[-1] + 1) == pytest.approx(5, rel=0.1)
    assert (np.diff(column(log, "ts")) >= 0).all()
    assert np.ptp(column(log, "ts")) / 86_400_000 == pytest.approx(7, rel=0.01)
    same = np.flatnonzero(np.diff(session) == 0)
    for name in ("ts", "user", "history"):
        assert log[name].take(same).equals(log[name].take(same + 1)), name
    for name in ("item", "cat_0"):
        assert not log[name].take(same).equals(log[name].take(same + 1)), name


def test_tags_belong_to_the_item(log: pa.Table) -> None:
    tags: dict[int, list] = {}
    for item, of in zip(log["item"].to_pylist(), log["tags"].to_pylist(), strict=True):
        assert tags.setdefault(item, of) == of
    assert len({tuple(of) for of in tags.values()}) > 100


@pytest.mark.parametrize(("block_rows", "sorted_at_once"), [(100, 1 << 20), (7777, 500)])
def test_the_seed_alone_decides(
    tmp_path: Path,
    block_rows: int,
    sorted_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = {"rows": 10_000, "users": 1000, "items": 300}
    first = generate(tmp_path / "first.parquet", seed=3, **size)
    monkeypatch.setattr(module, "_BLOCK_ROWS", block_rows)
    monkeypatch.setattr(module, "_SORTED", sorted_at_once)
    rows = pq.read_table(tmp_path / "first.parquet")
    for seed, same in ((3, True), (4, False)):
        found = generate(tmp_path / f"{seed}.parquet", seed=seed, **size)
        assert pq.read_table(tmp_path / f"{seed}.parquet").equals(rows) == same
        for part, figures in first.truth.items():
            assert (found.truth[part] == pytest.approx(figures, rel=1e-12)) == same


@pytest.mark.parametrize("session_rows", [1, 5, 4000])
def test_sessions_are_those_of_one_draw(
    tmp_path: Path, session_rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed, they are what drawing and sorting all at once gives, as Sparrow did before it
    streamed.
    """
    monkeypatch.setattr(module, "_BLOCK_ROWS", 700)
    monkeypatch.setattr(module, "_SORTED", 300)
    made = generate(
        tmp_path / "log.parquet",
        rows=9000,
        session_rows=session_rows,
        history=0,
        categorical=0,
        numeric=0,
    )

    def uniform(name: str, size: int) -> np.ndarray:
        return np.random.default_rng([0, *f"log/{name}".encode()]).random(size)

    with np.errstate(divide="ignore"):
        lengths = np.ceil(
            np.log1p(-uniform("length", 9000)) / np.log1p(-1 / np.float64(session_rows))
        )
    session = np.repeat(np.arange(9000), np.maximum(lengths, 1).astype(int).clip(max=9000))[:9000]
    assert made.sessions == session[-1] + 1
    ts = 1_704_067_200_000 + (np.sort(uniform("time", made.sessions)) * 7 * 86_400_000).astype(
        np.int64
    )
    log = pq.read_table(made.out)
    assert (column(log, "session") == session).all() and (column(log, "ts") == ts[session]).all()


def test_a_part_of_the_truth_begins_with_the_first_row_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows of one time lie in several blocks."""
    monkeypatch.setattr(module, "_BLOCK_ROWS", 40)
    monkeypatch.setattr(module, "_DAY_MS", 12)
    made = generate(
        tmp_path / "log.parquet", rows=3000, days=1, history=0, categorical=0, numeric=0
    )
    ts = column(pq.read_table(made.out), "ts")
    for part, share in (("last_20", 0.2), ("last_10", 0.1)):
        assert (
            made.truth[part]["examples"]
            == (ts >= ts[round(3000 * (1 - share))]).sum()
            > 3000 * share
        )


def test_the_auc_of_a_long_log_comes_from_bins(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXACT_ROWS", ROWS - 1)
    found = generate(tmp_path / "log.parquet", rows=ROWS, users=3000, items=800, seed=3).limit
    exact = json.loads(made.with_name("log.parquet.truth.json").read_text())["all"]
    assert found["auc"] != exact["auc"]
    assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Before it streamed, 4 M rows more took 400 MB more."""
    program = (
        "import resource, sys; from sparrow.apps.generate import generate;generate(sys.argv[1],"
        " rows=int(sys.argv[2]), history=0, categorical=1, numeric=1,"
        " overwrite=True);print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for rows in (1_500_000, 6_000_000):
        command = [sys.executable, "-c", program, str(tmp_path / "log.parquet"), str(rows)]
        peaks.append(
            int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024
        )
    assert peaks[1] < peaks[0] + 30, peaks


def test_labels_are_drawn_from_the_truth(log: pa.Table) -> None:
    p, y = column(log, "true_p").astype(np.float64), column(log, "label")
    assert p.mean() == pytest.approx(0.2, abs=0.015)
    bins = np.searchsorted(np.quantile(p, np.arange(0.1, 1, 0.1)), p)

    def chi_square(p: np.ndarray) -> float:
        missed, variance = np.bincount(bins, y - p), np.bincount(bins, p * (1 - p))
        return float((missed**2 / variance).sum())

    assert chi_square(p) < 35.6  # 1 in 10,000 with ten degrees of freedom
    assert chi_square(0.95 * p) > chi_square(p)
    shuffled = np.random.default_rng(0).permutation(p)
    assert log_loss(y, p) < log_loss(y, np.full(ROWS, y.mean())) < log_loss(y, shuffled)
    assert 0.80 < roc_auc_score(y, p) < 0.86


def test_the_sidecar_is_what_sklearn_says(made: Path, log: pa.Table) -> None:
    told = json.loads(made.with_name("log.parquet.truth.json").read_text())
    p, y, ts = (column(log, name) for name in ("true_p", "label", "ts"))
    assert told["config"]["seed"] == 3
    for part, share in (("all", 1), ("last_20", 0.2), ("last_10", 0.1)):
        rows = ts >= ts[round(ROWS * (1 - share))]
        assert told[part]["examples"] == rows.sum()
        assert told[part]["auc"] == pytest.approx(roc_auc_score(y[rows], p[rows]), abs=1e-12)
        loss = log_loss(y[rows], p[rows].astype(np.float64))
        assert told[part]["logloss"] == pytest.approx(loss, rel=1e-6)
        rate = y[rows].mean()
        assert told[part]["base_rate"] == pytest.approx(rate)
        assert told[part]["ne"] == pytest.approx(
            loss / log_loss(y[rows], np.full(rows.sum(), rate)), rel=1e-6
        )


@pytest.mark.parametrize("click_rate", [0.02, 0.5])
def test_click_rate(tmp_path: Path, click_rate: float) -> None:
    generate(
        tmp_path / "log.parquet",
        rows=ROWS,
        click_rate=click_rate,
        history=0,
        categorical=1,
        numeric=0,
    )
    log = pq.read_table(tmp_path / "log.parquet")
    assert column(log, "true_p").mean() == pytest.approx(click_rate, rel=0.1)
    assert "history" not in log.column_names and "cat_1" not in log.column_names


def test_popularity_follows_zipf(tmp_path: Path) -> None:
    generate(
        tmp_path / "log.parquet",
        rows=ROWS,
        zipf=1.3,
        drift=0,
        items=500,
        users=500,
        history=0,
        session_rows=1,
    )
    log = pq.read_table(tmp_path / "log.parquet")
    expected = np.arange(1, 501) ** -1.3
    expected *= ROWS / expected.sum()
    for name in ("item", "user"):
        ids, counts = np.unique(column(log, name), return_counts=True)
        order = np.argsort(-counts)
        assert (np.abs(counts[order][:15] - expected[:15]) < 5 * np.sqrt(expected[:15])).all(), name
        slope = np.polyfit(np.log(np.arange(1, 31)), np.log(counts[order][:30]), 1)[0]
        assert slope == pytest.approx(-1.3, abs=0.1)
        assert list(ids[order][:5]) != [0, 1, 2, 3, 4]  # an id does not tell its rank


def test_drift_moves_popularity_and_quality(tmp_path: Path) -> None:
    shared, alike = {}, {}
    for drift in (0, 1, 3):
        generate(
            tmp_path / f"{drift}.parquet",
            rows=60_000,
            drift=drift,
            items=300,
            numeric=0,
            categorical=0,
        )
        log = pq.read_table(tmp_path / f"{drift}.parquet")
        item, p = column(log, "item"), column(log, "true_p")
        ends = [slice(0, 10_000), slice(-10_000, None)]
        counts = [np.bincount(item[end], minlength=300) for end in ends]
        hot = [set(np.argsort(-c)[:30]) for c in counts]
        rates = [
            np.bincount(item[end], p[end], 300) / np.maximum(c, 1)
            for end, c in zip(ends, counts, strict=True)
        ]
        often = np.minimum(*counts) >= 10
        shared[drift], alike[drift] = (
            len(hot[0] & hot[1]),
            np.corrcoef(rates[0][often], rates[1][often])[0, 1],
        )
    assert shared[0] > shared[1] > shared[3]
    assert alike[0] > alike[1] > alike[3]


def test_missing_values(log: pa.Table) -> None:
    shares = {name: log[name].null_count / ROWS for name in log.column_names}
    some = {name for name in shares if name.startswith("cat") and int(name[4:]) % 2}
    some |= {name for name in shares if name.startswith("num") and int(name[4:]) % 2 == 0}
    for name, share in shares.items():
        assert share == (pytest.approx(0.05, abs=0.007) if name in some else 0), name


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_text(tmp_path: Path, suffix: str) -> None:
    told: list[tuple[str, int, int]] = []
    made = generate(
        tmp_path / f"log.{suffix}", rows=2000, with_truth=False, progress=lambda *a: told.append(a)
    )
    log = pacsv.read_csv(
        made.out, parse_options=pacsv.ParseOptions(delimiter="," if suffix == "csv" else "\t")
    )
    assert log.num_rows == made.rows == 2000
    assert set(log.column_names) & {"history", "tags", "true_p"} == set()
    assert "history" in made.notes[0]
    assert told[-1][1:] == (2000, 2000)
    assert [p.name for p in tmp_path.iterdir()] == [f"log.{suffix}"]


def test_one_row(tmp_path: Path) -> None:
    made = generate(tmp_path / "log.parquet", rows=1, users=1, items=1)
    assert made.sessions == 1 and math.isnan(made.limit["auc"])
    assert json.loads((tmp_path / "log.parquet.truth.json").read_text())["all"]["auc"] is None


def test_a_log_is_kept_and_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "log.parquet"

    def fail(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(out, rows=100, progress=fail)
    assert not list(out.parent.iterdir())
    generate(out, rows=100)
    before = out.read_bytes()
    with pytest.raises(UserError, match="exists"):
        generate(out, rows=50)
    with pytest.raises(KeyboardInterrupt):
        generate(out, rows=50, overwrite=True, progress=fail)
    assert out.read_bytes() == before
    assert json.loads(out.with_name("log.parquet.truth.json").read_text())["all"]["examples"] == 100
    generate(out, rows=50, overwrite=True, with_truth=False)
    assert pq.read_table(out).num_rows == 50
    assert [p.name for p in out.parent.iterdir()] == ["log.parquet"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": 0}, "rows: 0"),
        ({"users": 0}, "users: 0"),
        ({"items": -1}, "items: -1"),
        ({"click_rate": 0.0}, "click_rate: 0.0"),
        ({"click_rate": 1.0}, "click_rate: 1.0"),
        ({"missing": 1.0}, "missing: 1.0"),
        ({"session_rows": 0.5}, "session_rows: 0.5"),
        ({"zipf": math.nan}, "zipf: nan"),
        ({"drift": -1.0}, "drift: -1.0"),
        ({"days": 0}, "days: 0"),
        ({"numeric": -1}, "numeric: -1"),
        ({"history": -1}, "history: -1"),
        ({"out": "log.json"}, "log.json: no known suffix"),
        ({"out": "log"}, "log: no known suffix"),
    ],
)
def test_bad_arguments(tmp_path: Path, change: dict, says: str) -> None:
    given = {"out": "log.parquet"} | change
    with pytest.raises(UserError, match=says) as caught:
        generate(tmp_path / given.pop("out"), **given)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_every_setting_is_an_argument_that_is_written_down(tmp_path: Path) -> None:
    shown = inspect.signature(generate).parameters
    defaults = {field.name: field.default for field in fields(Settings)}
    assert defaults.items() <= {name: argument.default for name, argument in shown.items()}.items()
    written = {**defaults, "rows": 50, "session_rows": 2}
    generate(tmp_path / "log.parquet", rows=50, session_rows=2)
    assert json.loads((tmp_path / "log.parquet.truth.json").read_text())["config"] == written

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.analysis.scores import Rows
from sparrow.analysis.slices import judge_slices, slices
from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.features.schema import Column, Encoding, Schema, Split


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, dict[str, Any]]:
    rng, rows, path = np.random.default_rng(0), 2000, tmp_path_factory.mktemp("sliced")
    columns = {
        "label": rng.integers(0, 2, rows),
        "x": rng.normal(50, 7, rows),
        "big": np.round(np.exp(rng.normal(3, 2, rows))),
        "few": rng.integers(1, 4, rows).astype(float),
        "item": rng.zipf(1.5, rows).clip(max=60),
        "h": [list(range(i % 5)) for i in range(rows)],
        "ts": 1_700_000_000 + np.arange(rows) * 60,
    }
    pq.write_table(pa.table(columns), path / "log.parquet")
    schema = Schema(
        columns={
            "label": Column(kind="label"),
            "x": Column(kind="numeric"),
            "big": Column(kind="numeric", transform="log"),
            "few": Column(kind="numeric", transform="none"),
            "item": Column(kind="categorical", table="item"),
            "h": Column(kind="list", table="h"),
            "ts": Column(kind="time"),
            "gone": Column(kind="ignore"),
        },
        encodings={"item": Encoding(kind="range"), "h": Encoding(kind="hash")},
        split=Split(by="time", valid=0, test=0.5),
    )
    data.prepare([path / "log.parquet"], path / "prepared", schema=schema)
    test = {
        name: np.array(values[rows // 2 :], dtype=object if name == "h" else None)
        for name, values in columns.items()
    }
    return data.open(path / "prepared"), test


def test_slices_bear_the_values_of_the_raw_log(sliced: tuple[Dataset, dict[str, Any]]) -> None:
    dataset, raw = sliced
    names, at_N = slices(dataset, "test", "item")
    log = pq.read_table(dataset.path.parent / "log.parquet")
    train = log.slice(0, len(log) // 2)
    trained = Counter(train["item"].to_pylist())
    named = [str(item) if trained[item] >= 2 else "unknown" for item in raw["item"]]
    counts = Counter(named)
    assert len(names) == 8
    assert names[-1] == f"{len(counts) - 7} others"
    assert (
        sorted((counts[name] for name in names[:-1]), reverse=True)
        == sorted(counts.values(), reverse=True)[:7]
    )
    for i, name in enumerate(names[:-1]):
        assert {named[n] for n in np.flatnonzero(at_N == i)} == {name}
        assert (at_N == i).sum() == counts[name]
    for name in ("x", "big"):
        names, at_N = slices(dataset, "test", name)
        sizes = np.bincount(at_N)
        assert names[0].startswith("≤ ")
        bounds = pc.min_max(train[name]).as_py()
        raw_N = raw[name].clip(bounds["min"], bounds["max"])  # as `prepare` clips
        tops = [raw_N[at_N == i].max() for i in range(len(names))]
        assert [float(n[2:]) for n in names] == pytest.approx(tops, rel=1e-3)
        assert len(names) == 8
        assert (raw_N[at_N == 0].max() < raw_N[at_N == 1].min()) and sizes.min() > 60
    names, at_N = slices(dataset, "test", "few")
    assert names == ["1", "2", "3"]
    assert (at_N + 1 == raw["few"]).all()
    names, at_N = slices(dataset, "test", "h")
    assert names == ["0 ids", "1 ids", "2 ids", "3 ids", "4 ids"]
    assert at_N.tolist() == [len(h) for h in raw["h"]]
    names, _ = slices(dataset, "test", "ts")
    assert names[-1] == "≤ 2023-11-16 07:32"
    with pytest.raises(UserError, match="ignored"):
        slices(dataset, "test", "gone")


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, dict[str, list]]:
    """A log whose ids are words, in tables of each kind, one of them shared by two columns."""
    rng, rows, path = np.random.default_rng(0), 3000, tmp_path_factory.mktemp("spoken")
    countries = np.array(["DE", "FR", "[b]IT", "New Zealand", "US", "日本"])
    columns = {
        "label": rng.integers(0, 2, rows),
        "country": pa.array(
            countries[rng.zipf(1.6, rows).clip(max=6) - 1], mask=rng.random(rows) < 0.1
        ),
        "home": countries[rng.integers(0, 6, rows)],
        "site": np.array([f"site {n}" for n in range(40)])[rng.zipf(1.4, rows) % 40],
        "code": rng.choice([5, 7 * 10**17, -(10**18)], rows),
        "user": [f"u{n}" for n in rng.integers(0, 4, rows)],
    }
    pq.write_table(pa.table(columns), path / "log.parquet")
    schema = Schema(
        columns={
            "label": Column(kind="label"),
            **{n: Column(kind="categorical", table=n) for n in ("country", "site", "code")},
            "home": Column(kind="categorical", table="country"),
            "user": Column(kind="group"),
        },
        encodings={
            "country": Encoding(),
            "site": Encoding(kind="hash", rows=8),
            "code": Encoding(kind="vocabulary"),
        },
        split=Split(by="ratio", valid=0, test=0.5),
    )
    data.prepare([path / "log.parquet"], path / "prepared", schema=schema)
    return data.open(path / "prepared"), {n: pa.array(c).to_pylist() for n, c in columns.items()}


def test_slices_of_words_say_the_words(spoken: tuple[Dataset, dict[str, list]]) -> None:
    """And each holds the rows that have the word, which its label rate tells."""
    dataset, raw = spoken
    assert dataset.schema.encodings["country"].kind == "vocabulary"
    wanted = {
        name: {"missing" if x is None else str(x) for x in raw[name]}
        for name in ("country", "home", "code")
    }
    for name, values in wanted.items():
        names, at_N = slices(dataset, "test", name)
        assert set(names) == values
        assert len(at_N) == dataset.rows("test")
    names, _ = slices(dataset, "test", "site")
    assert set(names[:-1]) < set(raw["site"]) and names[-1] == "33 others"
    hashes, _ = slices(dataset, "test", "user")
    assert all(name.startswith("#") for name in hashes)  # no text of people is kept
    labels_N = torch.from_numpy(dataset.column("label", "test").to_numpy().copy())
    rows = Rows(scores_N=labels_N * 0.5 + 0.25, labels_N=labels_N, weights_N=None, sessions_N=None)
    for one in judge_slices(rows, dataset, "test", "country"):
        assert one.metrics()["calibration"] == pytest.approx(0.5 + 0.25 / one.rate)
        # of scores that say 0.25 and 0.75, and mean 0 and 1
        assert one.estimates["ece"].value == pytest.approx(0.25)


def test_each_slice_has_the_rows_of_its_word(tmp_path: Path) -> None:
    """The label is the word's, so a slice that took another word's rows would have another rate."""
    random = np.random.default_rng(1)
    colours = np.array(["red", "green", "blue"])[random.integers(0, 3, 2000)]
    shades = random.integers(0, 50, 2000)
    table = pa.table({"label": (colours == "red").astype(int), "colour": colours, "shade": shades})
    pq.write_table(table, tmp_path / "log.parquet")
    data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "prepared", split=Split(by="ratio", test=0.4)
    )
    dataset = data.open(tmp_path / "prepared")
    labels_N = torch.from_numpy(dataset.column("label", "test").to_numpy().copy())
    rows = Rows(scores_N=labels_N * 0 + 0.3, labels_N=labels_N, weights_N=None, sessions_N=None)
    rates = {one.value: one.rate for one in judge_slices(rows, dataset, "test", "colour")}
    assert rates == {"red": 1.0, "green": 0.0, "blue": 0.0}


def test_a_log_of_before_has_no_words(
    spoken: tuple[Dataset, dict[str, list]], tmp_path: Path
) -> None:
    dataset, _ = spoken
    shutil.copytree(dataset.path, tmp_path / "old")
    (tmp_path / "old" / "words.json").unlink()
    old = data.open(tmp_path / "old")
    assert old.fingerprint == dataset.fingerprint
    names, at_N = slices(old, "test", "country")
    assert "no. 1 by frequency" in names
    assert (at_N == slices(dataset, "test", "country")[1]).all()


def test_ids_without_a_value_have_names(tmp_path: Path) -> None:
    """As a vocabulary and as quantile buckets number them."""
    schema = Schema(
        columns={
            "v": Column(kind="categorical", table="v"),
            "q": Column(kind="categorical", table="q", quantiles=3, boundaries=(1.5, 4.0)),
        },
        encodings={
            "v": Encoding(kind="vocabulary", rows=5),
            "q": Encoding(kind="range", low=1, high=3, rows=5),
        },
    )
    (tmp_path / "test").mkdir()
    table = pa.table({"v": [2, 2, 2, 0, 0, 4, 1], "q": [4, 2, 2, 0, 3, 2, 2]})
    pq.write_table(table, tmp_path / "test" / "part-00000.parquet")
    dataset = Dataset(tmp_path, schema, {})
    names, at_N = slices(dataset, "test", "v")
    assert names == ["no. 1 by frequency", "missing", "unknown", "no. 3 by frequency"]
    assert at_N.tolist() == [0, 0, 0, 1, 1, 3, 2]
    rare = pa.table({"v": [2] * 12 + list(range(3, 20)), "q": [1] * 29})
    pq.write_table(rare, tmp_path / "test" / "part-00000.parquet")
    # no slice of a single row
    assert slices(dataset, "test", "v")[0] == ["no. 1 by frequency", "17 others"]
    pq.write_table(rare.slice(12), tmp_path / "test" / "part-00000.parquet")
    assert slices(dataset, "test", "v")[0] == ["17 ids, each in < 10 rows"]
    pq.write_table(table, tmp_path / "test" / "part-00000.parquet")
    names, at_N = slices(dataset, "test", "q")
    assert names == ["missing", "≤ 1.5", "≤ 4", "> 4"]
    assert at_N.tolist() == [3, 1, 1, 0, 2, 1, 1]

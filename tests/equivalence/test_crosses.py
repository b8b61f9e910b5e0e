"""Logs with crosses: what a cross knows, in any form of the log, is what predict and a service
know.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.analysis.slices import slices
from sparrow.core import UserError
from sparrow.features.crosses import crossed
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.hashing import hash_ids, hashes_of
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import typed
from sparrow.features.words import KEPT
from sparrow.features.words import load as load_words
from sparrow.metrics import auc
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.serving.requests import Encoder
from sparrow.trained.predict import predict
from sparrow.training import train
from tests.runs import run_of

TABLES = {
    "user": Encoding(),
    "item": Encoding(),
    "pair": Encoding(min_count=1),
    "when": Encoding(),
    "hashed": Encoding(kind="hash"),
}
SCHEMA = Schema(
    columns={
        "click": Column(kind="label"),
        "user": Column(kind="categorical", table="user"),
        "item": Column(kind="categorical", table="item", missing=("?",)),
        "city": Column(kind="ignore"),
        "hour": Column(kind="categorical", table="when", source="ts", part="hour"),
        "pair": Column(kind="categorical", table="pair", cross=("user", "item")),
        "three": Column(kind="categorical", table="hashed", cross=("city", "hour", "item")),
    },
    encodings=TABLES,
)


def raw(rows: int = 3000, seed: int = 0) -> dict[str, Any]:
    """Clicks that hang on the pair alone: neither user nor item tells anything."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 12, rows), rng.integers(0, 12, rows)
    click = (user * 7 + item * 5) % 12 % 2 ^ (rng.random(rows) < 0.1)
    return {
        "click": click.astype(np.int64).tolist(),
        "user": (user + 3).tolist(),
        "item": ["?" if i % 50 == 7 else f"i{x}" for i, x in enumerate(item.tolist())],
        "city": [
            None if i % 40 == 3 else f"c {x}"
            for i, x in enumerate(rng.integers(0, 5, rows).tolist())
        ],
        "ts": (1_700_000_000 + np.arange(rows) * 600).tolist(),
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("crosses")
    pq.write_table(pa.table(raw()), place / "log.parquet")
    data.prepare([place / "log.parquet"], place / "prepared", schema=SCHEMA)
    return place / "prepared"


def ids(prepared: Path, name: str, part: str = "train") -> np.ndarray:
    return data.open(prepared).column(name, part).to_numpy()


def test_a_pair_is_one_id_and_missing_where_one_of_it_is(prepared: Path) -> None:
    dataset = data.open(prepared)
    assert dataset.schema.encodings["pair"].kind == "vocabulary"
    assert dataset.schema.encodings["pair"].distinct == 12 * 12
    columns = [dataset.column(name, "train").to_numpy() for name in ("user", "item", "pair")]
    user_N, item_N, pair_N = columns
    assert ((pair_N == MISSING) == (item_N == MISSING)).all() and (item_N == MISSING).any()
    known = np.min(columns, axis=0) > UNKNOWN
    pairs = {(u, i) for u, i in zip(user_N[known], item_N[known], strict=True)}
    assert (
        len(pairs)
        == len(set(pair_N[known]))
        == len({(u, i, p) for u, i, p in zip(*(x[known] for x in columns), strict=True)})
    )


def test_the_hash_hangs_on_order_and_on_each_part() -> None:
    one, two = hash_ids(pa.array(["a", "b", None])), hash_ids(pa.array([1, 2, 3]))
    found = crossed([one, two])
    assert found[2] == 0 and (found[:2] > 0).all() and len(set(found.tolist())) == 3
    assert not set(found[:2].tolist()) & {
        *crossed([two, one]).tolist(),
        *crossed([one, two, two]).tolist(),
        *one.tolist(),
    }
    assert (
        crossed([hash_ids(pa.array(["12"])), two[:1]])[0]
        == crossed([hash_ids(pa.array([12])), two[:1]])[0]
    )
    many = hash_ids(pa.array(np.arange(300)))
    assert len(set(crossed([np.repeat(many, 300), np.tile(many, 300)]).tolist())) == 90_000


def test_slices_by_a_cross_have_words(prepared: Path) -> None:
    """Each slice is named by the ids of its rows, and only of these."""
    table, dataset, columns = (
        pq.read_table(prepared.parent / "log.parquet"),
        data.open(prepared),
        raw(),
    )
    words = {name: load_words(prepared, name) for name in ("pair", "three")}
    assert 130 < len(words["pair"]) <= 144 and len(words["three"]) == KEPT
    coded = typed(SCHEMA, table, training=True)
    hours = [ts // 3600 % 24 for ts in columns["ts"]]
    told = {"pair": ("user", "item"), "three": ("city", "hour", "item")}
    for name, parts in told.items():
        hashes = hashes_of(coded[name].dictionary_decode()).tolist()
        for i, key in enumerate(hashes):
            texts = [hours[i] if part == "hour" else columns[part][i] for part in parts]
            assert words[name].get(key, text := " & ".join(map(str, texts))) == text
    values, _ = slices(dataset, "train", "pair")
    assert all(
        re.fullmatch(r"\d+ & i\d+", value)
        for value in values[:7]
        if value not in ("missing", "unknown")
    ), values


def test_text_is_parquet_and_the_other_columns_stay(prepared: Path, tmp_path: Path) -> None:
    columns = raw()
    lines = [
        ",".join(columns),
        *(
            ",".join("" if x is None else str(x) for x in row)
            for row in zip(*columns.values(), strict=True)
        ),
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    text = data.prepare([tmp_path / "log.csv"], tmp_path / "text", schema=SCHEMA)
    whole = data.open(prepared)
    assert (
        text.schema.encodings == whole.schema.encodings
        and text.schema.encodings["user"].kind == "range"
    )
    without = replace(
        SCHEMA,
        columns={n: c for n, c in SCHEMA.columns.items() if not c.cross},
        encodings={n: TABLES[n] for n in ("user", "item", "when")},
    )
    plain = data.prepare([tmp_path / "log.csv"], tmp_path / "plain", schema=without)
    for part in ("train", "valid", "test"):
        tables = [
            pq.read_table(place / part / "part-00000.parquet")
            for place in (tmp_path / "text", prepared, tmp_path / "plain")
        ]
        assert tables[0].equals(tables[1]) and tables[0].select(tables[2].column_names).equals(
            tables[2]
        )
    assert plain.schema.encodings["user"] == text.schema.encodings["user"]


def test_what_only_the_pair_tells_is_learnt_predicted_and_served(
    prepared: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "model.name": "logistic",
        "data.batch_size": 100,
        "loop.epochs": 4,
        "tables.rule.lr": 0.5,
    }
    train(run_of(prepared, tmp_path / "run", **changes))
    columns = raw(800, seed=3)
    columns["user"][:3], columns["item"][:3] = [None, 5, 999], ["i1", None, "i1"]
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    predict(tmp_path / "run", [tmp_path / "new.parquet"], tmp_path / "scores.parquet")
    scores_N = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    assert float(auc(torch.tensor(scores_N), torch.tensor(columns["click"]))) > 0.8
    export(tmp_path / "run", tmp_path / "model", [tmp_path / "new.parquet"])
    scorer = load(tmp_path / "model")
    assert (
        set(scorer.encoder.sources) == {"user", "item", "ts", "city"} == set(scorer.encoder.kinds)
    )
    assert {"pair", "three"} <= set(scorer.encoder.by_definition)
    given = {name: columns[name] for name in scorer.encoder.sources}
    assert np.abs(scorer.score(given)[:, 0] - scores_N).max() < 1e-6
    defined = Encoder(scorer.transforms, "reference").batch(given)
    assert torch.equal(defined.ids.values_N, scorer.encoder.batch(given).ids.values_N)
    for user in (
        {"user": 4},
        {"user": 4, "ts": 1_700_000_000},
        {"city": None},
        {"item": "i3", "user": 2, "city": "c 1", "ts": 5},
    ):
        rest = {name: of for name, of in given.items() if name not in user}
        alike = scorer.score(given | {name: [value] * 800 for name, value in user.items()})
        for candidates in (
            rest,
            [dict(zip(rest, row, strict=True)) for row in zip(*rest.values(), strict=True)],
        ):
            if rest:
                assert np.abs(scorer.rank(user, candidates) - alike).max() < 1e-6
        assert scorer.rank(user, []).shape == (0, 1)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"cross": ("user",)}, r"cross: \['user'\]; name two columns or more"),
        ({"cross": ("user", "user")}, r"cross: .*each once"),
        ({"cross": ("user", "itm")}, r"columns\.x\.cross: no column 'itm'; did you mean 'item'\?"),
        (
            {"cross": ("user", "n")},
            r"columns\.x\.cross: 'n' is of kind numeric; name columns with one id in a row",
        ),
        ({"cross": ("user", "tags")}, r"'tags' is of kind list"),
        ({"cross": ("user", "bucket")}, r"'bucket' is of quantiles"),
        ({"cross": ("user", "pair")}, r"'pair' is a cross"),
        (
            {"cross": ("user", "item"), "source": "user"},
            r"source: a cross is made of what its columns are",
        ),
    ],
)
def test_what_cannot_be_crossed_is_said(column: dict[str, Any], words: str) -> None:
    more = {
        "n": Column(kind="numeric"),
        "tags": Column(kind="list", table="item"),
        "bucket": Column(kind="categorical", table="b", quantiles=4),
    }
    with pytest.raises(UserError, match=words):
        columns = {
            **SCHEMA.columns,
            **more,
            "x": Column(kind="categorical", table="pair", **column),
        }
        replace(SCHEMA, columns=columns, encodings=TABLES | {"b": Encoding()})
    with pytest.raises(
        UserError, match=r"encodings\.pair\.kind: 'range' numbers integers, and 'pair' is a cross"
    ):
        replace(SCHEMA, encodings=TABLES | {"pair": Encoding(kind="range")})


def test_a_log_that_lacks_a_part_is_refused(prepared: Path, tmp_path: Path) -> None:
    pq.write_table(
        pa.table({n: x for n, x in raw().items() if n != "city"}), tmp_path / "log.parquet"
    )
    with pytest.raises(UserError, match=r"columns\.three: no column 'city' in"):
        data.prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=SCHEMA)

"""Small made logs in the form that each recipe reads, the same on every machine."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.features.schema import Schema
from sparrow.trained.run import Run

RECIPES = Path(__file__).parents[2] / "recipes"
DAY_MS = 86_400_000


def of_recipe(recipe: str) -> str:
    """The name of the log that it reads."""
    return Path(Run.load(RECIPES / f"{recipe}.toml").data.path).name


def prepared(log: str, folder: Path, rows: int = 4000) -> Path:
    """The log that recipes/*.toml call data/`log`, made and prepared in `folder`."""
    raw, schema, label = {
        "demo": (_demo, None, None),
        "census": (_census, None, "c41"),
        "criteo": (_criteo, None, None),
        "criteo_tb": (_criteo, None, None),
        "movielens": (_movielens, "movielens", None),
        "globo": (_globo, "globo", None),
        "globo_sessions": (_globo, "globo_sessions", None),
    }[log]
    folder.mkdir(parents=True, exist_ok=True)
    path = raw(folder, rows, np.random.Generator(np.random.PCG64(1)))
    read = Schema.load(RECIPES / f"{schema}.schema.toml") if schema else None
    return data.prepare([path], folder / log, schema=read, label=label).out


def _demo(folder: Path, rows: int, random: np.random.Generator) -> Path:
    return generate(folder / "demo.parquet", rows=rows, users=300, items=200).out


def _census(folder: Path, rows: int, random: np.random.Generator) -> Path:
    """41 columns of words and numbers, and an income."""
    age, columns = random.integers(16, 90, rows), [random.integers(0, 6, rows) for _ in range(40)]
    rich = random.random(rows) < np.where(columns[3] == 2, 0.3, 0.05)
    path = folder / "census.data.gz"
    with gzip.open(path, "wt") as out:
        for row in range(rows):
            words = [f"{age[row]}", *(f" word {column[row]}" for column in columns)]
            out.write(",".join([*words, " 50000+." if rich[row] else " - 50000."]) + "\n")
    return path


def _criteo(folder: Path, rows: int, random: np.random.Generator) -> Path:
    """A label, 13 counts and 26 hexadecimal categories, some of them missing."""
    counts = random.geometric(0.1, (rows, 13)) - 1
    ids = random.zipf(1.3, (rows, 26)) % 500
    label = random.random(rows) < np.where(ids[:, 0] == 1, 0.4, 0.15)
    there = random.random((rows, 39)) > 0.1
    path = folder / "criteo.tsv"
    with path.open("w") as out:
        for row in range(rows):
            cells = [
                *map(str, counts[row]),
                *(f"{0x9E3779B1 * (i + 1) % (1 << 32):08x}" for i in ids[row].tolist()),
            ]
            kept = (cell if kept else "" for cell, kept in zip(cells, there[row], strict=True))
            out.write("\t".join([str(int(label[row])), *kept]) + "\n")
    return path


def _movielens(folder: Path, rows: int, random: np.random.Generator) -> Path:
    """User, movie, rating, second."""
    user, movie = random.integers(1, 200, rows), random.integers(1, 300, rows)
    rating = np.clip(np.round(random.normal(2.5 + user % 3, 1.0)), 1, 5).astype(int)
    columns = np.stack([user, movie, rating, 880_000_000 + np.arange(rows)], axis=1)
    path = folder / "u.data"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in columns.tolist()))
    return path


def _globo(folder: Path, rows: int, random: np.random.Generator) -> Path:
    """Requests of five candidates each, in sessions of two."""
    requests = rows // 5
    request = np.repeat(np.arange(requests), 5)
    session = request // 2

    def lists(least: int) -> pa.Array:
        found = [
            random.integers(1, 300, random.integers(least, 6)).astype(np.int32)
            for _ in range(requests)
        ]
        return pa.array([found[i] for i in request], pa.list_(pa.int32()))

    article = random.integers(1, 300, len(request)).astype(np.int32)
    table: dict[str, object] = {
        "request_id": request,
        "session_id": session,
        "ts": 1_506_826_800_000 + request * (DAY_MS // requests),
        "label": (
            (random.random(len(request)) < np.where(article % 3 == 0, 0.4, 0.1)).astype(np.int8)
        ),
        "article": article,
        "article_clicks_1h": random.geometric(0.05, len(request)).astype(np.float32),
        "article_age_h": random.exponential(20, len(request)).astype(np.float32),
        "user": (session % 97).astype(np.int32),
        "session_clicks": lists(1),
        "user_history": lists(0),
    }
    for name, values in (
        ("environment", 4),
        ("device", 5),
        ("os", 8),
        ("country", 9),
        ("region", 20),
        ("referrer", 7),
    ):
        table[name] = (random.integers(0, values, session.max() + 1)[session]).astype(np.int32)
    table["hour"] = (request * 24 // requests).astype(np.int8)
    path = folder / "requests.parquet"
    pq.write_table(pa.table(table), path)
    return path

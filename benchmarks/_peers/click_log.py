"""A click log with a known answer: 13 numbers, 26 string ids, a label drawn from a true
probability.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
from _peers.tiny import sized

NUMERIC = [f"I{i}" for i in range(1, 14)]
CATEGORICAL = [f"C{i}" for i in range(1, 27)]
SHARES = (("train", 0.8), ("valid", 0.1), ("test", 0.1))
ROWS = 250_000

Array = np.ndarray


def write(folder: Path, rows: int = ROWS, seed: int = 0) -> dict[str, float]:
    """train.csv, valid.csv and test.csv in a folder; returns the facts about them, `auc` being the
    true probability's.

    Vocabularies are log-spaced from 10 to 100,000 and ids Zipf 1.05. The logit sums an effect of
    every id, rare or not, products of six pairs of ids, and linear, bent and stepped effects of the
    numbers; a quarter of the rows is clicked.
    """
    rows, random = sized(rows, 600), np.random.default_rng(seed)
    numbers_NC = random.standard_normal((rows, len(NUMERIC))).astype(np.float32)
    ids = [_zipf(random, rows, round(v)) for v in np.geomspace(10, 100_000, len(CATEGORICAL))]
    logit_N = (
        0.48 * _numeric_effect(random, numbers_NC)
        + 1.2 * _id_effects(random, ids)
        + 0.75 * _pairs(random, ids)
    )
    logit_N -= _shift_for(logit_N, rate=0.25)
    p_N = 1 / (1 + np.exp(-logit_N))
    label_N = (random.random(rows) < p_N).astype(np.int8)
    columns = {"label": pa.array(label_N)}
    columns |= {name: pa.array(np.round(numbers_NC[:, i], 4)) for i, name in enumerate(NUMERIC)}
    for name, column in zip(CATEGORICAL, ids, strict=True):
        words = pa.array(
            [
                f"{name.lower()}_{i * 2_654_435_761 % 2**32:08x}"
                for i in range(int(column.max()) + 1)
            ]
        )
        columns[name] = words.take(pa.array(column))
    table, begin = pa.table(columns), 0
    folder.mkdir(parents=True, exist_ok=True)
    for part, share in SHARES:
        pc.write_csv(
            table.slice(begin, round(share * rows)),
            folder / f"{part}.csv",
            pc.WriteOptions(quoting_style="none"),
        )
        begin += round(share * rows)
    train = slice(0, round(SHARES[0][1] * rows))
    test = slice(rows - round(SHARES[2][1] * rows), rows)
    return {
        "rows": rows,
        "distinct_ids": sum(len(np.unique(column[train])) for column in ids),
        "clicks": float(label_N.mean()),
        "auc": _auc(p_N[test], label_N[test]),
    }


def _zipf(random: np.random.Generator, rows: int, vocabulary: int) -> Array:
    weights = 1 / np.arange(1, vocabulary + 1) ** 1.05
    return np.searchsorted(np.cumsum(weights / weights.sum())[:-1], random.random(rows))


def _numeric_effect(random: np.random.Generator, x_NC: Array) -> Array:
    parts = [x_NC[:, c] for c in range(5)] + [np.abs(x_NC[:, c]) for c in range(5, 9)]
    parts += [2.0 * (x_NC[:, c] > 0.5) for c in range(9, 12)] + [x_NC[:, 0] * x_NC[:, 12]]
    return (
        sum(
            sign * part
            for sign, part in zip(random.choice([-1, 1], len(parts)), parts, strict=True)
        )
        / 2
    )


def _id_effects(random: np.random.Generator, ids: list[Array]) -> Array:
    return sum(random.standard_normal(int(c.max()) + 1)[c] for c in ids) / np.sqrt(len(ids))


def _pairs(random: np.random.Generator, ids: list[Array]) -> Array:
    total = np.zeros(len(ids[0]))
    for f, g in ((0, 9), (2, 14), (4, 11), (6, 17), (8, 20), (12, 23)):
        left, right = (random.standard_normal((int(ids[i].max()) + 1, 2))[ids[i]] for i in (f, g))
        total += (left * right).sum(1) / np.sqrt(12)
    return total


def _shift_for(logit_N: Array, rate: float) -> float:
    """What to take from the logits so that their probabilities average `rate`."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if (1 / (1 + np.exp(middle - logit_N))).mean() > rate else (low, middle)
        )
    return middle


def _auc(score_N: Array, label_N: Array) -> float:
    ranks = np.empty(len(score_N))
    ranks[np.argsort(score_N)] = np.arange(1, len(score_N) + 1)
    positives = int(label_N.sum())
    negatives = len(label_N) - positives
    return float(
        (ranks[label_N == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    )

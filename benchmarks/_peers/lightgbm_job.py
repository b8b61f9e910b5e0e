"""LightGBM as a user would try it, a process of its own so that time and memory are the whole
job's. Not for import.

PYTHON lightgbm_job.py SPEC.json    # what small_logs.py writes, "encoding": "target" | "native", "seed" and "out":
                                    #  the file for scores and labels of the test part
"""

from __future__ import annotations

import json
import sys
from typing import TypeAlias

import frames
import lightgbm
import numpy as np
import pandas as pd
from sklearn.model_selection import KFold

Frame: TypeAlias = pd.DataFrame
SMALL = 100  # lists of so many different values become a column for each of them


def counts_and_means(x: pd.Series, y: pd.Series, prior: float) -> tuple[pd.Series, pd.Series]:
    """Of each value of a column, how often it occurs and its mean label, drawn towards the prior by
    20 rows.
    """
    grouped = y.groupby(x, observed=True, dropna=False).agg(["count", "sum"])
    return grouped["count"], (grouped["sum"] + 20 * prior) / (grouped["count"] + 20)


def target_encoded(parts: list[Frame], label: str, columns: list[str], seed: int) -> list[Frame]:
    """Columns become the mean label of their value (of training rows in other folds) and how often
    it occurs.
    """
    train, y = parts[0], parts[0][label].astype(np.float64)
    prior = float(y.mean())
    folds = list(KFold(5, shuffle=True, random_state=seed).split(train))
    made = [part.drop(columns=columns) for part in parts]
    for name in columns:
        count, mean = counts_and_means(train[name], y, prior)
        for part, out in zip(parts, made, strict=True):
            out[name + "_count"] = part[name].map(count).fillna(0).astype(np.float32)
            out[name + "_mean"] = part[name].map(mean).fillna(prior).astype(np.float32)
        outside = np.empty(len(train), np.float32)
        for rest, fold in folds:
            _, mean = counts_and_means(train[name].iloc[rest], y.iloc[rest], prior)
            outside[fold] = train[name].iloc[fold].map(mean).fillna(prior)
        made[0][name + "_mean"] = outside
    return made


def native(parts: list[Frame], columns: list[str]) -> list[Frame]:
    """Columns become pandas categories of the training part."""
    made = [part.copy() for part in parts]
    for name in columns:
        known = pd.Index(parts[0][name].dropna().unique())
        for part in made:
            codes = known.get_indexer(part[name])
            part[name] = pd.Categorical.from_codes(codes, categories=known)
    return made


def without_lists(parts: list[Frame], columns: list[str]) -> tuple[list[Frame], list[str]]:
    """A list of few different values becomes a column for each, another one its last id and length.

    Returns the parts and the names of columns of last ids.
    """
    ids = []
    for name in columns:
        values = parts[0][name].explode().dropna().unique()
        for part in parts:
            lists = part.pop(name)
            if len(values) <= SMALL:
                for value in values:
                    part[f"{name}_{value}"] = np.array([value in entry for entry in lists], np.int8)
            else:
                part[name + "_length"] = lists.str.len().astype(np.float32)
                part[name] = lists.str[-1]
        ids += [name] * (len(values) > SMALL)
    return parts, ids


def main() -> None:
    """Read, encode, train with early stopping, predict the test part."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    label = spec["label"]
    parts, ids = without_lists(frames.parts(spec), spec["lists"])
    columns = spec["categorical"] + ids
    made = (
        target_encoded(parts, label, columns, spec["seed"])
        if spec["encoding"] == "target"
        else native(parts, columns)
    )
    sets = [
        lightgbm.Dataset(part.drop(columns=[label]), part[label], free_raw_data=False)
        for part in made[:2]
    ]
    settings = {
        "objective": "binary",
        "metric": "binary_logloss",
        "verbosity": -1,
        "learning_rate": 0.05,
    }
    settings |= {
        "seed": spec["seed"],
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "feature_fraction": 0.8,
    }
    model = lightgbm.train(
        settings,
        sets[0],
        num_boost_round=2000,
        valid_sets=[sets[1]],
        callbacks=[lightgbm.early_stopping(50, verbose=False)],
    )
    score = model.predict(made[2].drop(columns=[label]), num_iteration=model.best_iteration)
    np.save(spec["out"], np.stack([score, made[2][label].to_numpy(np.float64)]))


if __name__ == "__main__":
    main()

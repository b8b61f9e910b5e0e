"""Logistic regression as a careful user writes it in a quarter of an hour, a process of its own.
Not for import.

PYTHON logistic_job.py SPEC.json    # as lightgbm_job.py, without an encoding and a seed

Values of categorical columns that occur three times or more are one-hot, and lists are multi-hot.
Rarer and unknown values share a column. Numbers are standardised, after log1p where that is
possible and they are skewed. A missing one is the median, beside a column that says so. C is the
one with the least log loss on the validation part.
"""

from __future__ import annotations

import json
import sys
from typing import TypeAlias

import frames
import numpy as np
import pandas as pd
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import OneHotEncoder, StandardScaler

Frame: TypeAlias = pd.DataFrame
Csr: TypeAlias = sparse.csr_matrix
CS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
FREQUENCY = 3
SKEWED = 1.0


def one_hot(parts: list[Frame], columns: list[str]) -> list[Csr]:
    """Categorical columns."""
    texts = [part[columns].astype(object).fillna("").astype(str) for part in parts]
    encoder = OneHotEncoder(
        handle_unknown="infrequent_if_exist", min_frequency=FREQUENCY, dtype=np.float32
    )
    encoder.fit(texts[0])
    return [encoder.transform(text) for text in texts]


def multi_hot(parts: list[Frame], column: str) -> list[Csr]:
    """A column of lists."""
    encoder = CountVectorizer(analyzer=list, min_df=FREQUENCY, binary=True, dtype=np.float32)
    encoder.fit(parts[0][column])
    return [encoder.transform(part[column]) for part in parts]


def standardised(parts: list[Frame], columns: list[str]) -> list[Csr]:
    """Columns of numbers."""
    numbers = [part[columns].astype(np.float64) for part in parts]
    skewed = [c for c in columns if numbers[0][c].min() >= 0 and numbers[0][c].skew() > SKEWED]
    for number in numbers:
        number[skewed] = np.log1p(number[skewed].clip(lower=0))
    imputer, scaler = SimpleImputer(strategy="median", add_indicator=True), StandardScaler()
    scaler.fit(imputer.fit_transform(numbers[0]))
    return [
        Csr(scaler.transform(imputer.transform(number)).astype(np.float32)) for number in numbers
    ]


def fitted(x: list[Csr], y: list[np.ndarray]) -> np.ndarray:
    """Scores of the test part by the best C: from strong regularisation to weak, until it has been
    worse twice.
    """
    model = LogisticRegression(max_iter=300, warm_start=True)
    best, score, worse = np.inf, np.zeros(0), 0
    for c in CS:
        loss = log_loss(y[1], model.set_params(C=c).fit(x[0], y[0]).predict_proba(x[1])[:, 1])
        if loss < best:
            best, score, worse = loss, model.predict_proba(x[2])[:, 1], 0
        else:
            worse += 1
        if worse == 2:
            break
    return score


def main() -> None:
    """Read, encode, choose C, predict the test part."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    parts = frames.parts(spec)
    y = [part.pop(spec["label"]).to_numpy(np.float64) for part in parts]
    categorical = spec["categorical"] + frames.clock(spec)
    numbers = [name for name in parts[0] if name not in categorical + spec["lists"]]
    blocks = [one_hot(parts, categorical)] if categorical else []
    blocks += [multi_hot(parts, name) for name in spec["lists"]]
    blocks += [standardised(parts, numbers)] if numbers else []
    x = [sparse.hstack(part, format="csr") for part in zip(*blocks, strict=True)]
    np.save(spec["out"], np.stack([fitted(x, y), y[2]]))


if __name__ == "__main__":
    main()

"""Fit a map of ids to rows on the earliest share of training: learned hash functions (arXiv
2203.15837).

The abstract of the paper says what the signals are, access frequency and a learned vector of few
numbers, and no more. So the rest is this file's: the hottest ids have a row each, and the others
share rows with those of alike vectors.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from sparrow.core import Batch
from sparrow.core.errors import UserError, require, suggest
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Numbering, TableChoices
from sparrow.embeddings.addressing.hashed import by_hash
from sparrow.embeddings.addressing.learned import Map
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import binary_cross_entropy
from sparrow.models import fm, logistic
from sparrow.trained.build import tables_of
from sparrow.trained.run import batch_size_for

By = Literal["both", "counts", "vectors"]
_ALWAYS = 2  # a missing id and an unknown one are no ids: each keeps its row


def fit(
    dataset: Dataset,
    table: str,
    rows: int,
    progress: Progress,
    *,
    share: float = 0.1,
    numbers: int = 2,
    private: float = 0.5,
    by: By = "both",
    seed: int = 0,
) -> Map:
    """Fit a map of a table's ids on the earliest training rows, in the log's order.

    Args:
        dataset: the prepared log.
        table: whose ids.
        rows: of the table that has this map.
        progress: shows how far it is.
        share: of the training rows that are read.
        numbers: of the vectors that a factorisation machine learns of them, 1 to 4; with 1,
            logistic regression does.
        private: the share of the rows that the hottest ids have alone, where counts are used.
        by: what decides. "counts": the hottest ids have rows of their own, others share the rest by
            their hash. "vectors": all ids share rows with ids of alike vectors. "both": the hottest
            have rows of their own, others share with alike ones.
        seed: of the vectors' first values.

    Raises:
        UserError: for a table that is not there, whose ids are hashes, or a number out of range.
    """
    schema = dataset.schema
    if table not in schema.encodings:
        raise UserError(f"--fit: no table {table!r}{suggest(table, schema.encodings)}")
    ids = Numbering.of(schema.encodings[table])
    if not ids.is_numbered:
        raise UserError(
            f"--fit: the ids of table {table!r} are hashes, which no map can list; use hashed"
        )
    require(least=_ALWAYS + 1, most=ids.rows, rows=rows)
    require(least=1, most=4, numbers=numbers)
    require(least=0, most=1, private=private)
    earliest = read_earliest(
        dataset, [table], progress, share=share, numbers=0 if by == "counts" else numbers, seed=seed
    )
    return earliest.map_of(table, ids, rows, private, by)


@dataclass(frozen=True, eq=False)
class Early:
    """What the earliest training rows say of the ids of some tables.

    Args:
        log: its fingerprint.
        rows: how many were read.
        count_S: table -> how often each id occurs, int64 [S].
        vectors_SD: table -> alike ids have alike vectors; none without a learner.
    """

    log: str
    rows: int
    count_S: dict[str, np.ndarray]
    vectors_SD: dict[str, np.ndarray]

    def map_of(
        self, table: str, ids: Numbering, rows: int, private: float = 0.5, by: By = "both"
    ) -> Map:
        """Returns a map of a table's ids. ids: how they are numbered. Others: see `fit`."""
        row_S, alone = map_ids(self.count_S[table], self.vectors_SD[table], rows, private, by)
        narrow = np.int16 if rows <= 1 << 15 else np.int32
        return Map(
            torch.from_numpy(row_S.astype(narrow)), rows, alone, self.rows, ids.digest, self.log
        )


def read_earliest(
    dataset: Dataset,
    tables: Collection[str],
    progress: Progress,
    *,
    share: float = 0.1,
    numbers: int = 2,
    seed: int = 0,
) -> Early:
    """Read the earliest training rows, once. Returns what they say.

    Args:
        dataset: the prepared log.
        tables: whose ids, which are numbered.
        progress: shows how far it is.
        share: see `fit`.
        numbers: see `fit`; with 0 nothing is learnt.
        seed: see `fit`.
    """
    require(above=0, most=1, share=share)
    schema = dataset.schema
    last = max(1, math.floor(share * dataset.rows("train")))
    columns = [
        (name, table) for name in schema.sparse if (table := schema.columns[name].table) in tables
    ]
    learner = _Learner(dataset, numbers, seed) if numbers else None
    count_S = {
        table: torch.zeros(schema.encodings[table].rows or 0, dtype=torch.int64) for table in tables
    }
    rows_read = 0
    for batch in dataset.loader(batch_size_for(last), split="train", dedup="off"):
        batch = batch.part(0, min(batch.batch_size, last - rows_read))
        for name, table in columns:
            count_S[str(table)] += torch.bincount(
                batch.ids[name].values_N.long(), minlength=len(count_S[str(table)])
            )
        if learner is not None:
            learner.learn(batch)
        rows_read += batch.batch_size
        progress("read training", rows_read, last)
        if rows_read >= last:
            break
    counts = {table: x_S.numpy() for table, x_S in count_S.items()}
    vectors = {}
    for name, x_S in counts.items():
        vectors[name] = np.zeros((len(x_S), 0)) if learner is None else learner.vectors(name)
    return Early(dataset.fingerprint, last, counts, vectors)


def map_ids(
    count_S: np.ndarray, vectors_SD: np.ndarray, rows: int, private: float, by: By
) -> tuple[np.ndarray, int]:
    """Returns the row of each id, int64 [S], and how many rows are private.

    Args:
        count_S: how often each id occurs.
        vectors_SD: alike ids have alike vectors.
        rows: of the table.
        private: see `fit`.
        by: see `fit`.
    """
    size = len(count_S)
    alone = _ALWAYS if by == "vectors" else min(max(_ALWAYS, round(private * rows)), rows - 1)
    rest = np.argsort(-count_S[_ALWAYS:], kind="stable") + _ALWAYS
    row_S = by_hash(torch.arange(size), alone, rows).numpy()
    row_S[:_ALWAYS] = np.arange(_ALWAYS)
    row_S[rest[: alone - _ALWAYS]] = np.arange(_ALWAYS, _ALWAYS + len(rest[: alone - _ALWAYS]))
    shared = rest[alone - _ALWAYS :]
    present = shared[count_S[shared] > 0]  # the others go by their hash
    if by != "counts" and len(present):
        counts = count_S[present].astype(np.float64)
        weights = counts + counts.mean()  # who was seldom seen early may be seen often later
        row_S[present] = alone + clusters(
            vectors_SD[present].astype(np.float64), weights, rows - alone
        )
    return row_S, alone


def clusters(x_ND: np.ndarray, weight_N: np.ndarray, count: int) -> np.ndarray:
    """Returns which of at most `count` clusters each point is in, int64 [N]. Clusters weigh about
    the same.

    The heaviest one is cut in two at its weighted median, along its longest axis, until there are
    enough. So every row of a table is looked up about as often, as by a hash. With the least
    squares instead (k-means) most of the ids that occur seldom shared one row: little is known of
    them, and so their vectors are alike.

    Args:
        x_ND: the points.
        weight_N: > 0, of each.
        count: how many clusters.
    """
    order = itertools.count()  # of equal weights the first comes first
    cells = [(-float(weight_N.sum()), next(order), np.arange(len(x_ND)))]
    while len(cells) < min(count, len(x_ND)):
        _, _, at = heapq.heappop(cells)
        if len(at) == 1:  # it stays as heavy as it is, and is never cut
            heapq.heappush(cells, (0.0, next(order), at))
            continue
        w_M = weight_N[at]
        squares_D = w_M @ (x_ND[at] - w_M @ x_ND[at] / w_M.sum()) ** 2
        at = at[np.argsort(x_ND[at, int(squares_D.argmax())], kind="stable")]
        mass_M = np.cumsum(weight_N[at])
        cut = int(np.clip(np.searchsorted(mass_M, mass_M[-1] / 2) + 1, 1, len(at) - 1))
        for half in (at[:cut], at[cut:]):
            heapq.heappush(cells, (-float(weight_N[half].sum()), next(order), half))
    cluster_N = np.empty(len(x_ND), np.int64)
    for number, (_, _, at) in enumerate(cells):
        cluster_N[at] = number
    return cluster_N


class _Learner:
    """A factorisation machine, or logistic regression, that reads rows once, and the vectors it has
    for ids.
    """

    def __init__(self, dataset: Dataset, numbers: int, seed: int) -> None:
        config: Any = logistic.Config() if numbers == 1 else fm.Config(dim=numbers - 1)
        schema = dataset.schema
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # small first values: what an id has not learnt should not say whom it is like
            choices = TableChoices(rule=rowwise_adagrad.Config(lr=0.1), init_scale=0.01, seed=seed)
            self.model = config.build(schema, choices)
        self.tables = {
            spec.name: tables for tables in tables_of(self.model) for spec in tables.specs
        }
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def learn(self, batch: Batch) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        binary_cross_entropy(self.model(batch), batch).backward()
        self.optimizer.step()

    def vectors(self, table: str) -> np.ndarray:
        """Returns the vectors of a table's ids, [S, numbers]."""
        vectors: np.ndarray = self.tables[table].record(table).weight.detach().numpy()
        return vectors

"""Which features change together, and how seldom: measured, for a person to choose dedup groups
from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparrow.core.arrays import Bools
from sparrow.core.errors import UserError
from sparrow.data.batches.parts import open_files, read_groups
from sparrow.features.runs import begins, bits
from sparrow.features.schema import weights_of

if TYPE_CHECKING:  # it imports torch, which `sparrow prepare` does without
    from sparrow.data.batches.dataset import Dataset

# rows for a run of equal ones, from which on a group is worth a line in a schema (RecD)
PROPOSED = 1.5
TOGETHER = 1.25  # a feature joins a group when that makes at most so many more runs of either


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What is repeated from row to row of a clustered log.

    rows, sessions: how many were looked at (a session counts once an hour). equal: feature -> share
    of rows that equal the row before, among those after another of their session. runs: feature ->
    runs of equal rows. groups: the proposed feature groups; the features of each change together,
    and each has rows / runs >= PROPOSED. group_runs: proposed group -> runs of equal rows.
    """

    rows: int
    sessions: int
    equal: dict[str, float]
    runs: dict[str, int]
    groups: dict[str, tuple[str, ...]]
    group_runs: dict[str, int]


def repeats(dataset: Dataset, split: str = "train") -> Repeats:
    """Returns what is repeated in a part of a log that was prepared with `cluster`. Measures row
    group by row group.

    Raises:
        UserError: for a log that is not clustered, and for a part without rows.
    """
    schema = dataset.schema
    if schema.cluster is None:
        raise UserError(
            f"{dataset.path}: its sessions do not stand together; prepare it with --cluster-by"
        )
    features = (*schema.dense, *schema.sparse)
    # rows that equal the one before in both
    same_FF = np.zeros((len(features), len(features)), np.int64)
    rows = sessions = 0
    for first_N, equal_NF in _equal(dataset, split, features):
        numbers_NF = equal_NF.astype(np.float32)
        same_FF += (numbers_NF.T @ numbers_NF).round().astype(np.int64)
        rows = rows + len(first_N)
        sessions = sessions + int(first_N.sum())
    if not rows:
        raise UserError(f"{dataset.path / split}: no rows to measure")
    runs_FF = rows - same_FF
    groups: list[list[int]] = []
    # the first of a group changes most often
    for f in sorted(range(len(features)), key=lambda f: -runs_FF[f, f]):
        joined = [g for g in groups if runs_FF[f, g[0]] <= TOGETHER * runs_FF[f, f]]
        if rows >= PROPOSED * runs_FF[f, f]:
            joined[0].append(f) if joined else groups.append([f])
    group_runs = np.full(len(groups), rows)
    for _, equal_NF in _equal(dataset, split, features):
        group_runs -= np.array(
            [equal_NF[:, group].all(1).sum() for group in groups], np.int64
        ).reshape(-1)
    paying = [
        (group, int(n)) for group, n in zip(groups, group_runs, strict=True) if rows >= PROPOSED * n
    ]
    named = {
        f"g{i + 1}": tuple(features[f] for f in sorted(group))
        for i, (group, _) in enumerate(paying)
    }
    return Repeats(
        rows=rows,
        sessions=sessions,
        groups=named,
        runs=dict(zip(features, np.diag(runs_FF).tolist(), strict=True)),
        equal={
            name: int(same_FF[f, f]) / max(rows - sessions, 1) for f, name in enumerate(features)
        },
        group_runs={name: n for name, (_, n) in zip(named, paying, strict=True)},
    )


def _equal(dataset: Dataset, split: str, features: Sequence[str]) -> Iterator[tuple[Bools, Bools]]:
    """Yields for each row group the rows that begin a session, bool [N], and what equals the row
    before, bool [N, F].

    A row that begins a session equals no row before it.
    """
    schema = dataset.schema
    assert schema.cluster is not None
    with open_files(dataset.path / split, schema) as files:
        for number in range(files[None].parquet.num_row_groups):
            table = dataset.rows_of(read_groups(files, [number]))
            first_N = begins([bits(table[schema.cluster.by])], table.num_rows)
            equal_NF = np.empty((table.num_rows, len(features)), np.bool_)
            for f, name in enumerate(features):
                columns = [name, weights_of(name)] if schema.columns[name].weights else [name]
                equal_NF[:, f] = (
                    ~begins([bits(table[column]) for column in columns], table.num_rows) & ~first_N
                )
            yield first_N, equal_NF

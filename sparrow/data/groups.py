"""Which features change together, and how seldom: measured, for a person to choose dedup groups from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparrow.core.errors import UserError
from sparrow.data.loader import Dataset
from sparrow.data.parts import PAYS, opened, read_group
from sparrow.data.runs import begins, bits
from sparrow.data.transformed import weights_of

TOGETHER = 1.25  # a feature joins a group when that makes at most so many more runs of either


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What is repeated from row to row of a clustered log.

    rows, sessions: looked at (a session counts once an hour). equal: feature -> share of the rows behind another of
    their session that equal it. runs: feature -> runs of equal rows. groups: proposed; the features of each change
    together, and each has rows / runs >= PAYS. group_runs: of those.
    """

    rows: int
    sessions: int
    equal: dict[str, float]
    runs: dict[str, int]
    groups: dict[str, tuple[str, ...]]
    group_runs: dict[str, int]


def repeats(dataset: Dataset, split: str = "train") -> Repeats:
    """Measure a part of a log that was prepared with `cluster`, row group by row group; UserError for another log."""
    schema = dataset.schema
    if schema.cluster is None:
        raise UserError(f"{dataset.path}: its sessions do not stand together; prepare it with --cluster-by")
    features = (*schema.dense, *schema.sparse)
    same_FF = np.zeros((len(features), len(features)), np.int64)  # rows that equal the one before in both
    rows = sessions = 0
    with opened(dataset.path / split, schema) as files:
        for number in range(next(iter(files.values())).num_row_groups):
            tables = read_group(files, number)
            count = next(iter(tables.values())).num_rows
            table = dataset.rows_of(tables)
            first_N = begins([bits(table[schema.cluster.by])], count)
            equal_NF = np.empty((count, len(features)), np.float32)
            for f, name in enumerate(features):
                columns = [name, weights_of(name)] if schema.columns[name].weights else [name]
                equal_NF[:, f] = ~begins([bits(table[column]) for column in columns], count) & ~first_N
            same_FF += (equal_NF.T @ equal_NF).round().astype(np.int64)
            rows, sessions = rows + count, sessions + int(first_N.sum())
    runs_FF = rows - same_FF
    runs = dict(zip(features, np.diag(runs_FF).tolist(), strict=True))
    groups: list[list[int]] = []
    for f in sorted(range(len(features)), key=lambda f: -runs_FF[f, f]):  # the first of a group changes most often
        if rows < PAYS * runs_FF[f, f]:
            continue
        for group in groups:
            if runs_FF[f, group[0]] <= TOGETHER * runs_FF[f, f]:
                group.append(f)
                break
        else:
            groups.append([f])
    named = {f"g{i + 1}": tuple(features[f] for f in sorted(group)) for i, group in enumerate(groups)}
    behind = max(rows - sessions, 1)
    return Repeats(
        rows=rows, sessions=sessions, runs=runs, groups=named,
        equal={name: int(same_FF[f, f]) / behind for f, name in enumerate(features)},
        group_runs={name: int(runs_FF[group[0], group[0]]) for name, group in zip(named, groups, strict=True)},
    )  # fmt: skip

"""How high the positives of groups are placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from sparrow.cli import _show


def ranking_table(rows: Sequence[tuple[str, Mapping[str, Any]]], ks: Sequence[int]) -> Table:
    """Returns a table of how high the positives of groups are placed, with a line for each k of a
    row that has groups.

    Args:
        rows: a name and what `evaluate` found.
        ks: what it was found for.
    """
    table = Table(title="within groups", title_justify="left")
    for name in (
        "",
        "groups",
        "without a positive",
        "k",
        "recall@k",
        "ndcg@k",
        "hit rate@k",
        "mrr",
    ):
        table.add_column(name, justify="right" if name else "left")
    for label, values in rows:
        first = (
            escape(label),
            *(f"{values.get(n, 0):,}" for n in ("ranked_groups", "groups_without_positive")),
        )
        for k in sorted(set(ks)) if "mrr" in values else ():
            cells = [_show.figure(values[f"{name}@{k}"]) for name in ("recall", "ndcg", "hit_rate")]
            table.add_row(*first, str(k), *cells, _show.figure(values["mrr"]) if first[0] else "")
            first = ("", "", "")
    return table

"""What the report says of rows: how they are stored, and which ids came and went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparrow.analysis import elements
from sparrow.analysis.usage import TableUse

MOVES = ("admitted", "evicted", "expired", "waiting", "crowded")


def storage_table(results: Mapping[str, Any], tables: Sequence[TableUse]) -> str:
    """Returns how rows are stored, table by table.

    Args:
        results: what a run's results say of its tables.
        tables: these tables.
    """
    rates = results.get("hit_rate", {})
    shares = [elements.share(rates[t.name]) if t.name in rates else "" for t in tables]
    sizes = [elements.size(t.bytes_weight + t.bytes_state) for t in tables]
    lines = [
        [t.name, *t.stored, size, share]
        for t, size, share in zip(tables, sizes, shares, strict=True)
    ]
    words = "bytes: of all that is allocated for the table."
    if any(shares):
        words += (
            " in cache: of the different rows of each training batch, the share that had a frame"
            " when it came."
        )
    header = ["table", "format", "rounding", "state", "cache", "bytes", "in cache"]
    return elements.table(*elements.without_empty_columns(header, lines)) + elements.text(
        words, soft=True
    )


def id_turnover(results: Mapping[str, Any]) -> str:
    """Returns who got rows and who lost them, of tables whose rows come and go. results: as
    `storage_table` takes them.
    """
    lines = []
    for name, ids in results.get("ids", {}).items():
        rows_in_use = f"{ids['rows']:,} of {ids['capacity']:,}"
        age = f"{ids['age']:,.0f}"
        with_row = elements.share(ids["live"] / max(ids["looked_up"], 1))
        moves = [f"{ids[move]:,}" for move in MOVES]
        lines.append([name, rows_in_use, age, with_row, *moves])
    if not lines:
        return ""
    header = ["table", "rows in use", "age", "with a row", *MOVES]
    return elements.table(header, lines) + elements.text(
        "Rows belong to ids that come and go. age: how long a row was not used, on the table's"
        " clock, in the mean. with a row: of the lookups in training. admitted, evicted, expired:"
        " ids that got a row, lost it to others, or did not come for too long. waiting, crowded:"
        " ids of batches that were not admitted yet, or found no row free.",
        soft=True,
    )

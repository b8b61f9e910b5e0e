"""What the report says of rows: how they are stored, and which ids came and went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparrow.analysis import elements
from sparrow.analysis.usage import TableUse


def stored(found: Mapping[str, Any], tables: Sequence[TableUse]) -> str:
    """Returns how rows are stored, table by table.

    Args:
        found: what a run's results say of its tables.
        tables: these tables.
    """
    rates = found.get("hit_rate", {})
    shares = [elements.share(rates[t.name]) if t.name in rates else "" for t in tables]
    sizes = [elements.size(t.bytes_weight + t.bytes_state) for t in tables]
    lines = [[t.name, *t.stored, size, share] for t, size, share in zip(tables, sizes, shares, strict=True)]
    words = "bytes: of all that is allocated for the table."
    if any(shares):
        words += " in cache: of the different rows of each training batch, the share that had a frame when it came."
    header = ["table", "format", "rounding", "state", "cache", "bytes", "in cache"]
    return elements.table(*elements.without_gaps(header, lines)) + elements.text(words, soft=True)


def turnover(found: Mapping[str, Any]) -> str:
    """Returns who got rows and who lost them, of tables whose rows come and go. found: as `stored` takes it."""
    lines = []
    for name, ids in found.get("ids", {}).items():
        moves = [f"{ids[of]:,}" for of in ("admitted", "evicted", "expired", "waiting", "crowded")]
        held, rate = f"{ids['rows']:,} of {ids['capacity']:,}", elements.share(ids["live"] / max(ids["looked_up"], 1))
        lines.append([name, held, f"{ids['age']:,.0f}", rate, *moves])
    header = ["table", "rows in use", "age", "with a row", "admitted", "evicted", "expired", "waiting", "crowded"]
    if not lines:
        return ""
    return elements.table(header, lines) + elements.text(
        "Rows belong to ids that come and go. age: how long a row was not used, on the table's clock, in the mean. "
        "with a row: of the lookups in training. admitted, evicted, expired: ids that got a row, lost it to others, or "
        "did not come for too long. waiting, crowded: ids of batches that were not admitted yet, or found no row free.",
        soft=True,
    )

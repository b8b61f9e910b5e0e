"""Write a synthetic click log whose best possible logloss is known."""

from __future__ import annotations

from pathlib import Path

import tyro


def generate(
    out: tyro.conf.Positional[Path],
    /,
    rows: int = 200_000,
    seed: int = 0,
    users: int = 20_000,
    items: int = 5_000,
    click_rate: float = 0.2,
    numeric: int = 6,
    categorical: int = 8,
    missing: float = 0.05,
    days: int = 7,
    drift: float = 1.0,
    zipf: float = 1.05,
    history: int = 20,
    overwrite: bool = False,
) -> None:
    """Write a synthetic click log whose best possible logloss is known.

    Args:
        out: The log: .parquet, .csv or .tsv.
        rows: Impressions.
        seed: The same seed gives the same log.
        users: Distinct users, drawn by Zipf's law.
        items: Distinct items, drawn by Zipf's law.
        click_rate: Mean click probability.
        numeric: Numeric columns.
        categorical: Context columns.
        missing: Share of missing values in columns that have any.
        days: Time span.
        drift: How much tastes and popularity move over the span; 0 for none.
        zipf: Exponent of Zipf's law.
        history: Longest list of items a user liked.
        overwrite: Replace an existing log.
    """
    from sparrow import data
    from sparrow.cli import _show

    with _show.progress_bar() as progress:
        made = data.generate(
            out,
            rows=rows,
            seed=seed,
            users=users,
            items=items,
            click_rate=click_rate,
            numeric=numeric,
            categorical=categorical,
            missing=missing,
            days=days,
            drift=drift,
            zipf=zipf,
            history=history,
            overwrite=overwrite,
            progress=progress,
        )
    _show.notes(made.notes)
    _show.out.print(f"{made.rows:,} rows -> {out}", soft_wrap=True)
    _show.out.print(f"the best any model can do: {_show.numbers(made.limit)}", soft_wrap=True)

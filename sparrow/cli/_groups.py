"""What `sparrow prepare --suggest-groups` prints."""

from __future__ import annotations

from sparrow.cli import _show
from sparrow.core.config import write_toml
from sparrow.data import Dataset
from sparrow.data.batches.repeats import repeats as count_repeats


def suggest(dataset: Dataset) -> None:
    """Print what repeats from row to row, and the lines for a schema."""
    repeats = count_repeats(dataset)
    _show.out.print(
        f"what repeats from row to row: {repeats.rows:,} rows of {repeats.sessions:,} sessions,"
        f" {repeats.rows / max(repeats.sessions, 1):.1f} each",
        soft_wrap=True,
    )
    table = _show.Table("feature", "equal to the row before", "rows a run", "group")
    group_of: dict[str, str] = {}
    for group, names in repeats.groups.items():
        group_of |= dict.fromkeys(names, group)
    for name, runs in sorted(repeats.runs.items(), key=lambda item: item[1]):
        table.add_row(
            name, f"{repeats.equal[name]:.1%}", f"{repeats.rows / runs:.2f}", group_of.get(name, "")
        )
    _show.out.print(table)
    if not repeats.groups:
        _show.out.print("no group pays: too little repeats")
        return
    _show.out.print(
        "to store and look these up once for every run, put this in the schema and prepare again:"
    )
    print(
        write_toml({"groups": {group: list(names) for group, names in repeats.groups.items()}}),
        end="",
    )

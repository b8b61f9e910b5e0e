"""What a model folder has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def folder_table(place: str, manifest: Mapping[str, Any]) -> Table:
    """Returns a table of what a model folder has: files and bytes of its parts.

    Args:
        place: where it is.
        manifest: its own.
    """
    number = manifest.get("number")  # of a delta
    kind = f"delta number {number} of {manifest['model']}" if number else manifest["model"]
    table = Table(title=f"{place}: {kind}, step {manifest['step']}", title_justify="left")
    for name in ("part", "files", "bytes"):
        table.add_column(name, justify="left" if name == "part" else "right")
    parts: dict[str, list[int]] = {}
    for name, file in manifest["files"].items():
        parts.setdefault(name.partition("/")[0], []).append(file["bytes"])
    for name, sizes in parts.items():
        table.add_row(name, f"{len(sizes):,}", f"{sum(sizes):,}")
    table.add_section()
    table.add_row("all", f"{sum(map(len, parts.values())):,}", f"{sum(map(sum, parts.values())):,}")
    return table

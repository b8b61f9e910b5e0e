"""The parts of a blend, after training."""

from __future__ import annotations

from rich.table import Table

from sparrow.analysis.parts import NAMES
from sparrow.cli import _show
from sparrow.extensions.blend.forest import available


def show_parts(parts: dict[str, dict[str, float]], label: str) -> None:
    """Print how good each part is alone. label: by which it was judged, in words."""
    table = Table(
        title=f"the parts of the blend alone{label}, on the same rows", title_justify="left"
    )
    for name in ("", "weight", "ne"):
        table.add_column(name, justify="right" if name else "left")
    for name, part in parts.items():
        table.add_row(NAMES[name], f"{part['weight']:.2f}", f"{part['ne']:.4f}")
    _show.out.print(table)
    if not available():
        _show.out.print(
            "boosted trees are no part: LightGBM cannot be loaded; pip install 'sparrow-rec[trees]'"
        )

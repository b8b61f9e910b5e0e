"""A picture of what fewer bits do: each part alone, and all together against the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparrow.analysis import picture
from sparrow.apps.bits.quantize import Quantized

PARTS = 24  # that are drawn, the most harmful


def draw(quantized: Quantized, out: Path) -> bool:
    """Draw NE's rise by each part alone, and by all parts together. Returns False without
    matplotlib.
    """
    shown = quantized.parts[:PARTS]

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        names = [
            f"{part['name'].removeprefix('model.')}, {next(iter(part['damage']))}" for part in shown
        ]
        narrowest = [next(iter(part["damage"].values())) for part in shown]
        values, errors = ([100 * rise[key] for rise in narrowest] for key in ("value", "error"))
        picture.dots(left, names, values, errors, "rise of NE by this part alone, %", line=0.0)
        for attempt in quantized.result.tried:
            best = attempt is quantized.result.best
            megabytes = quantized.bytes_of(attempt.choice) / 1e6
            rise = attempt.rise.value
            width = attempt.rise.upper - rise
            right.errorbar(
                megabytes, 100 * rise, yerr=100 * width, fmt="o", markersize=7 if best else 4,
                color=picture.BLUE if best else picture.GREY,
            )  # fmt: skip
        if quantized.budget < float("inf"):
            right.axhline(100 * quantized.budget, color=picture.ORANGE, linestyle="--", linewidth=1)
        right.set_xlabel("MB of tables and products")
        right.set_ylabel("rise of NE, %")
        right.set_title("tried together; taken: blue; budget: dashed", loc="left")

    return picture.save(out, paint, size=(12, 1.6 + 0.24 * max(len(shown), 6)), dpi=110)

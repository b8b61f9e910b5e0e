"""A picture of what fewer bits do: each part alone, and all together against the budget."""

from __future__ import annotations

from pathlib import Path

from sparrow.analysis import picture
from sparrow.analysis.bits.quantize import Quantized
from sparrow.core.files import whole

PARTS = 24  # that are drawn, the most harmful


def draw(done: Quantized, out: Path) -> bool:
    """Draw NE's rise by each part alone, and by all parts together. Returns False without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    shown = done.parts[:PARTS]
    with matplotlib.rc_context(picture.STYLE):
        figure = Figure(figsize=(12, 1.6 + 0.24 * max(len(shown), 6)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for number, part in enumerate(shown):
            damage = next(iter(part["damage"].values()))
            color = picture.BLUE if part["kind"] == "table" else picture.ORANGE
            width = damage["upper"] - damage["value"]
            left.errorbar(100 * damage["value"], number, xerr=100 * width, fmt="o", color=color, markersize=4)
        names = [f"{part['name'].removeprefix('model.')}, {next(iter(part['damage']))}" for part in shown]
        left.set_yticks(range(len(shown)), names)
        left.invert_yaxis()
        left.axvline(0, color=picture.GREY, linewidth=0.8)
        left.set_xlabel("rise of NE by this part alone, % (95 % interval)")
        left.set_title("tables (blue) and products (orange)", loc="left")
        for one in done.found.tried:
            best = one is done.found.best
            rise, width = one.rise.value, one.rise.upper - one.rise.value
            right.errorbar(
                done.bytes_of(one.choice) / 1e6, 100 * rise, yerr=100 * width, fmt="o", markersize=7 if best else 4,
                color=picture.BLUE if best else picture.GREY,
            )  # fmt: skip
        if done.budget < float("inf"):
            right.axhline(100 * done.budget, color=picture.ORANGE, linestyle="--", linewidth=1)
        right.set_xlabel("MB of tables and products")
        right.set_ylabel("rise of NE, %")
        right.set_title("tried together; taken: blue; budget: dashed", loc="left")
        with whole(out) as partial:
            figure.savefig(partial, dpi=110, format="png")
    return True

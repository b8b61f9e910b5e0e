"""Pictures that pages alone have: figures as SVG within the page, and values with their intervals
as dots.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from sparrow.analysis.picture import BLUE, GREY, STYLE


def svg(paint: Callable[[Any], None], *, height: float) -> str:
    """Returns what `paint` puts on an empty figure, as the data URI of an SVG. height: in
    inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # only measured with matplotlib's font
        figure = Figure(figsize=(9.4, height), layout="constrained")
        paint(figure)
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


def dots(
    axis: Any,
    names: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float],
    title: str,
    line: float | None = None,
) -> None:
    """Draw one row per name from the top: a dot with its interval value +- 1.96 errors.

    line: what the dots are read against.
    """
    if line is not None:
        axis.axvline(line, color=GREY, linewidth=0.8, linestyle="--")
    for i, (value, error) in enumerate(zip(values, errors, strict=True)):
        if not math.isfinite(value):
            continue
        whisker = 1.96 * error if math.isfinite(error) else 0.0
        axis.plot([value - whisker, value + whisker], [i, i], color=BLUE, linewidth=1.4)
        axis.plot([value], [i], "o", color=BLUE, markersize=4.5)
    short_names = [name if len(name) <= 34 else name[:32] + "…" for name in names]
    axis.set_yticks(range(len(names)), short_names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines["left"].set_visible(False)
    axis.locator_params(axis="x", nbins=5)
    axis.set_title(title, loc="left")

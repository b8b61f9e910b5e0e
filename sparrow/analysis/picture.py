"""Pictures of a run: `curves.png` beside its log, and the parts that a report is made of."""

from __future__ import annotations

import base64
import io
import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparrow.core.files import whole
from sparrow.trained.labels import of_first
from sparrow.training import runlog

BLUE = "#2f6fa8"
ORANGE = "#d9822b"
GREY = "#8a8f98"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler('color', ['{BLUE}', '{ORANGE}', '#4d9a6a', '#9c5fa8', '#b5a642', '#555555'])",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters: small, sharp, and drawn in any script the reader's fonts know
    "svg.hashsalt": "sparrow",
    "text.parse_math": False,  # a column's value may hold a dollar sign
}

Curve = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""A reliability curve: mean scores, shares of clicks, and the standard errors of these."""


def draw(run_dir: Path) -> str | None:
    """Draw `run_dir/curves.png` from the run log. Returns its name, or None when matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    train, valid = log_of(run_dir)
    results = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    points, of = results["calibration"], of_first(results["labels"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 3.4), layout="constrained")
        axes = figure.subplots(1, 4)
        over_examples(axes[0], train, valid, "ne", f"normalised entropy{of}")
        over_examples(axes[1], train, valid, "auc", f"AUC{of}")
        over_examples(axes[2], train, [], "examples_per_s", "examples per second")
        axes[2].set_ylim(bottom=0)
        axes[2].yaxis.set_major_formatter(_thousands())
        reliability(axes[3], {"": (points["predictions_Q"], points["labels_Q"], [])})
        axes[3].set_title(f"calibration{of}", loc="left")
        with whole(run_dir / "curves.png") as partial:
            figure.savefig(partial, dpi=110, format="png")
    return "curves.png"


def log_of(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the run log's records of training and of evaluations."""
    records = runlog.read(run_dir)
    return [r for r in records if r["event"] == "train"], [r for r in records if r["event"] == "valid"]


def svg(paint: Callable[[Any], None], *, height: float) -> str:
    """Returns what `paint` puts on an empty figure, as the data URI of an SVG. height: in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # only measured with matplotlib's font
        figure = Figure(figsize=(9.4, height), layout="constrained")
        paint(figure)
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


def over_examples(
    axis: Any, train: Sequence[dict[str, Any]], valid: Sequence[dict[str, Any]], name: str, title: str
) -> None:
    """A figure of the run log over examples, with the held-out points."""
    curve = [(r["examples"], r[name]) for r in train if r.get(name) is not None]
    points = [(r["trained"], r[name]) for r in valid if r.get(name) is not None]
    if curve:
        axis.plot(*zip(*curve, strict=True), linewidth=1, marker="." if len(curve) < 3 else None, label="training log")
    if points:
        axis.plot(*zip(*points, strict=True), "o", color=ORANGE, label="held out (valid)")
        axis.legend()
    axis.set_title(title, loc="left")
    axis.set_xlim(left=0)
    axis.set_xlabel("examples trained on")
    axis.xaxis.set_major_formatter(_thousands())


def reliability(axis: Any, curves: dict[str, Curve]) -> None:
    """Shares of clicks over mean scores, by name, beside the diagonal where scores keep their word."""
    axis.set_title("calibration", loc="left")
    axis.set_xlabel("mean score")
    axis.set_ylabel("share of positives")
    end = max((max([*x, *y]) for x, y, _ in curves.values() if len(x)), default=0.0)
    axis.plot([0, end], [0, end], "--", color=GREY, linewidth=0.8)
    for name, (x, y, errors) in curves.items():
        if len(errors):
            axis.errorbar(x, y, [1.96 * e for e in errors], fmt=".-", linewidth=1, elinewidth=1, label=name)
        else:
            axis.plot(x, y, ".-", linewidth=1, label=name)
    if len(curves) > 1:
        axis.legend()


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
    shown = [(i, v, e) for i, (v, e) in enumerate(zip(values, errors, strict=True)) if math.isfinite(v)]
    if line is not None:
        axis.axvline(line, color=GREY, linewidth=0.8, linestyle="--")
    for i, value, error in shown:
        whisker = 1.96 * error if math.isfinite(error) else 0.0
        axis.plot([value - whisker, value + whisker], [i, i], color=BLUE, linewidth=1.4)
        axis.plot([value], [i], "o", color=BLUE, markersize=4.5)
    axis.set_yticks(range(len(names)), [name if len(name) <= 34 else name[:32] + "…" for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines["left"].set_visible(False)
    axis.locator_params(axis="x", nbins=5)
    axis.set_title(title, loc="left")


def _thousands() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")

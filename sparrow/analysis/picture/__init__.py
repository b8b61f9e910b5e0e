"""Pictures of a run: `curves.png` beside its log, and the parts that reports draw too.

What pages alone need, `svg` and `dots`, is loaded when it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow.core.files import replace_file
from sparrow.core.on_use import loaded_on_use
from sparrow.metrics import Metric, curves
from sparrow.trained.labels import first_label_suffix
from sparrow.training import runlog

if TYPE_CHECKING:
    from sparrow.analysis.picture.page_parts import dots as dots
    from sparrow.analysis.picture.page_parts import svg as svg
else:
    __getattr__ = loaded_on_use(__name__, (), dict.fromkeys(("dots", "svg"), "page_parts"))

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
    "axes.prop_cycle": (
        f"cycler('color', ['{BLUE}', '{ORANGE}', '#4d9a6a', '#9c5fa8', '#b5a642', '#555555'])"
    ),
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    # letters stay letters: small, sharp, and drawn in any script the reader's fonts know
    "svg.fonttype": "none",
    "svg.hashsalt": "sparrow",
    "text.parse_math": False,  # a column's value may hold a dollar sign
}

Curve = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""A reliability curve: mean scores, shares of clicks, and the standard errors of these."""


def draw(run_dir: Path) -> str | None:
    """Draw `run_dir/curves.png` from the run log. Returns its name, or None when matplotlib is not
    installed.
    """
    train, valid = log_of(run_dir)
    metrics = [metric for metric in curves_of(train, valid) if metric.is_headline]
    count = len(metrics) + 2

    def paint(figure: Any) -> None:
        results = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
        points = results["calibration"]
        label_words = first_label_suffix(results["labels"])
        *axes, speed, calibration = figure.subplots(1, count)
        for axis, metric in zip(axes, metrics, strict=True):
            over_examples(axis, train, valid, metric.name, f"{metric.title}{label_words}")
        over_examples(speed, train, [], "examples_per_s", "examples per second")
        speed.set_ylim(bottom=0)
        speed.yaxis.set_major_formatter(_thousands())
        reliability(calibration, {"": (points["predictions_Q"], points["labels_Q"], [])})
        calibration.set_title(f"calibration{label_words}", loc="left")

    is_drawn = save(run_dir / "curves.png", paint, size=(3.75 * count, 3.4), dpi=110)
    return "curves.png" if is_drawn else None


def log_of(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the run log's records of training and of evaluations."""
    records = runlog.read(run_dir)
    train = [record for record in records if record["event"] == "train"]
    valid = [record for record in records if record["event"] == "valid"]
    return train, valid


def curves_of(train: Sequence[dict[str, Any]], valid: Sequence[dict[str, Any]]) -> list[Metric]:
    """Returns the metrics that are drawn over time, of those that a run log has; see `curves`."""
    return [
        metric for metric in curves() if any(metric.name in record for record in (*train, *valid))
    ]


def save(
    path: Path, paint: Callable[[Any], None], *, size: tuple[float, float], dpi: int = 130
) -> bool:
    """Write what `paint` puts on an empty figure as a PNG. Returns False without matplotlib. size:
    in inches.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    with matplotlib.rc_context(STYLE), replace_file(path) as partial:
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(partial, dpi=dpi, format="png")
    return True


def over_examples(
    axis: Any,
    train: Sequence[dict[str, Any]],
    valid: Sequence[dict[str, Any]],
    name: str,
    title: str,
) -> None:
    """A figure of the run log over examples, with the held-out points."""
    curve = [(r["examples"], r[name]) for r in train if r.get(name) is not None]
    points = [(r["trained"], r[name]) for r in valid if r.get(name) is not None]
    if curve:
        axis.plot(
            *zip(*curve, strict=True),
            linewidth=1,
            marker="." if len(curve) < 3 else None,
            label="training log",
        )
    if points:
        axis.plot(*zip(*points, strict=True), "o", color=ORANGE, label="held out (valid)")
        axis.legend()
    axis.set_title(title, loc="left")
    axis.set_xlim(left=0)
    axis.set_xlabel("examples trained on")
    axis.xaxis.set_major_formatter(_thousands())


def reliability(axis: Any, curves: dict[str, Curve]) -> None:
    """Shares of clicks over mean scores, by name, beside the diagonal where scores keep their
    word.
    """
    axis.set_title("calibration", loc="left")
    axis.set_xlabel("mean score")
    axis.set_ylabel("share of positives")
    end = max((max([*x, *y]) for x, y, _ in curves.values() if len(x)), default=0.0)
    axis.plot([0, end], [0, end], "--", color=GREY, linewidth=0.8)
    for name, (x, y, errors) in curves.items():
        if len(errors):
            axis.errorbar(
                x, y, [1.96 * e for e in errors], fmt=".-", linewidth=1, elinewidth=1, label=name
            )
        else:
            axis.plot(x, y, ".-", linewidth=1, label=name)
    if len(curves) > 1:
        axis.legend()


def _thousands() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")

"""The picture of a run: NE, AUC and speed over examples, and how well scores are calibrated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparrow.core.files import whole
from sparrow.training import runlog


def draw(run_dir: Path) -> str | None:
    """Draw `run_dir/curves.png` from the run log; its name, or None when matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    records = runlog.read(run_dir)
    train = [r for r in records if r["event"] == "train"]
    valid = [r for r in records if r["event"] == "valid"]
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    for axis, name, title in ((axes[0], "ne", "normalised entropy"), (axes[1], "auc", "AUC")):
        curve = [(r["examples"], r[name]) for r in train if r.get(name) is not None]
        if curve:
            marker = "." if len(curve) < 3 else None
            axis.plot(*zip(*curve, strict=True), linewidth=1, marker=marker, label="training log")
        points = [(r["trained"], r[name]) for r in valid if r.get(name) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), "o", label="held out")
        if curve or points:
            axis.legend(frameon=False)
        axis.set_title(title, loc="left")
    axes[2].plot([r["examples"] for r in train], [r["examples_per_s"] for r in train], linewidth=1)
    axes[2].set_title("examples per second", loc="left")
    axes[2].set_ylim(bottom=0)
    axes[2].yaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes[:3]:
        axis.set_xlabel("examples trained on")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    _draw_calibration(axes[3], run_dir)
    with whole(run_dir / "curves.png") as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)
    return "curves.png"


def _draw_calibration(axis: Any, run_dir: Path) -> None:
    curve = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))["calibration"]
    axis.set_title("calibration", loc="left")
    axis.set_xlabel("mean score")
    axis.set_ylabel("share of clicks")
    if curve["predictions_Q"]:
        axis.plot(curve["predictions_Q"], curve["labels_Q"], ".-", linewidth=1)
        end = max(curve["predictions_Q"] + curve["labels_Q"])
        axis.plot([0, end], [0, end], "--", color="grey", linewidth=0.8)

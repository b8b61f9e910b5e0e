"""The picture of a run: NE and speed over examples, and calibration."""

from __future__ import annotations

from pathlib import Path

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
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for axis, name, title in ((axes[0], "ne", "normalised entropy"), (axes[1], "auc", "AUC")):
        curve = [(r["examples"], r[name]) for r in train if name in r]
        if curve:
            axis.plot(*zip(*curve, strict=True), linewidth=1, label="before training on it")
        points = [(r["trained"], r[name]) for r in valid]
        if points:
            axis.plot(*zip(*points, strict=True), "o", label="held out")
        if curve or points:
            axis.legend(frameon=False)
        axis.set_title(title, loc="left")
    axes[2].plot([r["examples"] for r in train], [r["examples_per_s"] for r in train], linewidth=1)
    axes[2].set_title("examples per second", loc="left")
    axes[2].set_ylim(bottom=0)
    axes[2].yaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes:
        axis.set_xlabel("examples trained on")
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.savefig(run_dir / "curves.png", dpi=110)
    pyplot.close(figure)
    return "curves.png"

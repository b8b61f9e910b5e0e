"""A family of growing models, trained one by one: quality against floating-point operations
(Wukong's scaling law).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow import checkpoint, data
from sparrow.analysis import picture
from sparrow.core import Batch
from sparrow.core.comparison import settings_differences
from sparrow.core.config import Family
from sparrow.core.errors import UserError
from sparrow.kernels.flops import count_flops
from sparrow.metrics.intervals import t_quantile
from sparrow.trained.labels import first_label_suffix
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training.loop import train
from sparrow.training.preflight import resolved

Announce = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of a family. flops: of one example, forward, matrix products; ne: of what `measured`
    names.
    """

    family: str
    flops: float
    weights: int
    ne: float
    auc: float
    measured: str


@dataclass(frozen=True, kw_only=True)
class Law:
    """NE = a * flops^b (the form of Wukong's figure 1). margin: of b, 95 % (Student's t); NaN for
    two points.
    """

    a: float
    b: float
    margin: float

    def at(self, flops: float) -> float:
        """Returns the NE of a model with so many floating-point operations an example."""
        return self.a * float(flops) ** self.b

    def doubled(self, flops: float) -> tuple[float, float]:
        """Returns by how much NE would change with twice as many operations, and the margin of this
        change.
        """
        ne = self.at(flops)
        return ne * (2**self.b - 1), ne * 2**self.b * math.log(2) * self.margin

    def __str__(self) -> str:
        return f"{self.at(1e9):.4g} GFLOP^{self.b:.4f}"


def sizes(run: Run, count: int, seeds: int = 1) -> list[Run]:
    """Returns the run's size and `count - 1` larger ones, each with the run's seed and the
    `seeds - 1` after it.

    All seeds of a size stand together, the smallest size first. Every run has a folder of its own
    below the run's.

    Args:
        run: the smallest one.
        count: how many sizes.
        seeds: how many runs of each size.

    Raises:
        UserError: for a model that does not say how it grows.
    """
    name = Family("sparrow.models").name_of(run.model)
    if not _grows(name):
        known = filter(_grows, Family("sparrow.models").names())
        raise UserError(
            f"model.name: {name!r} does not say how it grows; use one of {', '.join(known)}"
        )
    runs = []
    model: Any = run.model
    for size in range(count):
        for seed in range(run.seed, run.seed + seeds):
            place = f"{run.run_dir}/size-{size}" + (f"-seed-{seed}" if seed != run.seed else "")
            runs.append(replace(run, run_dir=place, model=model, seed=seed))
        larger = model.larger()
        if larger == model:
            raise UserError(f"model.name: {name!r} without hidden layers cannot grow; give it some")
        model = larger
    return runs


def _grows(name: str) -> bool:
    return "larger" in vars(Family("sparrow.models").config(name, "model.name"))


def scale(runs: Sequence[Run], announce: Announce | None = None) -> list[Point]:
    """Train the runs that are not trained yet. Returns a point for each run.

    Runs are measured on the valid part, or on the last fifth of a stream without one. A run that
    was stopped is taken up again.

    Args:
        runs: what to train.
        announce: is called with the folder of each run that begins.

    Raises:
        UserError: for a folder that holds another run, and for a run that was stopped or cannot be
            measured.
    """
    return [_point(run, finish_run(run, announce)) for run in runs]


def finish_run(run: Run, announce: Announce | None = None) -> dict[str, Any]:
    """Train a run where it is not trained, or was stopped. Returns its results.

    Args:
        run: its settings.
        announce: is called with its folder when it trains.

    Raises:
        UserError: for a folder that holds another run, and for a run that was stopped now.
    """
    place = Path(run.run_dir)
    _check_same(run, place)
    results = _results(place)
    if results is None:
        if announce is not None:
            announce(run.run_dir)
        results = train(run, resume=(place / "checkpoints").is_dir())
    if results["stopped_by"]:
        raise UserError(
            f"{place}: stopped by {results['stopped_by']}; the same command continues from there"
        )
    return results


def law(points: Sequence[Point]) -> Law:
    """Returns the law that fits the points, by least squares on the logarithms.

    Raises:
        UserError: for fewer than two sizes.
    """
    x, y = (np.log([getattr(p, name) for p in points]) for name in ("flops", "ne"))
    if len(set(x.tolist())) < 2:
        raise UserError("scale: a law needs two sizes or more; give --sizes 2 or more")
    b, log_a = np.polyfit(x, y, 1)
    free = len(x) - 2
    left = math.sqrt(float(((y - log_a - b * x) ** 2).sum()) / free) if free else math.nan
    error = left / math.sqrt(float(((x - x.mean()) ** 2).sum()))
    return Law(
        a=math.exp(log_a), b=float(b), margin=error * (t_quantile(0.95, free) if free else math.nan)
    )


def flops(model: torch.nn.Module, batch: Batch) -> float:
    """Returns the floating-point operations of the matrix products that score an example of a
    batch.
    """
    with torch.no_grad():
        return count_flops(lambda: model(batch)) / batch.batch_size


def draw(families: Mapping[str, Sequence[Point]], path: Path) -> bool:
    """Draw NE over GFLOP an example, with a point for each run and the law of each family.

    Returns whether it did: False where matplotlib is not installed.
    """

    def paint(figure: Any) -> None:
        from matplotlib.ticker import LogLocator, MaxNLocator

        axis = figure.subplots()
        for name, points in families.items():
            x = np.array([p.flops for p in points])
            (line,) = axis.plot(x / 1e9, [p.ne for p in points], "o", label=name)
            fitted = law(points)
            along = np.geomspace(x.min(), x.max(), 50)
            axis.plot(
                along / 1e9,
                [*map(fitted.at, along)],
                color=line.get_color(),
                linewidth=1,
                label=str(fitted),
            )
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        wide = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
        axis.xaxis.set_major_locator(wide if high > 10 * low else MaxNLocator(5))
        # the default writes formulas, which the style leaves
        axis.xaxis.set_major_formatter(lambda x, _: digits(x))
        axis.xaxis.set_minor_formatter(lambda x, _: "")
        axis.set_xlabel("GFLOP an example, forward")
        axis.set_title("normalised entropy", loc="left")
        axis.legend()

    return picture.save(path, paint, size=(6.4, 4))


def digits(number: float) -> str:
    """Returns a number with three significant digits, without an exponent."""
    return np.format_float_positional(number, precision=3, fractional=False, trim="-")


def _check_same(run: Run, place: Path) -> None:
    """Check that a folder holds a run of these settings and this log.

    Raises:
        UserError: when it holds another.
    """
    if not (place / "run.toml").is_file():
        return
    dataset = data.open(run.data.path)
    before = Run.load(place / "run.toml")
    for name, then, value in settings_differences(before, resolved(run, dataset)):
        if name != "threads" and not name.startswith("tables.sizes."):
            difference = f"{name} {then!r}, it is {value!r} now"
            raise UserError(
                f"{place}: was trained with {difference}; delete it or give another run_dir"
            )
    saved = checkpoint.latest(place / "checkpoints")
    if (
        saved is not None
        and checkpoint.load(place / "checkpoints", saved).state.get("data") != dataset.fingerprint
    ):
        raise UserError(
            f"{place}: was trained on another log than {dataset.path}; delete it or give another"
            " run_dir"
        )


def _results(place: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads((place / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if content["stopped_by"] else content


def _point(run: Run, results: dict[str, Any]) -> Point:
    restored = restore(run.run_dir, device="cpu")  # where the counted batch is
    dataset = data.open(run.data.path)
    part = results["valid"]
    measured = "valid"
    if not dataset.rows("valid"):
        if not results["progressive"]:
            raise UserError(
                f"{run.run_dir}: neither a valid part nor progressive validation to measure by"
            )
        part = results["progressive"][-1]
        measured = "last fifth of the stream"
    if part["ne"] is None or math.isnan(part["ne"]):  # a NaN is null in the file
        part_name = "the valid part" if measured == "valid" else f"the {measured}"
        raise UserError(
            f"{run.run_dir}: {part_name}'s labels are all alike, so NE is not defined; prepare a"
            " larger one"
        )
    measured += first_label_suffix(dataset.schema.labels)
    return Point(
        family=Family("sparrow.models").name_of(run.model),
        measured=measured,
        flops=flops(restored.model, dataset.first(64)),
        ne=part["ne"],
        auc=part["auc"],
        weights=sum(p.numel() for p in restored.model.parameters()),
    )

"""Rolling backtests: train on what lies before a window of time, test on the window, several times
over.

Each window has a folder with its prepared log, its run and its results. So a window that is done is
not done again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparrow import data
from sparrow.analysis import picture
from sparrow.analysis.scores import score_part
from sparrow.apps.scaling import finish_run
from sparrow.core.config import differences, read_toml, write_toml
from sparrow.core.errors import UserError, require
from sparrow.core.extensions import with_names_of_today
from sparrow.core.files import to_json, write_text
from sparrow.data.logs.files import find
from sparrow.data.meaning.outcomes import names_of
from sparrow.features.schema import Schema, Split
from sparrow.metrics import Metric, curves, headlines
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore

Announce = Callable[[str], None]
# what was asked for, so that windows of something else are not taken for these
ASKED = "backtest.toml"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which rows are trained and tested on, by their order in time.

    windows: how many. share: of the rows, the last ones, that the windows divide evenly. valid:
    share of the rows, right before each window, by which the best checkpoint is chosen; they are
    not trained on.
    """

    windows: int = 4
    share: float = 0.5
    valid: float = 0.1

    def __post_init__(self) -> None:
        require(least=1, most=1000, windows=self.windows)
        if not (self.share > 0 and self.valid >= 0 and self.share + self.valid < 1):
            raise UserError(
                f"share {self.share} and valid {self.valid} leave nothing to train on; lower them"
            )

    def split(self, window: int) -> Split:
        """Returns how the log of a window, counted from 0, is divided."""
        units = max(math.floor(self.share / self.windows * 2**20), 1)
        window_share = units / 2**20  # exact in sums: windows do not overlap
        later = (self.windows - 1 - window) * window_share
        return Split(
            by="time", test=window_share, valid=self.valid, until=1 - later if later else None
        )


@dataclass(frozen=True, kw_only=True)
class Window:
    """What came of a window.

    rows: of train and valid, and those of test that have the label. values: metric -> value on the
    window. errors: their standard errors, from the window's sessions, or else its rows. NaN where a
    metric is undefined.
    """

    rows: dict[str, int]
    values: dict[str, float]
    errors: dict[str, float]


def backtest(
    inputs: Sequence[str | Path],
    out: str | Path,
    plan: Plan | None = None,
    *,
    schema: Schema | None = None,
    label: str | Sequence[str] | None = None,
    impressions: str | None = None,
    outcomes: Sequence[str] = (),
    run: Mapping[str, Any] | None = None,
    announce: Announce | None = None,
) -> list[Window]:
    """Prepare the log, train and test for each window. Returns the windows, the earliest first.

    Everything that is fitted is fitted anew for each window, on its training part.

    Args:
        inputs: the raw log, as `prepare` takes it. It needs a column of kind time.
        out: a folder for all of it. Windows that are there are taken as they are.
        plan: which rows.
        schema: what the columns mean; by default it is inferred.
        label: the column to predict, when it cannot be guessed; of several the first is judged.
        impressions: the column that says how many showings a row stands for, of which the label
            counts some.
        outcomes: columns that are left out, because they are known only after the label.
        run: settings of the runs by dotted name.
        announce: is called with a line when a window begins, and with each suspect column.

    Raises:
        UserError: for what is wrong with log, schema or settings, and for a folder with windows of
            something else.
    """
    out = Path(out)
    plan = plan or Plan()
    announce = announce or (lambda _: None)
    run = with_names_of_today(run or {})
    settings = {
        "log": [str(path) for path in inputs],
        "bytes": [path.stat().st_size for path in map(Path, inputs) if path.is_file()],
        **vars(plan),
        "label": ",".join(names_of(label)),
        **({"impressions": impressions} if impressions else {}),
        **({"outcomes": [*outcomes]} if outcomes else {}),
        "schema": _unfitted(schema).to_toml() if schema else "",
        "run": {name: json.dumps(value) for name, value in run.items()},
    }
    find(list(inputs))  # says which are not there before a folder is made
    _check_same(out, settings)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / ASKED, write_toml(settings, header="What `sparrow backtest` was asked for."))
    results = []
    for window in range(plan.windows):
        place = out / f"window-{window + 1}"
        if (result := _read(place)) is None:
            announce(f"window {window + 1} of {plan.windows}")
            if not (place / "data").exists():
                place.mkdir(exist_ok=True)
                unfitted = _unfitted(schema) if schema else None
                meaning: dict[str, Any] = {
                    "label": label,
                    "impressions": impressions,
                    "outcomes": outcomes,
                }
                dataset = data.prepare(
                    inputs, place / "data", schema=unfitted, **meaning, split=plan.split(window)
                )
                for name, note in dataset.schema.suspects.items():
                    announce(f"{name}: {note}")
            own = {"data.path": str(place / "data"), "run_dir": str(place / "run")}
            result = _test_window(Run.of(place / "data", {**run, **own}), announce)
            write_text(place / "results.json", to_json(vars(result), indent=1))
        results.append(result)
    return results


def mean_and_spread(windows: Sequence[Window]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns metric -> the mean of the windows, and their standard deviation, NaN for a single
    window.
    """
    values = {
        name: np.array([window.values[name] for window in windows]) for name in windows[0].values
    }
    spread = {
        name: float(x_W.std(ddof=1)) if len(x_W) > 1 else math.nan for name, x_W in values.items()
    }
    return {name: float(x_W.mean()) for name, x_W in values.items()}, spread


def shown_metrics(windows: Sequence[Window]) -> list[Metric]:
    """Returns the metrics of windows that `draw` shows."""
    return [
        metric for metric in headlines() if metric in curves() and metric.name in windows[0].values
    ]


def draw(windows: Sequence[Window], path: Path) -> bool:
    """Draw `shown_metrics` of each window with twice their standard errors. Returns False without
    matplotlib.
    """
    metrics = shown_metrics(windows)

    def paint(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        for axis, metric in zip(
            figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True
        ):
            values = [window.values[metric.name] for window in windows]
            errors = [2 * window.errors[metric.name] for window in windows]
            axis.errorbar(range(1, len(windows) + 1), values, errors, fmt="o-")
            axis.set_title(metric.title, loc="left")
            axis.set_xlabel("window")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))

    return picture.save(path, paint, size=(3.2 * len(metrics), 3))


def _unfitted(schema: Schema) -> Schema:
    """Returns the schema without the numbers that were fitted: later rows may be in them."""
    columns = {
        name: replace(
            column,
            mean=None,
            std=None,
            low=None,
            high=None,
            boundaries=None,
            until=None,
            digest=None,
        )
        for name, column in schema.columns.items()
    }
    return replace(schema, columns=columns)


def _check_same(out: Path, settings: dict[str, Any]) -> None:
    """Check that a folder is new, or holds windows of the same.

    Raises:
        UserError: when it holds others.
    """
    if (out / ASKED).is_file():
        asked = read_toml(out / ASKED)
        asked["run"] = with_names_of_today(asked.get("run", {}))
        for name, then, now in differences(asked, settings):
            difference = (
                f"{name} was {then!r} and is {now!r} now"
                if name != "schema"
                else "the schema was another one"
            )
            raise UserError(f"{out}: holds a backtest in which {difference}; give another --out")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is no folder of a backtest; give another --out")


def _read(place: Path) -> Window | None:
    """Returns the results of a window, None where there are none."""
    try:
        content = json.loads((place / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Window(
        rows=content["rows"],
        values=_with_nan(content["values"]),
        errors=_with_nan(content["errors"]),
    )


def _with_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    """Returns values with NaN for null, which is how a NaN is written."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def _test_window(run: Run, announce: Announce) -> Window:
    """Test a window's run, which is trained if need be."""
    finish_run(run, announce)
    dataset = data.open(run.data.path)
    rows = score_part(restore(run.run_dir), dataset, "test", lambda *_: None)
    estimates = rows.estimates()
    return Window(
        rows={part: dataset.rows(part) for part in ("train", "valid")}
        | {"test": len(rows.known().labels_N)},
        values={name: float(estimate.value) for name, estimate in estimates.items()},
        errors={name: float(estimate.error) for name, estimate in estimates.items()},
    )

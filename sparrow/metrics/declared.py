"""The metrics, declared in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from sparrow.metrics.across import auc_across, ece_across
from sparrow.metrics.metric import Metric, declare
from sparrow.metrics.streaming import Streaming


def influence_on_use(name: str) -> Callable[[Any], Any]:
    """Returns a function of `intervals`, which is loaded at its first call: a run needs values
    without errors.
    """
    return lambda rows: getattr(import_module("sparrow.metrics.intervals"), name)(rows)


declare(
    Metric(
        name="auc",
        title="AUC",
        better="higher",
        stream=Streaming.auc,
        exact=auc_across,
        influence=influence_on_use("auc_influence"),
        is_logged=True,
        is_monitored=True,
        is_headline=True,
    ),
    Metric(
        name="gauc",
        title="GAUC (within sessions)",
        better="higher",
        influence=influence_on_use("gauc_influence"),
        needs_groups=True,
        is_monitored=True,
        is_headline=True,
    ),
    Metric(
        name="logloss",
        title="logloss",
        better="lower",
        stream=Streaming.logloss,
        influence=influence_on_use("logloss_influence"),
        is_logged=True,
        is_monitored=True,
        least_share=1e-4,
    ),
    Metric(
        name="ne",
        title="normalised entropy",
        short="NE",
        meaning=(
            "NE is logloss over that of always saying the rows' own rate: 1 is useless, lower is"
            " better."
        ),
        better="lower",
        stream=Streaming.ne,
        influence=influence_on_use("ne_influence"),
        is_logged=True,
        is_monitored=True,
        is_headline=True,
    ),
    Metric(
        name="calibration",
        title="calibration",
        meaning="Calibration is predicted positives over positives.",
        better="near 1",
        stream=Streaming.calibration,
        influence=influence_on_use("calibration_influence"),
        is_logged=True,
        is_headline=True,
    ),
    Metric(
        name="ece",
        title="expected calibration error",
        short="ECE",
        meaning=(
            "ECE is how far the mean score of like scores is from their rate; noise alone makes it"
            " more than 0."
        ),
        better="lower",
        stream=Streaming.ece,
        exact=ece_across,
        influence=influence_on_use("ece_influence"),
        least_share=1e-2,
    ),
)

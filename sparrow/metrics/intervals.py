"""How certain a metric is: its value, with what each row or each session adds to its error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from sparrow.metrics._columns import check_probabilities, columns, has_shares
from sparrow.metrics._logloss import base_logloss, log_odds_and_loss
from sparrow.metrics.likelihood import ece_and_signs
from sparrow.metrics.metric import METRICS, Metric
from sparrow.metrics.places import topk_by_group
from sparrow.metrics.ranking import auc_by_group
from sparrow.metrics.streaming import Streaming


@dataclass(frozen=True, eq=False)
class Estimate:
    """A metric's value, and by how much each of G independent units moves it.

    The difference of two estimates of the same rows is their paired difference: errors that they
    share cancel, unit by unit.

    Args:
        value: the metric's.
        influence_G: float64 [G]; the sum is 0.
    """

    value: float
    influence_G: Tensor

    @property
    def error(self) -> float:
        """The standard error: how much other units of the same kind would change the value. NaN
        below two units.
        """
        units = self.influence_G.numel()
        if units < 2:
            return math.nan
        return math.sqrt(float(self.influence_G.square().sum()) * units / (units - 1))

    def __sub__(self, subtracted: Estimate) -> Estimate:
        return Estimate(self.value - subtracted.value, self.influence_G - subtracted.influence_G)


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """Rows whose probabilities are judged, float64 [B] each, with what several metrics need of
    them.

    group_B: the number of each row's session, 0 to G - 1. measures: name -> what the model measures
    of each row, see `BringsMeasures`.
    """

    scores_B: Tensor
    labels_B: Tensor
    weights_B: Tensor
    group_B: Tensor
    measures: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def clicks_B(self) -> Tensor:
        """By how much each row is a click."""
        return self.weights_B * self.labels_B

    @cached_property
    def non_clicks_B(self) -> Tensor:
        """By how much each row is none."""
        return self.weights_B * (1 - self.labels_B)

    @cached_property
    def mass(self) -> float:
        """The sum of the weights."""
        return float(self.weights_B.sum())

    @cached_property
    def clicks(self) -> float:
        """The sum of `clicks_B`."""
        return float(self.clicks_B.sum())

    @cached_property
    def non_clicks(self) -> float:
        """The sum of `non_clicks_B`."""
        return float(self.non_clicks_B.sum())

    def mean(self, values_B: Tensor) -> tuple[float, Tensor]:
        """Returns the mean of a number of each row, by weight, and its influences, [B]."""
        value = float(self.weights_B @ values_B) / self.mass
        return value, self.weights_B * (values_B - value) / self.mass


def auc_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    """Returns `auc` and its influences, [B] (DeLong et al. 1988)."""
    if not (rows.clicks and rows.non_clicks):
        return None
    at_B = rows.scores_B.unique(return_inverse=True)[1]
    clicks_U = torch.bincount(at_B, rows.clicks_B)
    non_clicks_U = torch.bincount(at_B, rows.non_clicks_B)
    # shares of non-clicks below and of clicks above
    below_B = (non_clicks_U.cumsum(0) - non_clicks_U / 2)[at_B] / rows.non_clicks
    auc = float(rows.clicks_B @ below_B) / rows.clicks
    influence_B = rows.clicks_B * below_B.sub_(auc) / rows.clicks  # in place: rows are many
    above_B = 1 - (clicks_U.cumsum(0) - clicks_U / 2)[at_B] / rows.clicks
    return auc, influence_B.add_(rows.non_clicks_B * above_B.sub_(auc) / rows.non_clicks)


def logloss_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    """Returns `logloss` and its influences, [B]."""
    return rows.mean(log_odds_and_loss(rows.scores_B, rows.labels_B)[1]) if rows.mass else None


def ne_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    """Returns `ne` and its influences, [B]. The entropy H of the base rate is estimated too."""
    loss_and_influence = logloss_influence(rows)
    if loss_and_influence is None or not (rows.clicks and rows.non_clicks):
        return None
    loss, d_loss_B = loss_and_influence
    rate = rows.clicks / rows.mass
    d_rate_B = rows.weights_B * (rows.labels_B - rate) / rows.mass
    entropy = base_logloss(rows.mass, rows.clicks)
    slope = math.log(rows.non_clicks / rows.clicks)  # dH/dp
    return loss / entropy, (d_loss_B - loss / entropy * slope * d_rate_B) / entropy


def calibration_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    """Returns `calibration` and its influences, [B]."""
    if not rows.clicks:
        return None
    calibration = float(rows.weights_B @ rows.scores_B) / rows.clicks
    return calibration, rows.weights_B * (rows.scores_B - calibration * rows.labels_B) / rows.clicks


def ece_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    """Returns `ece` and its influences, [B]. The ranges and the sign of each are taken as given."""
    if not rows.mass:
        return None
    ece, sign_B = ece_and_signs(rows.scores_B, rows.labels_B, rows.weights_B)
    return ece, rows.weights_B * (sign_B * (rows.scores_B - rows.labels_B) - ece) / rows.mass


def gauc_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    """Returns `gauc` and its influences, [G] (Obuchowski 1997)."""
    auc_G, mass_G = auc_by_group(rows.scores_B, rows.labels_B, rows.group_B, rows.weights_B)
    mass_G = torch.where(auc_G.isnan(), 0.0, mass_G)
    if not bool(mass_G.any()):
        return None
    value = float(auc_G.nan_to_num(0.0) @ mass_G / mass_G.sum())
    return value, mass_G * (auc_G.nan_to_num(0.0) - value) / mass_G.sum()


def measured_influence(metric: Metric, rows: JudgedRows) -> tuple[float, Tensor] | None:
    """Returns the value of a metric of measures and its influences, [B].

    A row moves the sums by what it adds to them, and the metric by the slopes at the sums.
    """
    assert metric.value
    measures_MB = torch.stack([rows.measures[name] for name in metric.measures])
    with torch.enable_grad():
        sums_M = (measures_MB @ rows.weights_B).requires_grad_()
        value = metric.value(*sums_M)
    if not bool(value.isfinite()):
        return None
    (slope_M,) = torch.autograd.grad(value, sums_M)
    return float(value.detach()), rows.weights_B * (slope_M @ measures_MB)


def auc_error(stream: Streaming) -> float:
    """Returns a bound on |auc - exact AUC| of a stream: half the share of (click, non-click) pairs
    in one bin. NaN like auc.
    """
    non_clicks_R, clicks_R = stream.masses
    pairs = float(non_clicks_R.sum() * clicks_R.sum())
    return float(clicks_R @ non_clicks_R) / 2 / pairs if pairs else math.nan


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Returns the mean of estimates of the same units."""
    influences = torch.stack([e.influence_G for e in estimates])
    return Estimate(sum(e.value for e in estimates) / len(estimates), influences.mean(0))


def estimates(
    scores_B: Tensor,
    labels_B: Tensor,
    weights_B: Tensor | None = None,
    groups_B: Tensor | None = None,
    units_B: Tensor | None = None,
    measures: Mapping[str, Tensor] | None = None,
) -> dict[str, Estimate]:
    """Returns the metrics of METRICS that have influences, of probabilities. Those within groups
    need groups.

    With groups, what `topk` averages follows, unless a label lies between 0 and 1.

    Where a metric is undefined, its value and its influences are NaN. The method is the
    infinitesimal jackknife (Efron 1982). For AUC it is DeLong et al. 1988, and with groups
    Obuchowski 1997. It does not resample, so it has no seed. Of ece, the ranges and the sign of
    each are taken as given; so where noise makes most of it, its error is rough.

    Args:
        scores_B: probabilities, [B].
        labels_B: 0..1, [B]; see `auc`.
        weights_B: >= 0, [B]; ones by default.
        groups_B: sessions, int64 [B]. Rows of a session may depend on each other.
        units_B: what is independent of each other, such as users, int64 [B]; by default sessions,
            else rows. All rows of a session are of one unit.
        measures: name -> what the model measures of each row, [B]; see `BringsMeasures`.

    Raises:
        UserError: as `auc` and `logloss`.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    group_B = (
        torch.arange(len(scores_B)) if groups_B is None else groups_B.unique(return_inverse=True)[1]
    )
    unit_B = group_B if units_B is None else units_B.unique(return_inverse=True)[1]
    units = int(unit_B.max()) + 1 if len(unit_B) else 0
    measures = {name: measure_B.double() for name, measure_B in (measures or {}).items()}
    rows = JudgedRows(scores_B, labels_B, weights_B, group_B, measures)
    groups = int(group_B.max()) + 1 if len(group_B) else 0
    unit_G = torch.empty(groups, dtype=torch.int64).scatter_(0, group_B, unit_B)
    unknown = Estimate(math.nan, torch.full((units,), math.nan, dtype=torch.float64))

    result: dict[str, Estimate] = {}
    for name, metric in METRICS.items():
        if metric.needs_groups and groups_B is None:
            continue
        if metric.influence:
            value_and_influence = metric.influence(rows)
        elif metric.value and measures.keys() >= {*metric.measures}:
            value_and_influence = measured_influence(metric, rows)
        else:
            continue
        if value_and_influence is None:
            result[name] = unknown
            continue
        value, influence = value_and_influence
        unit = unit_G if metric.needs_groups else unit_B
        result[name] = Estimate(value, torch.bincount(unit, influence, minlength=units))
    if groups_B is None or has_shares(labels_B):
        return result
    by_metric, weight_G = topk_by_group(scores_B, labels_B, groups_B, weights_B)
    for name, value_G in by_metric.items():
        part_G = torch.where(value_G.isnan(), 0.0, weight_G / weight_G[~value_G.isnan()].sum())
        value = float(value_G.nan_to_num(0.0) @ part_G)
        if not bool(part_G.any()):
            result[name] = unknown
            continue
        influence_G = part_G * (value_G.nan_to_num(0.0) - value)
        influence_U = torch.bincount(unit_G, influence_G, minlength=units)
        result[name] = Estimate(value, influence_U)
    return result


@cache
def t_quantile(level: float, degrees: float) -> float:
    """Returns half the width, in standard errors, of an interval that holds `level` of the mass of
    Student's t.

    degrees: of freedom, >= 1.

    With t = sqrt(degrees) tan(a) the density is cos(a)^(degrees - 1), which is summed on a grid
    (error below 1e-4).
    """
    if degrees > 1e6:
        degrees = 1e6  # the normal distribution, to 6 digits
    edge = min(math.pi / 2, 40 / math.sqrt(degrees))  # beyond it there is almost no mass
    grid = np.linspace(0, edge, 200_001)
    middle = (grid[:-1] + grid[1:]) / 2
    mass = np.cumsum(np.cos(middle) ** (degrees - 1))
    angle = np.interp(level * mass[-1], mass, grid[1:])
    return math.sqrt(degrees) * math.tan(angle)

"""How certain a metric is: its value, with what each row or each session adds to its error."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparrow.metrics._columns import check_probabilities, columns
from sparrow.metrics.likelihood import base_logloss, log_odds_and_loss
from sparrow.metrics.places import topk_by_group
from sparrow.metrics.ranking import auc_by_group
from sparrow.metrics.streaming import ece_and_signs

METRICS = ("auc", "gauc", "logloss", "ne", "calibration", "ece")


@dataclass(frozen=True, eq=False)
class Estimate:
    """A metric's value, and by how much each of G independent units moves it.

    The difference of two estimates of the same rows is their paired difference: errors that they share cancel, unit by
    unit.

    Args:
        value: the metric's.
        influence_G: float64 [G]; the sum is 0.
    """

    value: float
    influence_G: Tensor

    @property
    def error(self) -> float:
        """The standard error: how much other units of the same kind would change the value. NaN below two units."""
        units = self.influence_G.numel()
        return math.sqrt(float(self.influence_G.square().sum()) * units / (units - 1)) if units > 1 else math.nan

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate(self.value - other.value, self.influence_G - other.influence_G)


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Returns the mean of estimates of the same units."""
    influences = torch.stack([e.influence_G for e in estimates])
    return Estimate(sum(e.value for e in estimates) / len(estimates), influences.mean(0))


def estimates(
    scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None, groups_B: Tensor | None = None
) -> dict[str, Estimate]:
    """Returns auc, gauc (with groups), logloss, ne, calibration and ece of probabilities, each with its influences.

    With groups, what `topk` averages follows.

    Where a metric is undefined, its value and its influences are NaN. The method is the infinitesimal jackknife (Efron
    1982). For AUC it is DeLong et al. 1988, and with groups Obuchowski 1997. It does not resample, so it has no seed.
    Of ece, the ranges and the sign of each are taken as given; so where noise makes most of it, its error is rough.

    Args:
        scores_B: probabilities, [B].
        labels_B: 0 or 1, [B].
        weights_B: >= 0, [B]; ones by default.
        groups_B: sessions, int64 [B]. Rows of a session may depend on each other, so sessions are the independent
            units. Without sessions the rows are.

    Raises:
        UserError: as `auc` and `logloss`.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    check_probabilities(scores_B)
    unit_B = torch.arange(len(scores_B)) if groups_B is None else groups_B.unique(return_inverse=True)[1]
    units = int(unit_B.max()) + 1 if len(unit_B) else 0
    clicks_B, others_B = weights_B * labels_B, weights_B * (1 - labels_B)
    mass, clicks, others = (float(t.sum()) for t in (weights_B, clicks_B, others_B))
    found: dict[str, tuple[float, Tensor]] = {}  # value, influence of rows

    if clicks and others:
        _, at_B = scores_B.unique(return_inverse=True)
        clicks_U, others_U = torch.bincount(at_B, clicks_B), torch.bincount(at_B, others_B)
        below_B = (others_U.cumsum(0) - others_U / 2)[at_B] / others  # share of non-clicks below
        above_B = 1 - (clicks_U.cumsum(0) - clicks_U / 2)[at_B] / clicks  # share of clicks above
        auc = float(clicks_B @ below_B) / clicks
        found["auc"] = auc, clicks_B * (below_B - auc) / clicks + others_B * (above_B - auc) / others
    if mass:
        loss_B = log_odds_and_loss(scores_B, labels_B)[1]
        loss, rate = float(weights_B @ loss_B) / mass, clicks / mass
        d_loss_B, d_rate_B = weights_B * (loss_B - loss) / mass, weights_B * (labels_B - rate) / mass
        found["logloss"] = loss, d_loss_B
        if clicks and others:  # the entropy H of the base rate is estimated too; dH/dp = log((1 - p) / p)
            entropy, slope = base_logloss(mass, clicks), math.log(others / clicks)
            found["ne"] = loss / entropy, (d_loss_B - loss / entropy * slope * d_rate_B) / entropy
    if clicks:
        calibration = float(weights_B @ scores_B) / clicks
        found["calibration"] = calibration, weights_B * (scores_B - calibration * labels_B) / clicks
    if mass:
        ece, sign_B = ece_and_signs(scores_B, labels_B, weights_B)
        found["ece"] = ece, weights_B * (sign_B * (scores_B - labels_B) - ece) / mass

    unknown_G = torch.full((units,), math.nan, dtype=torch.float64)
    unknown = Estimate(math.nan, unknown_G)
    result = dict.fromkeys(METRICS, unknown)
    for name, (value, influence_B) in found.items():
        result[name] = Estimate(value, torch.bincount(unit_B, influence_B, minlength=units))
    if groups_B is None:
        del result["gauc"]
        return result
    auc_G, mass_G = auc_by_group(scores_B, labels_B, unit_B, weights_B)
    mass_G = torch.where(auc_G.isnan(), 0.0, mass_G)
    if bool(mass_G.any()):
        value = float(auc_G.nan_to_num(0.0) @ mass_G / mass_G.sum())
        result["gauc"] = Estimate(value, mass_G * (auc_G.nan_to_num(0.0) - value) / mass_G.sum())
    by_metric, weight_G = topk_by_group(scores_B, labels_B, groups_B, weights_B)
    for name, value_G in by_metric.items():
        part_G = torch.where(value_G.isnan(), 0.0, weight_G / weight_G[~value_G.isnan()].sum())
        value = float(value_G.nan_to_num(0.0) @ part_G)
        known = bool(part_G.any())
        result[name] = Estimate(value, part_G * (value_G.nan_to_num(0.0) - value)) if known else unknown
    return result


@functools.cache
def t_quantile(level: float, degrees: float) -> float:
    """Returns half the width, in standard errors, of an interval that holds `level` of the mass of Student's t.

    degrees: of freedom, >= 1.

    With t = sqrt(degrees) tan(a) the density is cos(a)^(degrees - 1), which is summed on a grid (error below 1e-4).
    """
    if degrees > 1e6:
        degrees = 1e6  # the normal distribution, to 6 digits
    edge = min(math.pi / 2, 40 / math.sqrt(degrees))  # beyond it there is almost no mass
    grid = np.linspace(0, edge, 200_001)
    middle = (grid[:-1] + grid[1:]) / 2
    mass = np.cumsum(np.cos(middle) ** (degrees - 1))
    angle = np.interp(level * mass[-1], mass, grid[1:])
    return math.sqrt(degrees) * math.tan(angle)

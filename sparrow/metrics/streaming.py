"""Metrics of a stream in constant memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.metrics._columns import check_probabilities, columns
from sparrow.metrics.likelihood import CLAMP, base_logloss, log_odds_and_loss

BINS = 1 << 16
ECE_BINS = 20
_REACH = math.log1p(-CLAMP) - math.log(CLAMP)  # the largest logit of a clamped score, 16.1


class Reliability(NamedTuple):
    """Points of a calibration picture, one per score quantile: mean predictions, mean labels and weights, [Q] each."""

    predictions_Q: Tensor
    labels_Q: Tensor
    weights_Q: Tensor


class Streaming:
    """Logloss, NE, calibration and AUC of a stream of rows. The state takes 1 MiB, and states of parts can be added.

    Everything but AUC is a ratio of float64 sums. AUC comes from the weight of clicks and non-clicks in 65,536 bins of
    the score's logit, each 0.0005 wide. Within a bin every pair counts as a tie, see `auc_error`. Counts are exact up
    to 2^53. The state is in host memory, and an update copies 8 to 12 bytes a row there.
    """

    def __init__(self, sums: Tensor | None = None) -> None:
        """Make an empty stream, or one with the added `sums` of others."""
        self._all = torch.zeros(2 * BINS + 5, dtype=torch.float64) if sums is None else sums
        self._masses = self._all[: 2 * BINS].view(2, BINS)  # non-clicks, clicks
        self._sums = self._all[2 * BINS :]  # rows, weights, clicks, predictions, losses

    def update(
        self, scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None, also: Sequence[Streaming] = ()
    ) -> None:
        """Add rows.

        Args:
            scores_B: probabilities, [B], on any device.
            labels_B: 0 or 1, [B].
            weights_B: >= 0, [B]; ones by default.
            also: other streams that get the same rows; this takes little more time than one stream.

        Raises:
            UserError: for other shapes, scores outside 0..1, and impossible labels or weights.
        """
        scores_B, labels_B, weights_B = columns(scores_B.cpu(), labels_B, weights_B)
        check_probabilities(scores_B)
        logits_B, loss_B = log_odds_and_loss(scores_B, labels_B)
        bins_B = _bins(logits_B)
        clicks_B = weights_B * labels_B
        others_B, rows = weights_B - clicks_B, weights_B.new_tensor(weights_B.numel())
        sums = torch.stack(
            [rows, weights_B.sum(), clicks_B.sum(), weights_B @ scores_B, weights_B @ loss_B]  # NaN scores reach these
        )
        for stream in (self, *also):
            stream._masses[0].index_add_(0, bins_B, others_B)
            stream._masses[1].index_add_(0, bins_B, clicks_B)
            stream._sums += sums

    def merge(self, other: Streaming) -> None:
        """Add all that `other` has seen."""
        self._all += other._all

    def sums(self) -> Tensor:
        """Returns all that it has seen, as float64 numbers, which can be added to those of other streams."""
        return self._all.clone()

    def quantiles(self, scores_N: Tensor, count: int) -> Tensor:
        """Returns the range of each score, int64 [N] on its device, of `count` ranges of about the same weight."""
        return self._quantiles(count).to(scores_N.device)[_bins(torch.logit(scores_N.double(), CLAMP))]

    def result(self, base_rate: float | None = None) -> dict[str, float]:
        """Returns auc, logloss, ne, calibration, base_rate and examples (rows); NaN where they are undefined.

        base_rate: what NE compares with; by default that of the stream.
        """
        rows, mass, clicks, predicted, loss = self._sums.tolist()
        known = mass > 0
        return {
            "auc": self._auc() if not math.isnan(predicted) else math.nan,
            "logloss": loss / mass if known else math.nan,
            "ne": loss / mass / base_logloss(mass, clicks, base_rate) if known else math.nan,
            "calibration": predicted / clicks if clicks else math.nan,
            "base_rate": clicks / mass if known else math.nan,
            "examples": rows,
        }

    def _auc(self) -> float:
        others_R, clicks_R = self._masses
        below_R = others_R.cumsum(0) - others_R / 2
        pairs = _sum(others_R) * _sum(clicks_R)
        return _sum(clicks_R * below_R) / pairs if pairs else math.nan

    def auc_error(self) -> float:
        """Returns a bound on |auc - exact AUC|: half the share of (click, non-click) pairs in one bin. NaN like auc."""
        others_R, clicks_R = self._masses
        pairs = _sum(others_R) * _sum(clicks_R)
        return _sum(clicks_R * others_R) / 2 / pairs if pairs else math.nan

    def reliability(self, quantiles: int = 20) -> Reliability:
        """Returns the mean prediction and mean label of `quantiles` ranges of equal weight, in order of score.

        Predictions are those of the middles of bins, within 0.03 % (or 1e-7) of the truth. There are fewer ranges if
        many scores are equal, and none without rows.
        """
        mass_R = self._masses.sum(0)
        middle_R = torch.sigmoid((torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 * _REACH / BINS) - _REACH)
        group_R = self._quantiles(quantiles)
        sums = torch.zeros(3, quantiles, dtype=torch.float64)
        sums.index_add_(1, group_R, torch.stack([mass_R * middle_R, self._masses[1], mass_R]))
        predictions_Q, labels_Q, weights_Q = sums[:, sums[2] > 0]
        return Reliability(predictions_Q / weights_Q, labels_Q / weights_Q, weights_Q)

    def ece(self) -> float:
        """Returns `ece` of predictions in the middles of bins, which are within 0.03 % (or 1e-7) of the truth."""
        points = self.reliability(ECE_BINS)
        if not len(points.weights_Q) or math.isnan(self._sums[3]):
            return math.nan
        off_Q = (points.predictions_Q - points.labels_Q).abs()
        return _sum(off_Q * points.weights_Q) / _sum(points.weights_Q)

    def _quantiles(self, count: int) -> Tensor:
        """Returns which of `count` ranges of about equal weight each bin is in, int64 [BINS]."""
        mass_R = self._masses.sum(0)
        place_R = (mass_R.cumsum(0) - mass_R / 2) / _sum(mass_R)
        return (place_R.nan_to_num(0) * count).long().clamp(max=count - 1)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns a copy of the state, from which a stream continues to the same bits. For many ranks see `folded`."""
        # few bins are used: a new stream has few rows, and most of the range of scores stays empty
        used_K = self._masses.any(0).nonzero()[:, 0]
        return {"bins": used_K, "masses": self._masses[:, used_K], "sums": self._sums.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor], rank: int = 0, ranks: int = 1) -> None:
        """Continue from a `state_dict`.

        Args:
            state: what it returned.
            rank, ranks: which of how many ranks this is. Rank 0 gets what is not kept for each rank.
        """
        self._all.zero_()
        sums_W5 = state["sums"].view(-1, 5)
        if rank == 0:
            self._masses[:, state["bins"]] = state["masses"]
            self._sums.copy_(sums_W5.sum(0))
        if len(sums_W5) == ranks:
            self._sums.copy_(sums_W5[rank])


def ece(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Returns the expected calibration error: how far the mean prediction of like scores is from their mean label.

    It is sum_q |sum of w_b (p_b - y_b) in q| / sum_b w_b, over 20 ranges q of scores that hold about equal weight.
    Equal scores are in one range. 0 is best, but noise alone gives more than 0. It is NaN without rows, and when a
    score is NaN. Source: Nixon et al. 2019, Measuring calibration in deep learning (the adaptive calibration error).

    Args:
        scores_B: probabilities, [B].
        labels_B: 0 or 1, [B].
        weights_B: >= 0, [B]; ones by default.

    Raises:
        UserError: for scores outside 0..1, other shapes, and impossible labels or weights.
    """
    return ece_and_signs(*columns(scores_B, labels_B, weights_B))[0]


def ece_and_signs(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor) -> tuple[float, Tensor]:
    """Returns `ece`, and whether the range of each row predicts too much (1), too little (-1) or right (0), [B]."""
    stream = Streaming()
    stream.update(scores_B, labels_B, weights_B)
    bin_B = stream.quantiles(scores_B, ECE_BINS)
    sums = residuals(bin_B, scores_B, labels_B, weights_B)
    mass = float(sums[-1])
    return float(sums[:-1].abs().sum()) / mass if mass else math.nan, sums.sign()[bin_B]


def residuals(bin_B: Tensor, scores_B: Tensor, labels_B: Tensor, weights_B: Tensor) -> Tensor:
    """Returns sum of w (p - y) of each of ECE_BINS ranges, and the sum of all weights, float64 [ECE_BINS + 1]."""
    off_Q = torch.bincount(bin_B, weights_B * (scores_B - labels_B), ECE_BINS)
    return torch.cat([off_Q, weights_B.sum()[None]])


def _sum(x_R: Tensor) -> float:
    """The sum from the first to the last. Other sums depend on threads and on addresses, and all ranks must agree."""
    return float(x_R.cumsum(0)[-1])


def _bins(logits_B: Tensor) -> Tensor:
    return ((logits_B + _REACH) * (BINS / 2 / _REACH)).nan_to_num(0).long().clamp(0, BINS - 1)

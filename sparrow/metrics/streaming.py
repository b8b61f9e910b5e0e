"""Metrics of a stream in constant memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.metrics._columns import check_probabilities, columns
from sparrow.metrics._logloss import CLAMP, base_logloss, log_odds_and_loss
from sparrow.metrics.metric import METRICS

BINS = 1 << 16
ECE_BINS = 20
_REACH = math.log1p(-CLAMP) - math.log(CLAMP)  # the largest logit of a clamped score, 16.1


class Reliability(NamedTuple):
    """Points of a calibration picture, one per score quantile: mean predictions, mean labels and
    weights, [Q] each.
    """

    predictions_Q: Tensor
    labels_Q: Tensor
    weights_Q: Tensor


class Streaming:
    """Logloss, NE, calibration and AUC of a stream of rows. The state takes 1 MiB, and states of
    parts can be added.

    Everything but AUC is made of float64 sums, and so are metrics of what a model measures. AUC
    comes from the weight of clicks and non-clicks in 65,536 bins of the score's logit, each 0.0005
    wide. Within a bin every pair counts as a tie, see `intervals.auc_error`. Counts are exact up to
    2^53. The state is in host memory, and an update copies 8 to 12 bytes a row there.
    """

    def __init__(self, sums: Tensor | None = None, measures: Sequence[str] = ()) -> None:
        """Make an empty stream, or one with the added `sums` of others. measures: names of what a
        model measures of each row.
        """
        self.measures = measures
        length = 2 * BINS + 5 + len(measures)
        self._all = torch.zeros(length, dtype=torch.float64) if sums is None else sums
        self._masses = self._all[: 2 * BINS].view(2, BINS)  # non-clicks, clicks
        # rows, weights, clicks, predictions, losses, and then what is measured
        self._sums = self._all[2 * BINS :]

    def update(
        self,
        scores_B: Tensor,
        labels_B: Tensor,
        weights_B: Tensor | None = None,
        also: Sequence[Streaming] = (),
        measures_BM: Tensor | None = None,
    ) -> None:
        """Add rows.

        Args:
            scores_B: probabilities, [B], on any device.
            labels_B: 0..1, [B]; see `auc`.
            weights_B: >= 0, [B]; ones by default.
            also: other streams that get the same rows; this takes little more time than one stream.
            measures_BM: what the model measures of each row, [B, M], in the order of `measures`.

        Raises:
            UserError: for other shapes, scores outside 0..1, and impossible labels or weights.
        """
        scores_B, labels_B, weights_B = columns(scores_B.cpu(), labels_B, weights_B)
        check_probabilities(scores_B)
        logits_B, loss_B = log_odds_and_loss(scores_B, labels_B)
        bins_B = _bins(logits_B)
        clicks_B = weights_B * labels_B
        non_clicks_B = weights_B - clicks_B
        rows = weights_B.new_tensor(weights_B.numel())
        sums = torch.stack(
            # NaN scores reach these
            [rows, weights_B.sum(), clicks_B.sum(), weights_B @ scores_B, weights_B @ loss_B]
        )
        if measures_BM is not None:
            sums = torch.cat([sums, weights_B @ measures_BM.to("cpu", torch.float64)])
        for stream in (self, *also):
            stream._masses[0].index_add_(0, bins_B, non_clicks_B)
            stream._masses[1].index_add_(0, bins_B, clicks_B)
            stream._sums += sums

    def merge(self, stream: Streaming) -> None:
        """Add all that another stream has seen."""
        self._all += stream._all

    def sums(self) -> Tensor:
        """Returns all that it has seen, as float64 numbers, which can be added to those of other
        streams.
        """
        return self._all.clone()

    @property
    def masses(self) -> Tensor:
        """The weights of non-clicks and of clicks in each bin of scores, float64 [2, BINS]; see
        `middles`.
        """
        return self._masses

    @property
    def rows(self) -> int:
        """How many rows it has seen."""
        return int(self._sums[0])

    def quantiles(self, scores_N: Tensor, count: int) -> Tensor:
        """Returns the range of each score, int64 [N] on its device, of `count` ranges of about the
        same weight.
        """
        bins_N = _bins(torch.logit(scores_N.double(), CLAMP))
        return self._quantiles(count).to(scores_N.device)[bins_N]

    def result(self, *, with_unlogged: bool = False) -> dict[str, float]:
        """Returns the metrics of the run log, base_rate and examples (rows); NaN where they are
        undefined.

        with_unlogged: also the metrics that the run log does not have, such as ece.
        """
        sum_of = dict(zip(self.measures, self._sums[5:], strict=True))
        values = {}
        for name, metric in METRICS.items():
            if not (metric.is_logged or with_unlogged):
                continue
            if metric.stream:
                values[name] = metric.stream(self)
            elif metric.value and sum_of.keys() >= {*metric.measures}:
                values[name] = float(metric.value(*map(sum_of.get, metric.measures)))
        rows, mass, clicks, *_ = self._sums.tolist()
        return values | {"base_rate": clicks / mass if mass > 0 else math.nan, "examples": rows}

    def logloss(self) -> float:
        """Returns `logloss`."""
        _, mass, _, _, loss, *_ = self._sums.tolist()
        return loss / mass if mass > 0 else math.nan

    def ne(self, base_rate: float | None = None) -> float:
        """Returns `ne`. base_rate: what it compares with; by default that of the stream."""
        _, mass, clicks, _, loss, *_ = self._sums.tolist()
        return loss / mass / base_logloss(mass, clicks, base_rate) if mass > 0 else math.nan

    def calibration(self) -> float:
        """Returns `calibration`."""
        _, _, clicks, predicted, *_ = self._sums.tolist()
        return predicted / clicks if clicks else math.nan

    def auc(self) -> float:
        """Returns `auc`, within `intervals.auc_error`."""
        if math.isnan(self._sums[3]):
            return math.nan
        non_clicks_R, clicks_R = self._masses
        below_R = non_clicks_R.cumsum(0) - non_clicks_R / 2
        pairs = _sum(non_clicks_R) * _sum(clicks_R)
        return _sum(clicks_R * below_R) / pairs if pairs else math.nan

    def reliability(self, quantiles: int = 20) -> Reliability:
        """Returns the mean prediction and mean label of `quantiles` ranges of equal weight, in
        order of score.

        Predictions are those of the middles of bins, within 0.03 % (or 1e-7) of the truth. There
        are fewer ranges if many scores are equal, and none without rows.
        """
        mass_R, middle_R = self._masses.sum(0), middles()
        group_R = self._quantiles(quantiles)
        sums = torch.zeros(3, quantiles, dtype=torch.float64)
        sums.index_add_(1, group_R, torch.stack([mass_R * middle_R, self._masses[1], mass_R]))
        predictions_Q, labels_Q, weights_Q = sums[:, sums[2] > 0]
        return Reliability(predictions_Q / weights_Q, labels_Q / weights_Q, weights_Q)

    def ece(self) -> float:
        """Returns `ece` of predictions in the middles of bins, which are within 0.03 % (or 1e-7) of
        the truth.
        """
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
        """Returns a copy of the state, from which a stream continues to the same bits. For many
        ranks see `folded`.
        """
        # few bins are used: a new stream has few rows, and most of the range of scores stays empty
        used_K = self._masses.any(0).nonzero()[:, 0]
        return {"bins": used_K, "masses": self._masses[:, used_K], "sums": self._sums.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor], rank: int = 0, ranks: int = 1) -> None:
        """Continue from a `state_dict`.

        Args:
            state: what it returned.
            rank, ranks: which of how many ranks this is. Rank 0 gets what is not kept for each
                rank.
        """
        self._all.zero_()
        sums_WS = state["sums"].view(-1, len(self._sums))
        if rank == 0:
            self._masses[:, state["bins"]] = state["masses"]
            self._sums.copy_(sums_WS.sum(0))
        if len(sums_WS) == ranks:
            self._sums.copy_(sums_WS[rank])


def residuals(bin_B: Tensor, scores_B: Tensor, labels_B: Tensor, weights_B: Tensor) -> Tensor:
    """Returns sum of w (p - y) of each of ECE_BINS ranges, and the sum of all weights, float64
    [ECE_BINS + 1].
    """
    off_Q = torch.bincount(bin_B, weights_B * (scores_B - labels_B), ECE_BINS)
    return torch.cat([off_Q, weights_B.sum()[None]])


def middles() -> Tensor:
    """Returns the score in the middle of each bin of a stream, float64 [BINS]."""
    return torch.sigmoid(
        (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 * _REACH / BINS) - _REACH
    )


def _sum(x_R: Tensor) -> float:
    """The sum from the first to the last. Other sums depend on threads and on addresses, and all
    ranks must agree.
    """
    return float(x_R.cumsum(0)[-1])


def _bins(logits_B: Tensor) -> Tensor:
    return ((logits_B + _REACH) * (BINS / 2 / _REACH)).nan_to_num(0).long().clamp(0, BINS - 1)

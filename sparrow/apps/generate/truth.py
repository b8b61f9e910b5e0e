"""What the true probabilities of a synthetic log score, in memory that does not grow with the
log.
"""

from __future__ import annotations

import math

import torch

from sparrow.core.arrays import Floats, Ints
from sparrow.metrics import Streaming, auc, auc_by_group

# a log of more rows is not kept to sort it: its AUC comes from the bins of `Streaming`
EXACT_ROWS = 1 << 20


class Truth:
    """Takes in a log's rows in order, and judges those from one on: auc, logloss, gauc and so on,
    see `evaluate`.

    Memory is that of `Streaming`, and 5 bytes a row if it is exact.
    """

    def __init__(self, first: int, *, exact: bool) -> None:
        """first: number of the first row that counts, which begins a session. exact: the AUC has no
        binning error.
        """
        self._first = first
        self._exact = exact
        self._stream = Streaming()
        self._p: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        # rows times AUC, rows and number of sessions that have one
        self._within = torch.zeros(3, dtype=torch.float64)

    def add(self, row: int, p_B: Floats, label_B: Ints, session_B: Ints) -> None:
        """Takes in whole sessions. row: the number of their first row; p_B: probabilities; label_B:
        drawn from them.
        """
        skip = max(self._first - row, 0)
        if skip >= len(p_B):
            return
        p, labels, sessions = (torch.from_numpy(x[skip:]) for x in (p_B, label_B, session_B))
        self._stream.update(p, labels)
        if self._exact:
            self._p.append(p)
            self._labels.append(labels)
        auc_G, rows_G = auc_by_group(p, labels, sessions)
        has_one_G = ~auc_G.isnan()
        rows_G = rows_G[has_one_G]
        auc_G = auc_G[has_one_G]
        self._within += torch.stack([auc_G @ rows_G, rows_G.sum(), has_one_G.sum()])

    def result(self) -> dict[str, float]:
        """Returns the metrics, NaN where they are undefined."""
        metrics = self._stream.result()
        if self._exact:
            metrics["auc"] = auc(torch.cat(self._p), torch.cat(self._labels))
        total, rows, sessions = self._within.tolist()
        return metrics | {"gauc": total / rows if rows else math.nan, "gauc_groups": int(sessions)}

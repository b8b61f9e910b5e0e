"""The part of a blend that learns by steps: vectors of ids and numbers, and members that share an
MLP's weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core.plain import plain
from sparrow.extensions.blend.ranges import choose_knots
from sparrow.layers.activation import Activation
from sparrow.layers.dropout import Dropout
from sparrow.layers.product import Product
from sparrow.layers.site import Matmul


class PiecewiseLinear(nn.Module):
    """How far a number is through each of K ranges that hold equally many training rows, and a
    vector made of it.

    Number x gives range k the value (x - a_k) / (a_{k+1} - a_k), cut to 0..1 (Gorishniy et al., "On
    Embeddings for Numerical Features in Tabular Deep Learning", 2022, section 3.2). A column with
    at most K values has a range for each, and so every function of it is linear in these.

    knots_CK1: where ranges begin and end. Ranges of no width, at the end, count 0.

    Args:
        columns: C.
        ranges: K.
        dim: D of the vectors.
    """

    knots_CK1: Tensor

    def __init__(self, columns: int, ranges: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("knots_CK1", torch.zeros(columns, ranges + 1))
        self.knots_CK1.copy_(torch.tensor([4 * k / ranges - 2 for k in range(ranges + 1)]))
        self.weight_CKD = nn.Parameter(torch.randn(columns, ranges, dim) * 0.05)
        self.bias_CD = nn.Parameter(torch.randn(columns, dim) * 0.05)
        self.product = Matmul()
        self.out_features = columns * dim

    def fit(self, dense_NC: Tensor) -> None:
        """Choose the ranges by training rows."""
        self.knots_CK1.copy_(choose_knots(dense_NC, self.knots_CK1.shape[1] - 1))

    def encode(self, dense_BC: Tensor) -> Tensor:
        """Returns the values of all ranges, [B, C, K]."""
        widths_CK = self.knots_CK1.diff(dim=1)
        per_unit_CK = torch.where(widths_CK > 0, 1 / widths_CK, 0.0)
        return ((dense_BC[:, :, None] - self.knots_CK1[:, :-1]) * per_unit_CK).clamp(0, 1)

    def forward(self, dense_BC: Tensor) -> Tensor:
        """Returns a vector for each column, side by side, [B, C * D]."""
        values_CBK = self.encode(dense_BC).transpose(0, 1)
        vectors_BCD = self.product(values_CBK, self.weight_CKD, weights=True).transpose(0, 1)
        vectors_BCD = vectors_BCD if self.bias_CD is None else vectors_BCD + self.bias_CD
        return vectors_BCD.flatten(1)


class Members(nn.Module):
    """K MLPs with one set of weights, [B, in] -> logits [B, T, K] (TabM, arXiv 2410.24210).

    Each member scales inputs and outputs of a layer by vectors of its own (BatchEnsemble, arXiv
    2002.06715), and of the first layer the outputs alone: so its product is one for all members.
    These begin as random signs, which makes members differ; all others begin as 1.

    Args:
        in_features: columns of the input.
        sizes: of hidden layers.
        tasks: T.
        members: K.
        dropout: the share of hidden numbers that are 0 in training, see `Dropout`.
    """

    is_last = True  # of its own biases; see `put_layers`

    def __init__(
        self, in_features: int, sizes: Sequence[int], tasks: int, members: int, dropout: float
    ) -> None:
        super().__init__()
        widths = [in_features, *sizes]
        self.layers = nn.ModuleList(
            _Layer(*pair, members, is_first=i == 0)
            for i, pair in enumerate(itertools.pairwise(widths))
        )
        self.head_KXT = nn.Parameter(
            torch.randn(members, widths[-1], tasks) / math.sqrt(widths[-1])
        )
        self.bias_KT = nn.Parameter(torch.zeros(members, tasks))
        self.head = Matmul(high=True)  # as every `Head`
        if sizes:
            self.activation = Activation()
        self.dropout = Dropout(dropout)

    def forward(self, x_BX: Tensor) -> Tensor:
        """Returns logits [B, T, K]."""
        h_BKX = x_BX[:, None]
        for layer in self.layers:
            h_BKX = self.dropout(self.activation(layer(h_BKX)))
        h_KBX = h_BKX.float().transpose(0, 1)
        logits_BKT = self.head(h_KBX, self.head_KXT, weights=True).transpose(0, 1) + self.bias_KT
        return logits_BKT.transpose(1, 2)


class _Layer(nn.Module):
    """(x r_k) W^T s_k + b_k for each member k, [B, K, in] -> [B, K, out]; the first without r_k,
    [B, 1, in].
    """

    def __init__(self, in_features: int, out_features: int, members: int, is_first: bool) -> None:
        super().__init__()
        scale = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter((torch.rand(out_features, in_features) - 0.5) * (2 * scale))
        signs_KY = torch.randn(members, out_features).sign_()
        self.inputs_KX = None if is_first else nn.Parameter(torch.ones(members, in_features))
        self.outputs_KY = nn.Parameter(signs_KY if is_first else torch.ones(members, out_features))
        self.bias_KY = nn.Parameter((torch.rand(members, out_features) - 0.5) * (2 * scale))
        self.product = Product()

    def forward(self, x_BKX: Tensor) -> Tensor:
        scaled_BKX = x_BKX if self.inputs_KX is None else x_BKX * self.inputs_KX
        y_NY = plain(self.product([scaled_BKX.flatten(0, 1)], self.weight))
        y_BKY = y_NY.unflatten(0, x_BKX.shape[:2]) * self.outputs_KY
        return y_BKY if self.bias_KY is None else y_BKY + self.bias_KY


def mean_logit(logits_BTK: Tensor) -> Tensor:
    """Returns the logit of the mean of the members' probabilities, [B, T]."""
    click_BT = F.logsigmoid(logits_BTK).logsumexp(2)
    no_click_BT = F.logsigmoid(-logits_BTK).logsumexp(2)
    return click_BT - no_click_BT

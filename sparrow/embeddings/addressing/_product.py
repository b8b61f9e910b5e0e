from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core.functions import applied
from sparrow.layers.rounded import Rounded
from sparrow.layers.site import Site


class TableProduct(Site):
    """x W^T of vectors of table rows, a site. Rows are fp32, so only a recipe of its own rounds the
    operands.
    """

    def __init__(self) -> None:
        super().__init__(high=True)

    def forward(self, x_ND: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x W^T + b, fp32 [N, out]. weight: [out, D]. bias: [out]."""
        how = self.way
        if how is None:
            return F.linear(x_ND, weight, bias)
        y: Tensor = applied(Rounded, x_ND, weight.t(), how, False, x_ND.dtype)
        return y if bias is None else y + bias


class TableLinear(nn.Linear):
    """torch's without a bias, as a site."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.product = TableProduct()

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T, [N, out]."""
        out: Tensor = self.product(x, self.weight)
        return out

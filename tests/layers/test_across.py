"""Products whose inputs stand before the samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparrow.core import repeated
from sparrow.core.repeated import Repeated, Users
from sparrow.layers.product import Product


def test_across_is_the_product_of_the_transposed() -> None:
    x, weight, product = torch.randn(5, 4), torch.randn(3, 4), Product()
    torch.testing.assert_close(product((x.t(),), weight, across=True), product((x,), weight).t())
    product.instead = lambda parts, bias, relu: 2 * parts[0] @ weight.t()  # type: ignore[assignment]
    torch.testing.assert_close(product((x.t(),), weight, across=True), 2 * weight @ x.t())


@torch.no_grad()
@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("shared", [[True, False, True, False], [True] * 4])
def test_across_runs_once_for_what_is_shared(
    shared: list[bool], users: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors stand before samples, as in Wukong: [in, B, D]."""
    monkeypatch.setattr(repeated, "LEAST", 1)
    monkeypatch.setattr(repeated, "COPYING", 0)
    whose = Users.of(np.arange(6) % users, users)
    x_NBD, weight, product = torch.randn(4, 6, 2), torch.randn(3, 4), Product()
    marks_N1D = torch.tensor(shared)[:, None, None].expand(4, 1, 2).clone()
    x_NBD = torch.where(marks_N1D, x_NBD[:, whose.sample_U][:, whose.inverse_B], x_NBD)
    found = product((Repeated.of(x_NBD, whose, marks_N1D),), weight, across=True)
    torch.testing.assert_close(found, torch.einsum("on,nbd->obd", weight, x_NBD))
    assert any("across" in key for key in product.forms)
    torch.testing.assert_close(product((x_NBD,), weight, across=True), found)

"""Products of a served model in other formats: what they compute, and what a file of them must
have.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparrow.core import UserError
from sparrow.core.repeated import Repeated, Users
from sparrow.interactions.cross import CrossNet
from sparrow.kernels.int8_linear import sums
from sparrow.layers.mlp import MLP, Head
from sparrow.layers.product import sites
from sparrow.serving import products
from sparrow.serving.products import int8


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"mlp": MLP(6, (5,)), "cross": CrossNet(5, 2), "head": Head(5, 1)}
    ).requires_grad_(False)


def of(modules: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = modules["head"](modules["cross"](modules["mlp"](x)))
    return found


@pytest.mark.parametrize(("name", "close"), [("int8", 0.08), ("bf16", 0.02)])
def test_a_model_with_all_products_in_a_format(name: str, close: float) -> None:
    """Near to what it was, and its own weights are gone."""
    plain, format = model(), products.format_of(name)
    x = torch.randn(50, 6).clamp(-3, 3)
    stored, dense = {}, dict(plain.state_dict())
    for site in sites(plain):
        stored |= products.name_fields(site, name, format.encode(dense.pop(site), (-6.0, 6.0)))
    made = model()
    products.put(made, stored, dense)
    apart = (of(made, x) - of(plain, x)).norm() / of(plain, x).norm()
    assert 0 < apart < close
    assert all(not made.get_parameter(site).numel() for site in sites(made))
    for row in range(3):  # whatever is beside it
        torch.testing.assert_close(
            of(made, x[row : row + 1]), of(made, x)[row : row + 1], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", products.FORMATS)
def test_a_number_that_is_not_finite_stays_in_its_row(name: str) -> None:
    format = products.format_of(name)
    product = format.Product(format.encode(torch.randn(4, 6), (-3.0, 3.0)))
    x = torch.randn(3, 6)
    clean = product([x], None, False)
    for bad in (float("nan"), float("inf")):
        x[1, 2] = bad
        found = product([x], None, False)
        assert not found[1].isfinite().any()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("name", products.FORMATS)
def test_parts_bias_and_relu(name: str) -> None:
    format = products.format_of(name)
    weight_OI, bias, x = torch.randn(4, 6), torch.randn(4), torch.randn(5, 6).clamp(-3, 3)
    fields = format.encode(weight_OI, (-3.0, 3.0))
    whole = format.Product(fields)([x], bias, True)
    assert torch.equal(format.Product(fields)([x[:, :2], x[:, 2:]], bias, True), whole)
    torch.testing.assert_close(whole, (x @ weight_OI.t() + bias).relu(), rtol=0, atol=0.15)
    torch.testing.assert_close(
        format.Product(fields)([x], None, False), x @ weight_OI.t(), rtol=0, atol=0.15
    )


def test_inputs_of_bytes_may_have_ranges_of_their_own_rows() -> None:
    product = int8.Product(int8.encode(torch.eye(3), None))
    x = torch.tensor([[1.0, 2.0, 3.0], [1000.0, 0.0, -1000.0]])
    torch.testing.assert_close(product([x], None, False), x, rtol=0.02, atol=0.02)
    assert torch.equal(product([x[:1]], None, False), product([x], None, False)[:1])


def test_a_file_of_another_model_is_refused() -> None:
    plain = model()
    dense = dict(plain.state_dict())
    fields = int8.encode(dense["head.weight"], (0.0, 1.0))
    without = {name: tensor for name, tensor in dense.items() if name != "head.weight"}
    products.put(model(), products.name_fields("head.weight", "int8", fields), without)
    for stored, left in (
        ({}, without),  # a weight is missing
        (products.name_fields("head.weight", "int8", fields), dense),  # one is there twice
        (products.name_fields("heed.weight", "int8", fields), without),  # no such site
        (
            products.name_fields("head.bias", "int8", fields),
            {n: t for n, t in dense.items() if n != "head.bias"},
        ),
    ):
        with pytest.raises(UserError, match="not of this model"):
            products.put(model(), stored, left)
    with pytest.raises(UserError, match="int3.*newer Sparrow"):
        products.put(model(), products.name_fields("head.weight", "int3", fields), without)


@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_sums_of_what_users_share_are_added_exactly(
    users: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and the product of the shared columns has a row for each user."""
    monkeypatch.setattr(int8, "LEAST", -(10**9))
    generator = torch.Generator().manual_seed(1)
    x_BI = torch.randn(40, 30, generator=generator)
    user_B = torch.randint(users, (40,), generator=generator).numpy()
    whose = Users.of(user_B, users)
    marks = torch.rand(1, 30, generator=generator) < share
    x_BI = torch.where(marks, x_BI[whose.sample_U][whose.inverse_B], x_BI)
    product = int8.Product(int8.encode(torch.randn(7, 30, generator=generator), (-2.0, 2.0)))
    bias, rows = torch.randn(7, generator=generator), []
    expected = product([x_BI], bias, True)
    monkeypatch.setattr(int8, "sums", lambda x, *rest: rows.append(len(x)) or sums(x, *rest))
    found = product([Repeated.of(x_BI, whose, marks)], bias, True)
    assert torch.equal(found, expected)
    assert rows == ([users] if 0 < share < 1 else [])
    assert isinstance(found, Repeated) is (share == 1)  # the next product runs for each user too
    # each row has its own scale: there is nothing to share
    whole = int8.Product(int8.encode(torch.eye(30), None))
    assert torch.equal(
        whole([Repeated.of(x_BI, whose, marks)], None, False), whole([x_BI], None, False)
    )

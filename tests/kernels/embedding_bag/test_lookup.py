from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sparrow.kernels import Impl, embedding_bag
from sparrow.kernels.embedding_bag import Bags, Lookups
from sparrow.kernels.rules import sgd
from tests.kernels.embedding_bag.cases import (
    IMPLS,
    ODD,
    RULES,
    Shape,
    assert_close,
    build,
    built,
    look,
    looked_up,
    raw,
    two_tables,
    updated,
)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_is_torchs_embedding_bag(pooling: str, weighted: bool) -> None:
    shape = Shape(keys=(ODD,), weighted=weighted, lookups=(look(pooling),))  # type: ignore[arg-type]
    call = build(shape, [5], RULES["sgd, plain"], levels=3)
    weight_RD = torch.cat(call.tables.payload).requires_grad_()
    slots_N, offsets_B1 = call.bags.slots_N, call.bags.offsets_B1
    weights_N = torch.ones(len(slots_N)) if call.bags.weights_N is None else call.bags.weights_N
    weights_N.requires_grad_()
    if pooling == "none":
        offsets_B1 = torch.arange(len(slots_N) + 1)
    expected_BD = F.embedding_bag(
        slots_N,
        weight_RD,
        offsets_B1,
        mode="sum",
        per_sample_weights=weights_N,
        include_last_offset=True,
    )
    if pooling == "mean":
        expected_BD = expected_BD / offsets_B1.diff().clamp(min=1)[:, None]
        plain_BD = F.embedding_bag(
            slots_N, weight_RD, offsets_B1, mode="mean", include_last_offset=True
        )
        if not weighted:
            torch.testing.assert_close(expected_BD, plain_BD)
    expected_BD.backward(call.grads[0])
    with torch.no_grad():
        found = looked_up(call, "reference")
        grad_N = embedding_bag.weight_gradients(
            call.tables, call.grads, call.bags, impl="reference"
        )
    rows_U = found["rows of table 0"]
    assert rows_U.tolist() == sorted(set(slots_N.tolist()))
    torch.testing.assert_close(found["output 0"], expected_BD.detach())
    torch.testing.assert_close(grad_N, weights_N.grad)
    assert weight_RD.grad is not None
    grad_RD = torch.zeros_like(weight_RD).index_copy_(0, rows_U, found["gradients of table 0"])
    torch.testing.assert_close(grad_RD, weight_RD.grad)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_inverse_index_is_a_lookup_of_repeated_bags(impl: Impl) -> None:
    bags = Bags(
        slots_N=torch.tensor([3, 1, 1]),
        offsets_B1=torch.tensor([0, 2, 2, 3]),
        bags=[3],
        bounds=[0, 3],
        lookups=Lookups([look(inverse=0)]),
        inverses=[torch.tensor([2, 0, 0, 1])],
    )
    repeated = embedding_bag.bags_of(torch.tensor([1, 3, 1, 3, 1]), torch.tensor([0, 1, 3, 5, 5]))
    tables = embedding_bag.tables_of(torch.randn(4, 3), sgd.Config())
    grads = [torch.randn(4, 3)]
    out = [embedding_bag.lookup(tables, each, impl=impl)[0] for each in (bags, repeated)]
    assert torch.equal(out[0], out[1])
    found = [
        embedding_bag.row_gradients(tables, grads, each, impl=impl)[0] for each in (bags, repeated)
    ]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_an_inverse_index_without_samples(impl: Impl) -> None:
    call = build(
        Shape(keys=([1, 1],), lookups=(look(inverse=0),), inverses=((0, 2),)),
        [3],
        RULES["sgd, plain"],
    )
    assert_close(looked_up(call, impl), looked_up(call, "reference"), "no samples")
    assert_close(updated(call, impl), updated(call, "reference"), "no samples")


@built
@pytest.mark.parametrize("change", [{"weights_N": torch.ones(7)}, {"weights_N": torch.ones(8).double()},
                                    {"slots_N": torch.ones(8)}, {"slots_N": torch.ones(4, 2).long()},
                                    {"offsets_B1": torch.zeros(5, dtype=torch.int32)}])  # fmt: skip
def test_tensors_of_another_shape_or_dtype(change: dict[str, Any]) -> None:
    call = two_tables()
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: expected"):
        embedding_bag.lookup(call.tables, replace(call.bags, **change), impl="cpp")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "change", [{"column": 2}, {"column": 0}, {"inverse": 0}, {"pooling": "none"}]
)
def test_outputs_that_do_not_fit_together(impl: Impl, change: dict[str, Any]) -> None:
    call = two_tables()
    lookups = (call.bags.lookups[0], replace(call.bags.lookups[1], **change))
    bags = replace(call.bags, lookups=Lookups(lookups), inverses=[torch.tensor([0, 1, 1])])
    with pytest.raises(ValueError, match="output 0: "):
        embedding_bag.lookup(call.tables, bags, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_out_of_order(impl: Impl) -> None:
    call = build(
        Shape(keys=([1], [1]), lookups=(look(), look(key=1, output=1))), [3], RULES["sgd, plain"]
    )
    for lookups in (
        Lookups(call.bags.lookups[::-1]),
        Lookups([call.bags.lookups[0], look(key=1, output=3)]),
    ):
        with pytest.raises(ValueError, match="output"):
            embedding_bag.lookup(call.tables, replace(call.bags, lookups=lookups), impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_unpooled_with_an_inverse_index(impl: Impl) -> None:
    lookups = Lookups([look("none", inverse=0)])
    call = build(Shape(keys=([2],)), [3], RULES["sgd, plain"])
    bags = replace(call.bags, lookups=lookups, inverses=[torch.tensor([0, 0])])
    with pytest.raises(ValueError, match="inverse"):
        embedding_bag.lookup(call.tables, bags, impl=impl)


@built
def test_half_a_feature() -> None:
    args = list(raw(build(Shape(keys=([1],)), [3], RULES["sgd, plain"]))["lookup"])
    args[-2] = args[-2][:5]
    with pytest.raises(ValueError, match="features"):
        torch.ops.sparrow.lookup(*args)

"""Rows multiplied by those of a second table: lookups, gradients and updates of both tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Lookup, Lookups, Pooling, Tables
from sparrow.kernels.formats import fp16
from tests.kernels.embedding_bag.cases import (
    ODD,
    RULES,
    Call,
    Shape,
    assert_close,
    assert_same,
    build,
    built,
    look,
    looked_up,
)


def product_call(
    lengths: Sequence[int],
    rows: tuple[int, int] = (50, 3),
    dim: int = 5,
    pooling: Pooling = "sum",
    rule: str = "rowwise_adagrad, plain",
    weighted: bool = False,
    inverse: int = 0,
    **how: Any,
) -> Call:
    """Keys 0 and 1 are multiplied, and so are 3 and 4, of the same tables; key 2 looks up another
    table, and the first.

    inverse: how many samples choose from the bags of the first product.
    """
    other = [3, 0, 1]
    shape = Shape(
        keys=(lengths, lengths, other, ODD, ODD),
        lookups=(
            Lookup(table=0, pooling=pooling, key=0, inverse=0 if inverse else -1, by=1, by_key=1),
            look("mean", table=2, key=2, output=1),
            look(table=0, key=2, output=2),
            Lookup(table=0, pooling="mean", key=3, output=3, by=1, by_key=4),
        ),
        rows=(*rows, 7),
        weighted=weighted,
        inverses=((inverse, len(lengths)),) if inverse else (),
    )
    call = build(shape, [dim, dim, 4], RULES[rule], **how)
    bounds = call.bags.bounds
    for key in (1, 4):  # the case gives keys that no lookup names one row
        part = call.bags.slots_N[bounds[key] : bounds[key + 1]]
        part.copy_(
            torch.randint(0, rows[1], part.shape, generator=torch.Generator().manual_seed(key))
        )
    return call


def after(call: Call, impl: Any, fused: bool) -> dict[str, torch.Tensor]:
    call = call.copied()
    if fused:
        embedding_bag.fused_update(call.tables, call.grads, call.bags, call.lr_T, impl=impl)
    else:
        found = embedding_bag.row_gradients(call.tables, call.grads, call.bags, impl=impl)
        embedding_bag.update_rows(call.tables, found, call.lr_T, impl=impl)
    return call.content()


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_definition_is_torchs(pooling: Pooling, weighted: bool) -> None:
    call = product_call(ODD, pooling=pooling, weighted=weighted)
    leaves = [table.levels[0].payload["weight"].clone().requires_grad_() for table in call.tables]
    bags = call.bags
    weights_N = torch.ones(len(bags.slots_N)) if bags.weights_N is None else bags.weights_N
    weights_N = weights_N.clone().requires_grad_()
    ends, total = torch.tensor([0, *bags.bags]).cumsum(0), torch.zeros(())
    for f, grad in zip(bags.lookups, call.grads, strict=True):
        at = slice(bags.bounds[f.key], bags.bounds[f.key + 1])
        rows_ND = leaves[f.table][bags.slots_N[at]]
        if f.by >= 0:
            rows_ND = (
                rows_ND
                * leaves[f.by][bags.slots_N[bags.bounds[f.by_key] : bags.bounds[f.by_key + 1]]]
            )
        rows_ND = rows_ND * weights_N[at, None]
        if f.pooling != "none":
            lengths = bags.offsets_B1[ends[f.key] : ends[f.key + 1] + 1].diff()
            bag_N = torch.arange(len(lengths)).repeat_interleave(lengths)
            rows_ND = torch.zeros(len(lengths), rows_ND.shape[1]).index_add(0, bag_N, rows_ND)
            rows_ND = rows_ND / lengths.clamp(min=1)[:, None] if f.pooling == "mean" else rows_ND
        torch.testing.assert_close(
            looked_up(call, "reference")[f"output {f.output}"], rows_ND.detach()
        )
        total = total + (rows_ND * grad).sum()
    total.backward()
    for t, (rows_U, grad_UD) in enumerate(
        embedding_bag.row_gradients(call.tables, call.grads, bags, impl="reference")
    ):
        grad_RD = torch.zeros_like(leaves[t]).index_copy(0, rows_U, grad_UD)
        torch.testing.assert_close(grad_RD, leaves[t].grad)
    grad_N = embedding_bag.weight_gradients(call.tables, call.grads, bags, impl="reference")
    torch.testing.assert_close(grad_N, weights_N.grad)


@built
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 16, 17, 33, 64, 100, 128, 257])
def test_the_compiled_operators_are_the_reference(pooling: Pooling, dim: int) -> None:
    for weighted in (False, True):
        for inverse in (0, 60) if pooling != "none" else (0,):
            for dtype in (torch.int64, torch.int32):
                call = product_call(
                    ODD,
                    dim=dim,
                    pooling=pooling,
                    weighted=weighted,
                    inverse=inverse,
                    dtype=dtype,
                    seed=dim,
                )
                what = f"{pooling} {dim} {weighted} {inverse} {dtype}"
                assert_same(looked_up(call, "cpp"), looked_up(call, "reference"), what)


@built
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fused", [False, True])
def test_updates_are_the_reference(rule: str, fused: bool) -> None:
    call = product_call(ODD, rule=rule, dim=17, weighted=True, inverse=50)
    assert_close(after(call, "cpp", fused), after(call, "reference", fused), rule)
    narrow = product_call(ODD, rule=rule, dim=16, state=torch.bfloat16)
    assert_close(
        after(narrow, "cpp", fused), after(narrow, "reference", fused), f"{rule}, bf16 state"
    )


@built
def test_both_tables_learn_from_the_rows_before_the_update() -> None:
    """Fused: the gradient of each table is that of `row_gradients`, which changes nothing."""
    call = product_call(ODD, rule="sgd, plain", dim=16)
    assert_same(after(call, "cpp", True), after(call, "cpp", False), "fused")
    for level in call.tables.levels:
        assert level.payload["weight"].abs().sum() > 0
    untouched = [t.levels[0].touched_R.sum() for t in call.copied().tables]
    assert untouched == [0, 0, 0]
    assert after(call, "cpp", True)["touched  of table 1, level 0"].sum() == 3


@built
@pytest.mark.parametrize("rows", [(70_001, 4), (300, 60), (1, 1)])
def test_any_number_of_threads_gives_the_same_bits(
    rows: tuple[int, int], threads: Callable[[int], None]
) -> None:
    call = product_call([400, 0, 3, 57] * 50, rows=rows, dim=16, weighted=True)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append({**looked_up(call, "cpp"), **after(call, "cpp", True)})
    for other in found[1:]:
        assert_same(other, found[0], "threads")
    assert_same(looked_up(call, "cpp"), looked_up(call, "reference"), "reference")


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=built)])
def test_empty_batches(impl: Any) -> None:
    call = product_call([0, 0, 0])
    assert not looked_up(call, impl)["output 0"].any()
    none = product_call([])
    assert looked_up(none, impl)["output 0"].shape == (0, 5)


def refused(call: Call, impl: Any, told: str) -> None:
    before = {name: tensor.clone() for name, tensor in call.content().items()}
    for run in (
        lambda: embedding_bag.lookup(call.tables, call.bags, impl=impl),
        lambda: embedding_bag.row_gradients(call.tables, call.grads, call.bags, impl=impl),
        lambda: embedding_bag.fused_update(
            call.tables, call.grads, call.bags, call.lr_T, impl=impl
        ),
    ):
        with pytest.raises(ValueError, match=told):
            run()
    assert_same(call.content(), before, "what is refused changes nothing")


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=built)])
def test_what_does_not_fit(impl: Any) -> None:
    fine = product_call(ODD)
    first = fine.bags.lookups[0]

    def with_first(f: Lookup, call: Call = fine) -> Call:
        return replace(call, bags=replace(call.bags, lookups=Lookups([f, *call.bags.lookups[1:]])))

    refused(with_first(replace(first, by_key=2)), impl, "bags of other lengths")
    refused(
        with_first(replace(first, by=2)),
        impl,
        "multiplies rows of other dims|and is looked up itself",
    )
    refused(with_first(replace(first, by=9)), impl, "not there")
    refused(with_first(replace(first, by_key=9)), impl, "not there")
    refused(product_call(ODD, levels=2), impl, "not of fp32 on one level")
    refused(product_call(ODD, format=fp16.Config()), impl, "not of fp32 on one level")
    for low, rows, table in ((0, 50, 0), (fine.bags.bounds[1], 3, 1)):
        call = product_call(ODD)
        call.bags.slots_N[low + 4] = rows
        refused(
            call,
            impl,
            rf"slot {rows} at position 4 of feature 0 is outside \[0, {rows}\) of table {table}",
        )


@built
def test_what_the_compiled_operators_do_not_do() -> None:
    call = product_call(ODD, weighted=True)
    with pytest.raises(ValueError, match="weights_N: those of products have no gradient here"):
        embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl="cpp")
    own = Lookups([*call.bags.lookups[:2], look(table=1, key=2, output=2), *call.bags.lookups[3:]])
    twice = replace(call, bags=replace(call.bags, lookups=own), tables=Tables(call.tables))
    with pytest.raises(ValueError, match="a table multiplies others and is looked up itself"):
        embedding_bag.fused_update(twice.tables, twice.grads, twice.bags, twice.lr_T, impl="cpp")

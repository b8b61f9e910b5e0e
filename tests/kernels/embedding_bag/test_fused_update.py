from __future__ import annotations

import pytest
import torch

from sparrow.kernels import Impl, embedding_bag
from sparrow.kernels.embedding_bag import Tables, fp32_table
from sparrow.kernels.rules import rowwise_adagrad, sgd
from tests.kernels.embedding_bag.cases import (
    IMPLS,
    RULES,
    Call,
    Shape,
    assert_close,
    build,
    built,
    two_tables,
    updated,
)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fused", [True, False])
def test_adagrad_sees_each_row_once_with_its_whole_gradient(impl: Impl, fused: bool) -> None:
    # row 1 occurs three times, its gradient is (1, 2) + 3 (1, 0) - (0, 4) = (4, -2): the mean
    # square is 10 (the square of the mean is 1); one rule call per duplicate would end with sum 2.5
    # + 4.5 + 8 = 15
    tables = embedding_bag.tables_of(torch.zeros(3, 2), rowwise_adagrad.Config(eps=1.0))
    weights_N = torch.tensor([1.0, 0.5, 3.0, -1.0])
    bags = embedding_bag.bags_of(
        torch.tensor([1, 2, 1, 1]), torch.tensor([0, 1, 3, 4]), weights_N=weights_N
    )
    call = Call(
        tables, bags, [torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 4.0]])], torch.tensor([0.5])
    )
    _, weight_RD, touched_R, sum_R = updated(call, impl, fused=fused).values()
    rate = 0.5 / (10**0.5 + 1)
    other = 0.5 / (0.125**0.5 + 1)
    torch.testing.assert_close(sum_R, torch.tensor([0.0, 10.0, 0.125]))
    torch.testing.assert_close(
        weight_RD, torch.tensor([[0.0, 0.0], [-4 * rate, 2 * rate], [-0.5 * other, 0.0]])
    )
    assert touched_R.tolist() == [0, 1, 1]


@pytest.mark.parametrize("impl", IMPLS)
def test_untouched_rows_keep_their_bits(impl: Impl) -> None:
    for rule in RULES.values():
        call = build(Shape(keys=([0, 3, 0, 0, 2, 1, 0],), rows=(5,)), [3], rule)
        call.bags.slots_N.copy_(torch.tensor([4, 0, 4, 4, 0, 0]))
        before, after = call.content(), updated(call, impl)
        assert after["touched  of table 0, level 0"].tolist() == [1, 0, 0, 0, 1]
        for name in before:
            if name != "touched  of table 0, level 0":
                assert torch.equal(after[name][1:4], before[name][1:4]), (rule, name)
                assert (after[name][[0, 4]] != before[name][[0, 4]]).all(), (rule, name)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_learning_rate_is_read_at_every_update(impl: Impl) -> None:
    tables = embedding_bag.tables_of(torch.zeros(1, 2), sgd.Config())
    bags, lr_T = embedding_bag.bags_of(torch.tensor([0]), torch.tensor([0, 1])), torch.tensor([1.0])
    for lr, expected in ((1.0, -1.0), (0.25, -1.25), (0.0, -1.25)):
        lr_T.fill_(lr)
        embedding_bag.fused_update(tables, [torch.ones(1, 2)], bags, lr_T, impl=impl)
        assert tables.payload[0].tolist() == [[expected, expected]]


@pytest.mark.parametrize("impl", IMPLS)
def test_levels_without_rows(impl: Impl) -> None:
    rule = RULES["adam, plain"]
    for sizes in ((0, 4), (2, 0, 2), (4, 0), (0,)):
        levels = tuple(
            embedding_bag.tables_of(torch.ones(rows, 3), rule)[0].levels[0] for rows in sizes
        )
        bags = embedding_bag.bags_of(torch.arange(sum(sizes)), torch.tensor([0, sum(sizes)]))
        call = Call(Tables([fp32_table(levels, rule)]), bags, [torch.ones(1, 3)], torch.ones(1))
        assert_close(updated(call, impl), updated(call, "reference"), str(sizes))


@built
def test_gradients_that_do_not_fit() -> None:
    call = two_tables()
    for grads in (
        [],
        [torch.ones(2, 8)],
        [torch.ones(3, 7)],
        [torch.ones(2, 7).double()],
        [torch.ones(2, 7)] * 2,
    ):
        with pytest.raises(ValueError, match=r"grads: expected"):
            embedding_bag.fused_update(call.tables, grads, call.bags, call.lr_T, impl="cpp")


@built
def test_state_of_the_other_orientation() -> None:
    call = two_tables("adagrad, plain")
    for level in call.tables.levels:
        level.state["sum"] = level.state["sum"].t().contiguous()
    with pytest.raises(ValueError, match="state"):
        embedding_bag.fused_update(call.tables, call.grads, call.bags, call.lr_T, impl="cpp")

from __future__ import annotations

import pytest
import torch

from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Rows, Tables, fp32_table
from sparrow.kernels.formats import fp32
from sparrow.kernels.rules import rowwise_adagrad, sgd
from tests.kernels.embedding_bag.cases import assert_same, built, two_tables


@built
@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [0, 9], [-1, 0], [1, 2**62]])
def test_rows_that_would_race_or_lie_outside(rows: list[int]) -> None:
    call = two_tables()
    before = call.copied().content()
    good, bad = (torch.tensor([0, 1]), torch.ones(2, 4)), (torch.tensor(rows), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"rows_U must ascend within \[0, 9\)"):
        embedding_bag.update_rows(call.tables, [bad, good], call.lr_T, impl="cpp")
    assert_same(call.content(), before, "a refused update")


@built
def test_rules_and_state_that_do_not_fit() -> None:
    class Unknown(sgd.Config):
        def cpp(self) -> tuple[str, dict[str, float]]:
            return "unknown", {}

    call = two_tables()
    weight_RD, touched_R = torch.ones(5, 2), torch.zeros(5, dtype=torch.uint8)
    state = {"sum": torch.zeros(5)}
    for message, level, rule, lr_T in (
        (
            "rule unknown has no C\\+\\+ row function; use impl='reference'",
            {},
            Unknown(),
            torch.ones(1),
        ),
        ("field 0 of the state", {"state": {}}, rowwise_adagrad.Config(), torch.ones(1)),
        (
            "field 0 of the state",
            {"state": {"sum": torch.zeros(4)}},
            rowwise_adagrad.Config(),
            torch.ones(1),
        ),
        (
            "state: expected",
            {"state": {"sum": torch.zeros(5, 1)}},
            rowwise_adagrad.Config(),
            torch.ones(1),
        ),
        (
            "state: expected",
            {"state": {"sum": torch.zeros(5).double()}},
            rowwise_adagrad.Config(),
            torch.ones(1),
        ),
        ("more state than", {"state": state}, sgd.Config(), torch.ones(1)),
        ("touched_R: expected 5 rows", {"touched_R": touched_R[:4]}, sgd.Config(), torch.ones(1)),
        ("touched_R: expected", {"touched_R": touched_R.bool()}, sgd.Config(), torch.ones(1)),
        (
            "weight_RD: expected",
            {"payload": {"weight": torch.ones(2, 5).t()}},
            sgd.Config(),
            torch.ones(1),
        ),
        (
            "weight_RD: expected",
            {"payload": {"weight": weight_RD.double()}},
            sgd.Config(),
            torch.ones(1),
        ),
        ("rules: expected", {}, sgd.Config(), torch.ones(2)),
        ("lr_T: expected", {}, sgd.Config(), torch.ones(1).double()),
    ):
        rows = Rows(
            **{
                "format": fp32.Config(),
                "payload": {"weight": weight_RD},
                "touched_R": touched_R,
                **level,
            }
        )  # type: ignore[arg-type]
        tables = Tables([fp32_table([rows], rule)])
        bags = embedding_bag.bags_of(call.bags.slots_N[:1], torch.tensor([0, 1]))
        for update in (
            lambda tables=tables, lr_T=lr_T: embedding_bag.update_rows(
                tables, [(torch.tensor([0]), torch.ones(1, 2))], lr_T, impl="cpp"
            ),
            lambda tables=tables, lr_T=lr_T, bags=bags: embedding_bag.fused_update(
                tables, [torch.ones(1, 2)], bags, lr_T, impl="cpp"
            ),
        ):
            with pytest.raises(ValueError, match=message):
                update()
    assert not touched_R.any()
    assert weight_RD.eq(1).all()

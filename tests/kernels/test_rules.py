from __future__ import annotations

import pytest
import torch

from sparrow.core import UserError
from sparrow.kernels.rules import RowRule, rowwise_adagrad, sgd

RULES = [sgd.Config(), rowwise_adagrad.Config()]


@pytest.mark.parametrize("rule", RULES, ids=["sgd", "rowwise_adagrad"])
def test_update_is_pure_and_row_by_row(rule: RowRule) -> None:
    weight_UD, grad_UD, lr = torch.randn(4, 3), torch.randn(4, 3), torch.tensor(rule.lr)
    state = rule.init_state(4, 3)
    before = [t.clone() for t in (weight_UD, grad_UD, *state.values())]
    all_weight_UD, all_state = rule.update(weight_UD, state, grad_UD, lr)
    assert all(torch.equal(a, b) for a, b in zip(before, (weight_UD, grad_UD, *state.values()), strict=True))
    row = slice(2, 3)
    one_weight_UD, one_state = rule.update(weight_UD[row], {k: v[row] for k, v in state.items()}, grad_UD[row], lr)
    torch.testing.assert_close(one_weight_UD, all_weight_UD[row])
    torch.testing.assert_close(one_state, {k: v[row] for k, v in all_state.items()})


def test_adagrad_adds_up_mean_squares() -> None:
    rule = rowwise_adagrad.Config(lr=0.1, eps=0.5, initial=1.0)
    weight_UD, state = torch.zeros(1, 2), rule.init_state(1, 2)
    for _ in range(2):
        weight_UD, state = rule.update(weight_UD, state, torch.tensor([[3.0, -1.0]]), torch.tensor(0.1))
    torch.testing.assert_close(state["sum"], torch.tensor([1.0 + 5.0 + 5.0]))
    rate = 0.1 / (6**0.5 + 0.5) + 0.1 / (11**0.5 + 0.5)
    torch.testing.assert_close(weight_UD, torch.tensor([[-3 * rate, rate]]))


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_impossible_numbers_are_refused(bad: float) -> None:
    for config in (sgd.Config, rowwise_adagrad.Config):
        with pytest.raises(UserError, match="lr: .* is out of range"):
            config(lr=bad)
    with pytest.raises(UserError, match="eps: .* is out of range"):
        rowwise_adagrad.Config(eps=bad)
    with pytest.raises(UserError, match="initial: .* is out of range"):
        rowwise_adagrad.Config(initial=bad)

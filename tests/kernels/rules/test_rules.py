from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.kernels import Impl, embedding_bag, missing
from sparrow.kernels.embedding_bag import Tables
from sparrow.kernels.rules import (
    Regularization,
    RowRule,
    adagrad,
    adam,
    init_state,
    rowwise_adagrad,
    sgd,
)
from sparrow.kernels.rules._regularized import regularized_update

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS = ["reference", pytest.param("cpp", marks=built)]
# the family: a file each, found in the folder
FAMILY = Family("sparrow.kernels.rules")
MEMBERS: dict[str, Callable[..., RowRule]] = {name: FAMILY.config(name) for name in FAMILY.names()}
EXTRAS = {
    "plain": {},
    "l2": {"weight_decay": 0.3},
    "decoupled": {"weight_decay": 0.3, "decay": "decoupled"},
    "clip_norm": {"clip_norm": 1.0},
    "max_norm": {"max_norm": 1.5},
}
# what a rule must refuse, by the number's name
IMPOSSIBLE = {
    "lr": [-0.1, float("nan"), float("inf")],
    "eps": [0.0, -1e-8, float("nan")],
    "beta1": [1.0, -0.1, float("nan")],
    "beta2": [1.0, -0.1, float("nan")],
    "initial": [-0.1, float("nan"), float("inf")],
}


def run(tables: Tables, impl: Impl, grads: list[Tensor], lr: float) -> Tensor:
    """The weights after an update of all rows with each of the gradients."""
    for grad_RD in grads:
        rows_R = torch.arange(len(grad_RD))
        embedding_bag.update_rows(tables, [(rows_R, grad_RD)], torch.tensor([lr]), impl=impl)
    return tables[0].levels[0].payload["weight"]


def random_state(rule: RowRule, rows: int, dim: int) -> dict[str, Tensor]:
    """The state after an update that not all rows had."""
    state = init_state(rule, rows, dim)
    half = {name: tensor[::2] for name, tensor in state.items()}
    _, half = rule.update(
        torch.zeros(len(range(0, rows, 2)), dim), half, torch.ones(1, dim), torch.tensor(0.1)
    )
    for name in state:
        state[name][::2] = half[name]
    return state


# -- the family ------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_is_pure_and_works_row_by_row(name: str, extra: str) -> None:
    rule = MEMBERS[name](regularization=Regularization(**EXTRAS[extra]))
    weight_UD, grad_UD, lr, state = (
        torch.randn(5, 3),
        torch.randn(5, 3),
        torch.tensor(0.2),
        random_state(rule, 5, 3),
    )
    before = [t.clone() for t in (weight_UD, grad_UD, lr, *state.values())]
    all_weight_UD, all_state = regularized_update(rule, weight_UD, state, grad_UD, lr)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (weight_UD, grad_UD, lr, *state.values()), strict=True)
    )
    assert all_state.keys() == state.keys()
    row = slice(2, 3)
    own = {k: v[row] for k, v in state.items()}
    one_weight_UD, one_state = regularized_update(rule, weight_UD[row], own, grad_UD[row], lr)
    torch.testing.assert_close(one_weight_UD, all_weight_UD[row])
    torch.testing.assert_close(one_state, {k: v[row] for k, v in all_state.items()})


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_states_its_interface(name: str) -> None:
    rule = MEMBERS[name]()
    assert rule.lr > 0
    assert rule.regularization == Regularization()
    for tensor in init_state(rule, 4, 3).values():
        assert tensor.dtype == torch.float32
        assert tensor.shape in ((4,), (4, 3))
    _, numbers = rule.cpp()
    assert numbers.keys() <= {"eps", "beta1", "beta2"}
    assert all(value == getattr(rule, key) for key, value in numbers.items())


@built
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", MEMBERS)
def test_cpp_runs_a_member_as_the_reference_does_or_says_that_it_cannot(
    name: str, extra: str
) -> None:
    rule = MEMBERS[name](regularization=Regularization(**EXTRAS[extra]))
    weight_RD, grads = torch.randn(6, 5), [torch.randn(6, 5) for _ in range(3)]
    expected_RD = run(embedding_bag.tables_of(weight_RD.clone(), rule), "reference", grads, 0.1)
    try:
        found_RD = run(embedding_bag.tables_of(weight_RD.clone(), rule), "cpp", grads, 0.1)
    except ValueError as error:
        if "has no C++ row function; use impl='reference'" not in str(error):
            raise
        pytest.skip(str(error))
    torch.testing.assert_close(found_RD, expected_RD, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", MEMBERS)
def test_impossible_numbers_are_refused(name: str) -> None:
    config: Any = MEMBERS[name]
    for field in dataclasses.fields(config):
        if field.name != "regularization":
            for bad in IMPOSSIBLE[field.name]:
                with pytest.raises(UserError, match=f"{field.name}: .* is out of range"):
                    config(**{field.name: bad})


@pytest.mark.parametrize("name", ["weight_decay", "clip_norm", "max_norm"])
@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_impossible_regularization_is_refused(name: str, bad: float) -> None:
    with pytest.raises(UserError, match=f"{name}: .* is out of range"):
        Regularization(**{name: bad})


# -- against torch.optim, where every batch uses every row -----------------------------------------

SAME: dict[str, tuple[RowRule, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "SGD": (sgd.Config(), lambda w: torch.optim.SGD(w, lr=0.1)),
    "SGD, l2": (
        sgd.Config(regularization=Regularization(weight_decay=0.2)),
        lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.2),
    ),
    "Adagrad": (
        adagrad.Config(eps=1e-3, initial=0.5),
        lambda w: torch.optim.Adagrad(w, lr=0.1, eps=1e-3, initial_accumulator_value=0.5),
    ),
    "Adagrad, l2": (
        adagrad.Config(regularization=Regularization(weight_decay=0.2)),
        lambda w: torch.optim.Adagrad(w, lr=0.1, eps=1e-8, weight_decay=0.2),
    ),
    "Adam": (
        adam.Config(beta1=0.8, beta2=0.95, eps=1e-3),
        lambda w: torch.optim.Adam(w, lr=0.1, betas=(0.8, 0.95), eps=1e-3),
    ),
    "Adam, l2": (
        adam.Config(regularization=Regularization(weight_decay=0.2)),
        lambda w: torch.optim.Adam(w, lr=0.1, weight_decay=0.2),
    ),
    "AdamW": (
        adam.Config(regularization=Regularization(weight_decay=0.2, decay="decoupled")),
        lambda w: torch.optim.AdamW(w, lr=0.1, weight_decay=0.2),
    ),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", SAME)
def test_is_torchs_optimizer(name: str, impl: Impl) -> None:
    rule, make = SAME[name]
    start_RD, grads = torch.randn(7, 5), [torch.randn(7, 5) for _ in range(6)]
    expected_RD = start_RD.clone().requires_grad_()
    optimizer = make([expected_RD])
    for grad_RD in grads:
        expected_RD.grad = grad_RD.clone()
        optimizer.step()
    found_RD = run(embedding_bag.tables_of(start_RD.clone(), rule), impl, grads, 0.1)
    torch.testing.assert_close(found_RD, expected_RD.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_adam_counts_the_updates_of_each_row(impl: Impl) -> None:
    start_RD, grads = torch.randn(2, 3), [torch.randn(2, 3) for _ in range(5)]
    expected_RD = start_RD[:1].clone().requires_grad_()
    optimizer = torch.optim.Adam([expected_RD], lr=0.1)
    tables = embedding_bag.tables_of(start_RD.clone(), adam.Config())
    for step, grad_RD in enumerate(grads, 1):
        rows_U = torch.tensor([0, 1] if step in (1, 5) else [1])
        embedding_bag.update_rows(
            tables, [(rows_U, grad_RD[rows_U])], torch.tensor([0.1]), impl=impl
        )
        if step in (1, 5):
            expected_RD.grad = grad_RD[:1].clone()
            optimizer.step()
    level = tables[0].levels[0]
    torch.testing.assert_close(level.payload["weight"][:1], expected_RD.detach())
    assert level.state["updates"].tolist() == [2, 5]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", MEMBERS)
def test_a_gradient_without_a_finite_square_does_not_end_a_rows_learning(
    name: str, extra: str, impl: Impl
) -> None:
    """It is left out of its own row, state and all, and the next one counts as ever; other rows
    step as usual.
    """
    rule = MEMBERS[name](regularization=Regularization(**EXTRAS[extra]))
    start_RD, first_RD, sound_RD, second_RD = (torch.randn(5, 3) for _ in range(4))
    bad_RD = sound_RD.clone()
    for row, value in enumerate((2e19, -1e20, float("inf"), float("nan"))):
        bad_RD[row, 1] = value

    def after(grads: list[Tensor], impl: Impl) -> dict[str, Tensor]:
        tables = embedding_bag.tables_of(start_RD.clone(), rule)
        weight_RD = run(tables, impl, grads, 0.1)
        assert tables[0].levels[0].touched_R.all()
        return {"weight": weight_RD, **tables[0].levels[0].state}

    found = after([first_RD, bad_RD, second_RD], impl)
    without, usual = (
        after([first_RD, second_RD], impl),
        after([first_RD, sound_RD, second_RD], impl),
    )
    for field, value in found.items():
        assert torch.equal(value[:4], without[field][:4]), field
        assert torch.equal(value[4], usual[field][4]) and not torch.equal(
            value[4], without[field][4]
        ), field
    torch.testing.assert_close(
        found, after([first_RD, bad_RD, second_RD], "reference"), rtol=2e-5, atol=1e-6
    )


# -- by hand ---------------------------------------------------------------------------------------


def test_rowwise_adagrad_adds_up_mean_squares() -> None:
    rule = rowwise_adagrad.Config(lr=0.1, eps=0.5, initial=1.0)
    weight_UD, state = torch.zeros(1, 2), init_state(rule, 1, 2)
    for _ in range(2):
        weight_UD, state = rule.update(
            weight_UD, state, torch.tensor([[3.0, -1.0]]), torch.tensor(0.1)
        )
    torch.testing.assert_close(state["sum"], torch.tensor([1.0 + 5.0 + 5.0]))
    rate = 0.1 / (6**0.5 + 0.5) + 0.1 / (11**0.5 + 0.5)
    torch.testing.assert_close(weight_UD, torch.tensor([[-3 * rate, rate]]))


@pytest.mark.parametrize("impl", IMPLS)
def test_rowwise_adam_has_one_second_moment(impl: Impl) -> None:
    rule = MEMBERS["rowwise_adam"](beta1=0.5, beta2=0.5, eps=1.0)
    tables = embedding_bag.tables_of(torch.zeros(1, 2), rule)
    weight_RD = run(tables, impl, [torch.tensor([[4.0, -2.0]])], 0.1)
    # moments (2, -1) and 5, over the bias 0.5 of each: (4, -2) and 10
    torch.testing.assert_close(weight_RD, torch.tensor([[-0.4, 0.2]]) / (10**0.5 + 1))
    torch.testing.assert_close(tables[0].levels[0].state["second"], torch.tensor([5.0]))


@pytest.mark.parametrize("impl", IMPLS)
def test_clip_norm_shortens_long_gradients_only(impl: Impl) -> None:
    rule = sgd.Config(regularization=Regularization(clip_norm=5.0))
    grad_RD = torch.tensor([[6.0, 8.0], [3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    weight_RD = run(embedding_bag.tables_of(torch.zeros(4, 2), rule), impl, [grad_RD], 1.0)
    torch.testing.assert_close(
        weight_RD, -torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_max_norm_shortens_long_rows_only(impl: Impl) -> None:
    rule = sgd.Config(regularization=Regularization(max_norm=5.0))
    weight_RD = torch.tensor([[6.0, 8.0], [3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found_RD = run(embedding_bag.tables_of(weight_RD.clone(), rule), impl, [torch.zeros(4, 2)], 1.0)
    torch.testing.assert_close(
        found_RD, torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_the_order_is_clip_decay_rule_limit(impl: Impl) -> None:
    grad_RD, start_RD = torch.tensor([[6.0, 8.0]]), torch.tensor([[10.0, 0.0]])
    l2 = Regularization(weight_decay=0.1, clip_norm=5.0, max_norm=5.0)
    found_RD = run(
        embedding_bag.tables_of(start_RD.clone(), sgd.Config(regularization=l2)),
        impl,
        [grad_RD],
        1.0,
    )
    # gradient (3, 4) + (1, 0), weights (6, -4), which are too long
    torch.testing.assert_close(found_RD, torch.tensor([[6.0, -4.0]]) * 5 / 52**0.5)
    decoupled = dataclasses.replace(l2, decay="decoupled", max_norm=0.0)
    rule = sgd.Config(regularization=decoupled)
    found_RD = run(embedding_bag.tables_of(start_RD.clone(), rule), impl, [grad_RD], 1.0)
    torch.testing.assert_close(found_RD, torch.tensor([[9.0 - 3.0, -4.0]]))

"""One matrix for the family: a new loss adds a row to LOSSES."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.core.config import Family
from sparrow.losses import LossConfig, bce, listwise, loss_and_probabilities, pairwise

Row = tuple[Tensor, float, float]  # a logit, its label and weight


def pairs(rows: list[Row]) -> Tensor | float:
    """RankNet's loss of a group, pair by pair."""
    found = [
        (-(one - zero).sigmoid().log(), v * w)
        for one, y, v in rows
        for zero, z, w in rows
        if y and not z
    ]
    return (
        sum(loss * weight for loss, weight in found) / sum(weight for _, weight in found)
        if found
        else 0.0
    )


def lists(rows: list[Row]) -> Tensor | float:
    """ListNet's loss of a group."""
    whole: Any = sum(w * s.exp() for s, _, w in rows)
    clicks = [(-(s.exp() / whole).log(), w) for s, y, w in rows if y]
    return (
        sum(loss * weight for loss, weight in clicks) / sum(weight for _, weight in clicks)
        if clicks
        else 0.0
    )


def naive(config: Any, logits_BTK: Tensor, batch: Batch, weights: dict[str, float]) -> Tensor:
    """Any of the losses, number by number, in float64."""
    of_group = {"pairwise": pairs, "listwise": lists}.get(Family("sparrow.losses").name_of(config))
    count, tasks, members = logits_BTK.shape
    weights_B = [1.0] * count if batch.weights_B is None else batch.weights_B.tolist()
    total = logits_BTK.double().sum() * 0
    for t, k in itertools.product(range(tasks), range(members)):
        rows = [
            (logits_BTK[b, t, k].double(), float(batch.labels_BT[b, t]), weights_B[b])
            for b in range(count)
        ]
        known = [b for b in range(count) if not math.isnan(rows[b][1]) and rows[b][2]]
        factor = weights.get("ab"[t], 1.0)
        for b in known:
            s, y, w = rows[b]
            total = (
                total + getattr(config, "bce", 1.0) * factor * w * -(s if y else -s).sigmoid().log()
            )
        groups = {} if of_group is None else {int(g): [] for g in batch.session_B}
        for b in known if groups else []:
            groups[int(batch.session_B[b])].append(rows[b])
        for group in groups.values():
            total = total + factor * sum(w for _, _, w in group) * of_group(group)
    return total / (sum(weights_B) * tasks * members)


LOSSES: list[Callable[..., LossConfig]] = [bce.Config, pairwise.Config, listwise.Config]
named = Family("sparrow.losses").name_of


def batch(
    size: int = 40, tasks: int = 2, seed: int = 0, *, weighted: bool = True, missing: float = 0.3
) -> Batch:
    """Rows of ten groups, in no order, one of them without any click."""
    random = torch.Generator().manual_seed(seed)
    groups_B = torch.randint(0, 10, (size,), generator=random)
    labels_BT = (torch.rand(size, tasks, generator=random) < 0.4).float() * (groups_B != 3)[:, None]
    labels_BT[torch.rand(size, tasks, generator=random) < missing] = torch.nan
    weights_B = torch.randint(0, 4, (size,), generator=random) / 2  # some are 0
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        dense_BC=torch.zeros(size, 0),
        ids=KeyedJagged(keys=(), values_N=none, lengths=none),
        labels_BT=labels_BT,
        weights_B=weights_B if weighted else None,
        session_B=groups_B * 1_000_003 - 4_000_000,
    )


def logits(of: Batch, members: int = 1, seed: int = 1) -> Tensor:
    found = torch.randn(*of.labels_BT.shape, members, generator=torch.Generator().manual_seed(seed))
    return (found if members > 1 else found[:, :, 0]).requires_grad_()


def test_every_loss_has_a_row() -> None:
    assert {named(make()) for make in LOSSES} == set(Family("sparrow.losses").names())


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [{}, {"weights": {"b": 2.5}}, {"weights": {"a": 0.0}}, {"bce": 0.0}, {"bce": 0.3, "weights": {"a": 2.0}}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("make", LOSSES, ids=lambda make: named(make()))
def test_values_and_gradients_are_those_of_the_definition(
    make: Callable[..., LossConfig], settings: dict[str, Any], members: int
) -> None:
    if make is bce.Config and "bce" in settings:
        pytest.skip("it has no such setting")
    config = make(**settings)
    for weighted, tasks, missing in itertools.product((True, False), (1, 2), (0.0, 0.3)):
        if tasks == 1 and (missing or "b" in settings.get("weights", {})):
            continue
        given = batch(tasks=tasks, weighted=weighted, missing=missing)
        s = logits(given, members)
        found = config.build("ab"[:tasks])(s, given)
        want = naive(
            config, s if members > 1 else s[:, :, None], given, settings.get("weights", {})
        )
        assert found.item() == pytest.approx(want.item(), rel=1e-5)
        one, other = (torch.autograd.grad(loss, s)[0] for loss in (found, want))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
        assert bool(one[given.labels_BT.isnan()].eq(0).all())


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: named(make()))
def test_losses_of_parts_that_hold_whole_groups_add_up(make: Callable[..., LossConfig]) -> None:
    """As ranks and accumulated batches add them: by the sum of the weights."""
    whole = batch(60)
    s, loss = logits(whole).detach(), make(weights={"b": 2.0}).build("ab")
    parts = [(whole.session_B % 3 == part).nonzero()[:, 0] for part in range(3)]
    summed = 0.0
    for at_B in parts:
        part = replace(
            batch(len(at_B)), labels_BT=whole.labels_BT[at_B], weights_B=whole.weights_B[at_B],
            session_B=whole.session_B[at_B],
        )  # fmt: skip
        summed += float(loss(s[at_B], part)) * part.mass / whole.mass
    assert summed == pytest.approx(float(loss(s, whole)), rel=1e-6)


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: named(make()))
def test_a_row_of_weight_2_is_two_rows(make: Callable[..., LossConfig]) -> None:
    once = batch(30, weighted=False)
    once = replace(once, weights_B=1.0 + (torch.arange(30) % 3 == 0))
    twice_B = torch.cat([torch.arange(30), (once.weights_B == 2).nonzero()[:, 0]])
    twice = replace(
        batch(len(twice_B), weighted=False),
        labels_BT=once.labels_BT[twice_B],
        session_B=once.session_B[twice_B],
    )
    s, loss = logits(once).detach(), make().build("ab")
    assert float(loss(s[twice_B], twice)) == pytest.approx(float(loss(s, once)), rel=1e-6)


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: named(make()))
def test_a_row_of_n_showings_is_n_rows(make: Callable[..., LossConfig]) -> None:
    """A label of clicks / n with the weight n, or any weight times n: loss, and gradient of a row's
    logit.
    """
    drawn = torch.Generator().manual_seed(3)
    shown_B = torch.randint(1, 6, (30,), generator=drawn)
    clicks_B = (torch.rand(30, generator=drawn) * (shown_B + 1)).long()
    weights_B = torch.rand(30, generator=drawn) + 0.5
    of_showing_E = torch.arange(30).repeat_interleave(shown_B)
    nth_E = torch.arange(len(of_showing_E)) - (shown_B.cumsum(0) - shown_B)[of_showing_E]
    rows, showings = batch(30, 1, weighted=False), batch(len(of_showing_E), 1, weighted=False)
    rows = replace(rows, labels_BT=(clicks_B / shown_B)[:, None], weights_B=weights_B * shown_B)
    showings = replace(
        showings,
        labels_BT=(nth_E < clicks_B[of_showing_E]).float()[:, None],
        weights_B=weights_B[of_showing_E],
        session_B=rows.session_B[of_showing_E],
    )
    assert bool(((rows.labels_BT > 0) & (rows.labels_BT < 1)).any())
    of_rows, of_showings, loss = (
        (s := logits(rows)),
        s.detach().clone().requires_grad_(),
        make().build("a"),
    )
    together, apart = loss(of_rows, rows), loss(of_showings[of_showing_E], showings)
    together.backward()
    apart.backward()
    assert together.item() == pytest.approx(apart.item(), rel=1e-6)
    torch.testing.assert_close(of_rows.grad, of_showings.grad, rtol=1e-4, atol=1e-7)
    assert bool(of_rows.grad.any())


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: named(make()))
def test_logits_far_apart_make_no_infinity(make: Callable[..., LossConfig]) -> None:
    given = batch()
    s = (logits(given).detach() * 1e4).requires_grad_()
    loss = make().build("ab")(s, given)
    loss.backward()
    assert bool(loss.isfinite()) and bool(s.grad.isfinite().all())


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: named(make()))
@pytest.mark.parametrize("case", ["no rows", "no clicks", "no labels", "no weights"])
def test_where_there_is_nothing_to_learn_the_loss_has_a_graph(
    case: str, make: Callable[..., LossConfig]
) -> None:
    given = batch(0 if case == "no rows" else 8)
    labels = {"no clicks": torch.zeros(8, 2), "no labels": torch.full((8, 2), torch.nan)}
    given = replace(given, labels_BT=labels.get(case, given.labels_BT))
    if case == "no weights":
        given = replace(given, weights_B=torch.zeros(8))
    s = logits(given)
    loss, p_BT = loss_and_probabilities(
        s, given, make(**({} if make is bce.Config else {"bce": 0.0})).build("ab")
    )
    loss.backward()
    assert s.grad.shape == s.shape and p_BT.shape == s.shape
    if make is not bce.Config or case != "no clicks":
        assert loss.item() == 0 and not bool(s.grad.any())


def test_a_missing_label_of_a_log_with_one_is_not_passed_over() -> None:
    given = batch(tasks=1)
    assert math.isnan(bce.Config().build("a")(logits(given), given).item())


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: named(make()))
def test_what_cannot_be_is_refused(make: Callable[..., LossConfig]) -> None:
    with pytest.raises(
        UserError, match=r"loss\.weights\.clik: no label of the log; did you mean 'click'\?"
    ):
        make(weights={"clik": 2.0}).build(["click"])
    with pytest.raises(UserError, match=r"weights\.a: -1.0 is out of range"):
        make(weights={"a": -1.0})
    if make().compares:
        with pytest.raises(
            UserError, match=r"no groups to compare rows in; give a column kind = 'group'"
        ):
            make().build("ab")(logits(batch()), replace(batch(), session_B=None))
        with pytest.raises(UserError, match=r"bce: nan is out of range"):
            make(bce=math.nan)


def test_more_pairs_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "_MOST", 3)
    with pytest.raises(
        UserError, match=r"pairs of a click and a non-click of a group; lower data\.batch_size"
    ):
        pairwise.Config().build("ab")(logits(batch()), batch())

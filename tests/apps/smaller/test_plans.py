"""The plans that are worth a training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sparrow.apps.smaller.alternatives import Alternative, Bytes
from sparrow.apps.smaller.plans import Option, add_guesses, choose_plan, rivals, smallest
from sparrow.core import UserError
from sparrow.embeddings import Numbering, TableChoices


def option(
    table: str,
    size: int,
    kind: str = "",
    damage: float = 0.0,
    how: Any = "rebuilt",
    number: int = 0,
) -> Option:
    """A choice of so many bytes. kind: of its addressing, "format", or "" for the table as it
    is.
    """
    change: dict[str, Any] = {"addressing": {"name": kind, "rows": number}} if kind else {}
    change = {"format": {"name": f"of {size}"}} if kind == "format" else change
    spec = TableChoices().spec(table, 4, Numbering(40))
    bytes_ = Bytes(weights=size, state=0, map=0, combine=0, combine_state=0, disk=0)
    return Option(
        alternative=Alternative(
            change=change, spec=spec, bytes=bytes_, how=how if kind else "kept"
        ),
        damage=damage,
    )


def table(name: str, size: int) -> list[Option]:
    """A table as it is, in another format, and with fewer rows of two kinds: by rebuilt rows "cut"
    harms least.
    """
    parts = ((2, 0.001), (4, 0.002), (16, 0.004))
    cut = [option(name, size // part, "cut", damage, number=part) for part, damage in parts]
    hashed = [
        option(name, size // part, "hashed", 10 * damage, number=part) for part, damage in parts
    ]
    return [option(name, size), option(name, size * 2 // 5, "format", 0.0001), *cut, *hashed]


OPTIONS = [table("a", 8000), table("b", 4000), table("c", 100)]


def kinds(plan: Any) -> list[str]:
    """What each table becomes."""
    changed = (one.alternative for one in plan.options)
    return [one.kind if one.change else "" for one in changed]


def test_rivals_are_of_different_kinds_and_keep_to_the_budget() -> None:
    for budget in (1000, 1600, 3000, 5000, 9000):
        plans = rivals(OPTIONS, budget, "serve", 100)
        assert max(plan.bytes for plan in plans) <= budget
        assert all(a.options != b.options for a, b in itertools.combinations(plans, 2))
        assert plans[0] == choose_plan(OPTIONS, budget, "serve")  # what rebuilt rows would choose
        small = (
            choose_plan(OPTIONS, budget // 4, "serve")
            if budget >= 4 * smallest(OPTIONS, "serve")
            else None
        )
        for plan in plans[1:]:
            if plan.kind == "mixed":
                assert plan == small
                continue
            assert set(kinds(plan)[:2]) == {plan.kind}  # the two large tables
            assert set(kinds(plan)[2:]) <= {plan.kind, "format", ""}
        assert "hashed" in {plan.kind for plan in plans}  # which rebuilt rows would never choose


def test_a_plan_of_each_kind_is_the_best_by_rebuilt_rows() -> None:
    """Against all plans of the kind."""
    of_hashed = [
        [one for one in row if one.alternative.kind == "hashed" and one.alternative.change]
        for row in OPTIONS
    ]
    small = [*of_hashed[2], *OPTIONS[2][:2]]
    fit = (
        (sum(one.cost for one in chosen), chosen)
        for chosen in itertools.product(of_hashed[0], of_hashed[1], small)
        if sum(one.alternative.bytes.to("serve") for one in chosen) <= 3000
    )
    least = min(fit, key=lambda pair: pair[0])[0]
    plan = next(plan for plan in rivals(OPTIONS, 3000, "serve", 100) if plan.kind == "hashed")
    assert sum(one.cost for one in plan.options) == pytest.approx(least)


def test_fewer_bytes_than_the_budget_are_tried_too() -> None:
    plans = rivals(OPTIONS, 6000, "serve", 100)
    assert [plan.kind for plan in plans if plan.bytes <= 1500] == ["mixed", "hashed"]
    assert rivals(OPTIONS, 6000, "serve", 2) == plans[:2]


def test_one_plan_where_no_kind_alone_fits() -> None:
    options = [
        [option("a", 100), option("a", 10, "cut", 0.1)],
        [option("b", 100), option("b", 10, "path", 0.1, "trained")],
    ]
    assert smallest(options, "serve") == 20
    (plan,) = rivals(options, 20, "serve", 5)
    assert kinds(plan) == ["cut", "path"]
    with pytest.raises(UserError, match="less than the 20 of the smallest plan"):
        rivals(options, 19, "serve", 5)


def test_what_rows_cannot_tell_counts_as_the_best_that_is_no_larger() -> None:
    row = [
        *table("a", 8000),
        *(option("a", size, "path", how="trained", number=size) for size in (4000, 900, 100)),
    ]
    measured = {"a": [one for one in row if one.alternative.how != "trained"]}
    (options,) = add_guesses(measured, [[one.alternative for one in row]], "serve")
    assert options[: len(measured["a"])] == measured["a"]
    assert [one.damage for one in options[len(measured["a"]) :]] == [0.0001, 0.004, 0.04]

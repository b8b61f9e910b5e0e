"""The search for formats, on scores that are made: what harms, and how much, is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparrow.analysis.bits.search import Choice, Part, Rise, fallbacks, rises, search
from sparrow.analysis.judge import Judge
from sparrow.core import Batch, KeyedJagged

ROWS = 4000
STEPS = {"int4": 1.0, "int8": 0.1}


def judge(rows: int = ROWS, signal: float = 1.5, repeated: int = 1) -> Judge:
    """Rows with a number that tells of the label; with a signal of 0 it tells nothing."""
    generator = torch.Generator().manual_seed(3)
    x_B1 = torch.randn(rows, 1, generator=generator)
    labels_B1 = torch.rand(rows, 1, generator=generator) < torch.sigmoid(signal * x_B1)
    ids = KeyedJagged(keys=(), values_N=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64))
    batch = Batch(dense_BC=x_B1.repeat(repeated, 1), ids=ids, labels_BT=labels_B1.float().repeat(repeated, 1))
    return Judge(batch, Path("log"))


def scoring(harm: dict[str, float], signal: float = 1.5) -> Callable[[Choice], Callable[[Batch], Tensor]]:
    """Scores whose log-odds are wrong by each part's harm, times that of its format, in a direction of its own."""

    def of(choice: Choice) -> Callable[[Batch], Tensor]:
        def score(batch: Batch) -> Tensor:
            x_B1, wrong_B1 = batch.dense_BC, torch.zeros_like(batch.dense_BC)
            for part, step in choice.items():
                wave = torch.sin(7.0 * x_B1 * (1 + len(part.name)) + ord(part.name[0]))
                wrong_B1 = wrong_B1 + harm[part.name] * STEPS.get(step, 0.0) * wave
            return torch.sigmoid(signal * x_B1 + wrong_B1)

        return score

    return of


def part(name: str, *steps: str) -> Part:
    return Part(kind="table", name=name, steps=(*(steps or STEPS), "fp32"))


def quiet(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def test_the_most_harmful_part_gives_way_first() -> None:
    a, b = part("a"), part("b")
    damage = {a: {"int4": 5.0, "int8": 2.0}, b: {"int4": 3.0, "int8": 1.0}}
    order = fallbacks([a, b], damage)
    assert order == [
        {a: "int4", b: "int4"},
        {a: "int8", b: "int4"},  # 5 is the most
        {a: "int8", b: "int8"},  # then 3
        {b: "int8"},  # then 2
        {},
    ]


def test_what_harms_falls_back_and_what_does_not_stays() -> None:
    parts = [part(name) for name in "abcd"]
    found = search(parts, scoring({"a": 0.0, "b": 1.0, "c": 0.01, "d": 0.0}), judge(), 1e-3, quiet)
    assert found.best.rise.upper <= 1e-3
    chosen = {one.name: step for one, step in found.best.choice.items()}
    assert chosen["a"] == chosen["d"] == "int4"
    assert chosen.get("b") != "int4"
    harm = {one.name: of["int4"].value for one, of in found.alone.items()}
    assert harm["b"] > 0.01 > harm["c"] > harm["a"] == harm["d"] == 0.0


def test_the_best_is_the_narrowest_that_keeps_to_the_budget() -> None:
    """As a search of every place of the order would find it."""
    parts, rows = [part(name) for name in "abcdef"], judge()
    scores = scoring({"a": 1.0, "b": 0.5, "c": 0.3, "d": 0.1, "e": 0.05, "f": 0.02})
    before = rows.ne_of(scores({}))
    for budget in (3e-2, 1e-2, 1e-3, 1e-4):
        found = search(parts, scores, rows, budget, quiet)
        order = fallbacks(
            parts, {one: {step: rise.value for step, rise in of.items()} for one, of in found.alone.items()}
        )
        fits = [rises(before, rows.ne_of(scores(c))).upper <= budget for c in order]
        assert found.best.choice == order[fits.index(True)], budget
        assert [one.choice for one in found.tried] == order[: len(found.tried)]


@pytest.mark.parametrize(("budget", "steps"), [(float("inf"), {"int4"}), (0.0, set())])
def test_ends_of_the_budget(budget: float, steps: set[str]) -> None:
    """Without a bound all have the narrowest formats, and with none to spend the model stays as it is."""
    found = search([part("a"), part("b")], scoring({"a": 1.0, "b": 1.0}), judge(), budget, quiet)
    assert set(found.best.choice.values()) == steps
    assert found.best.rise.upper == 0.0 or steps


def test_without_a_signal_nothing_harms() -> None:
    """A model that scores all rows alike has no damage to find, and no part is blamed."""
    found = search(
        [part("a")], lambda choice: lambda batch: torch.full_like(batch.dense_BC, 0.5), judge(signal=0.0), 1e-4, quiet
    )
    assert found.best.choice == {part("a"): "int4"}
    assert found.best.rise.value == found.best.rise.error == 0.0


def test_a_model_without_such_parts_stays_as_it_is() -> None:
    found = search([], scoring({}), judge(), 1e-4, quiet)
    assert [one.choice for one in found.tried] == [{}]


def test_so_many_rows_would_show_it() -> None:
    """The number that is told: rows repeated as often have an interval that ends within the budget, but not by much."""
    a = part("a")
    scores = scoring({"a": 0.12})
    found = search([a], scores, judge(500), 1e-9, quiet)
    rise = found.alone[a]["int4"]
    budget = rise.value + rise.error  # the value is within it, the interval is not
    wanted = rise.units_for(budget)
    assert wanted is not None
    assert rise.upper > budget
    for times, keeps in ((wanted / 500 * 1.3, True), (wanted / 500 * 0.6, False)):
        rows = judge(500, repeated=max(round(times), 1))
        before, after = rows.ne_of(scores({})), rows.ne_of(scores({a: "int4"}))
        assert (rises(before, after).upper <= budget) is keeps
    assert Rise(value=1.0, error=0.1, units=100).units_for(0.5) is None


def test_the_label_that_suffers_most_counts() -> None:
    rows = judge()
    of = rows.ne_of(lambda batch: torch.sigmoid(1.5 * batch.dense_BC))
    worse = rows.ne_of(lambda batch: torch.sigmoid(1.5 * batch.dense_BC + 1.0))
    assert rises([*of, *of], [*of, *worse]).value == rises(of, worse).value > 0

"""The search for formats, on scores that are made: what harms, and how much, is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparrow.analysis.judge import Judge
from sparrow.apps.fewer.parts import Choice, Part, Rise, rises
from sparrow.apps.fewer.search import SearchResult, fallbacks
from sparrow.apps.fewer.search import search as search_by
from sparrow.core import Batch, KeyedJagged
from sparrow.metrics.intervals import Estimate

ROWS = 4000
STEPS = {"int4": 1.0, "int8": 0.1}


def judge(rows: int = ROWS, signal: float = 1.5, repeated: int = 1) -> Judge:
    """Rows with a number that tells of the label; with a signal of 0 it tells nothing."""
    generator = torch.Generator().manual_seed(3)
    x_B1 = torch.randn(rows, 1, generator=generator)
    labels_B1 = torch.rand(rows, 1, generator=generator) < torch.sigmoid(signal * x_B1)
    ids = KeyedJagged(
        keys=(),
        values_N=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(0, dtype=torch.int64),
    )
    batch = Batch(
        dense_BC=x_B1.repeat(repeated, 1), ids=ids, labels_BT=labels_B1.float().repeat(repeated, 1)
    )
    return Judge(batch, Path("log"))


def scoring(
    harm: dict[str, float], signal: float = 1.5
) -> Callable[[Choice], Callable[[Batch], Tensor]]:
    """Scores whose log-odds are wrong by each part's harm, times that of its format, in a direction
    of its own.
    """

    def of(choice: Choice) -> Callable[[Batch], Tensor]:
        def score(batch: Batch) -> Tensor:
            x_B1, wrong_B1 = batch.dense_BC, torch.zeros_like(batch.dense_BC)
            for part, step in choice.items():
                wave = torch.sin(7.0 * x_B1 * (1 + len(part.name)) + ord(part.name[0]))
                wrong_B1 = wrong_B1 + harm[part.name] * STEPS.get(step, 0.0) * wave
            return torch.sigmoid(signal * x_B1 + wrong_B1)

        return score

    return of


def search(
    parts: list[Part],
    scores: Callable[[Choice], Callable[[Batch], Tensor]],
    rows: Judge,
    budget: float,
    progress,
) -> SearchResult:
    """A search by some rows, which check it too."""
    return search_by(
        parts, lambda judge, choice: judge.ne_of(scores(choice)), (rows, rows), budget, progress
    )


def part(name: str, *steps: str) -> Part:
    return Part(kind="table", name=name, steps=(*(steps or STEPS), "fp32"))


def quiet(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def test_the_most_harmful_part_gives_way_first() -> None:
    a, b = part("a"), part("b")
    harm = {a: {"int4": 5.0, "int8": 2.0}, b: {"int4": 3.0, "int8": 1.0}}
    alone = {
        one: {step: Rise(value=x, error=0.0, units=9) for step, x in of.items()}
        for one, of in harm.items()
    }
    order = fallbacks([a, b], alone)
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
        order = fallbacks(parts, found.alone)
        fits = [rises(before, rows.ne_of(scores(c))).upper <= budget for c in order]
        first = fits.index(True)
        assert [one.choice for one in found.tried[: first + 1]] == order[: first + 1]
        best = found.best.choice
        assert found.best.rise.upper <= budget
        # no part may have fewer bits, and none has more than when it first kept to the budget
        for one in parts:
            at = one.steps.index(best.get(one, "fp32"))
            assert at <= one.steps.index(order[first].get(one, "fp32"))
            for step in one.steps[:at]:
                assert rises(before, rows.ne_of(scores({**best, one: step}))).upper > budget, (
                    budget,
                    one,
                    step,
                )


def test_what_few_bits_improve_by_luck_goes_before_what_does_no_harm() -> None:
    """One part improves NE of these rows, and nobody knows whether of others. All cannot keep to
    the budget.
    """
    parts = [part(name, "int4") for name in "ab"]
    lucky, harmless = parts
    rows, random = judge(400), torch.Generator().manual_seed(2)
    luck_B1 = torch.randn(400, 1, generator=random)
    labels_B1 = rows.batch.labels_BT

    def scores(choice: Choice) -> Callable[[Batch], Tensor]:
        wrong_B1 = torch.zeros(400, 1)
        if lucky in choice:
            wrong_B1 = wrong_B1 + 0.3 * (luck_B1 + 0.04 * (2 * labels_B1 - 1))
        if harmless in choice:
            wrong_B1 = wrong_B1 + 1e-3 * torch.sin(50 * rows.batch.dense_BC)
        return lambda batch: torch.sigmoid(1.5 * batch.dense_BC + wrong_B1)

    found = search(parts, scores, rows, 1e-3, quiet)
    luck, harm = (found.alone[one]["int4"] for one in parts)
    assert luck.value < harm.value < harm.upper < 1e-3 < luck.upper
    assert found.best.choice == {harmless: "int4"}


def test_narrower_formats_are_given_back_at_the_end() -> None:
    """What made the most harmful part fall back is no more when another one has fallen back too."""
    a, b = parts = [part("a"), part("bb")]
    waves = {"a": 1, "bb": 2}
    size = {("a", "int4"): 0.4, ("a", "int8"): 0.36, ("bb", "int4"): 0.41, ("bb", "int8"): 0.0}

    def scores(choice: Choice) -> Callable[[Batch], Tensor]:
        def score(batch: Batch) -> Tensor:
            x_B1 = batch.dense_BC
            wrong = [
                size[one.name, step] * torch.sin(20.0 * waves[one.name] * x_B1)
                for one, step in choice.items()
            ]
            return torch.sigmoid(1.5 * x_B1 + sum(wrong, torch.zeros_like(x_B1)))

        return score

    rows = judge()
    before = rows.ne_of(scores({}))
    budget = 1.02 * rises(before, rows.ne_of(scores({a: "int4"}))).upper
    found = search(parts, scores, rows, budget, quiet)
    falling = [{a: "int4", b: "int4"}, {a: "int8", b: "int4"}, {a: "int8", b: "int8"}]
    assert [one.choice for one in found.tried] == [*falling, {a: "int4", b: "int8"}]
    assert found.best is found.tried[-1] and found.best.rise.upper <= budget
    size["a", "int8"] = 0.0  # it stays the last one that was tried, and b is not given back
    budget = rises(before, rows.ne_of(scores({b: "int4"}))).value
    found = search(parts, scores, rows, budget, quiet)
    assert found.best.choice == {a: "int8", b: "int8"} and found.best is found.tried[2]


@pytest.mark.parametrize(("budget", "steps"), [(float("inf"), {"int4"}), (0.0, set())])
def test_ends_of_the_budget(budget: float, steps: set[str]) -> None:
    """Without a bound all have the narrowest formats, and with none to spend the model stays as it
    is.
    """
    found = search([part("a"), part("b")], scoring({"a": 1.0, "b": 1.0}), judge(), budget, quiet)
    assert set(found.best.choice.values()) == steps
    assert found.best.rise.upper == 0.0 or steps


def test_without_a_signal_nothing_harms() -> None:
    """A model that scores all rows alike has no damage to find, and no part is blamed."""
    found = search(
        [part("a")],
        lambda choice: lambda batch: torch.full_like(batch.dense_BC, 0.5),
        judge(signal=0.0),
        1e-4,
        quiet,
    )
    assert found.best.choice == {part("a"): "int4"}
    assert found.best.rise.value == found.best.rise.error == 0.0


def test_a_model_without_such_parts_stays_as_it_is() -> None:
    found = search([], scoring({}), judge(), 1e-4, quiet)
    assert [one.choice for one in found.tried] == [{}]


def test_so_many_rows_would_show_it() -> None:
    """The number that is told: rows repeated as often have an interval that ends within the budget,
    but not by much.
    """
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


def test_other_rows_check_what_was_chosen() -> None:
    """Their rise is told, not that of the rows that chose; and none where the model stays as it
    is.
    """
    scores, choosing, checking = scoring({"a": 0.3}), judge(), judge(900)

    def ne(rows: Judge, choice: Choice) -> list[Estimate]:
        return rows.ne_of(scores(choice))

    found = search_by([part("a")], ne, (choosing, checking), float("inf"), quiet)
    told = rises(ne(checking, {}), ne(checking, {part("a"): "int4"}))
    assert (found.checked.value, found.checked.error, found.checked.units) == (
        told.value,
        told.error,
        900,
    )
    assert found.checked.value != found.best.rise.value
    found = search_by([part("a")], ne, (choosing, checking), 0.0, quiet)
    assert (found.checked.value, found.checked.error) == (0.0, 0.0)


def test_the_label_that_suffers_most_counts() -> None:
    rows = judge()
    of = rows.ne_of(lambda batch: torch.sigmoid(1.5 * batch.dense_BC))
    worse = rows.ne_of(lambda batch: torch.sigmoid(1.5 * batch.dense_BC + 1.0))
    assert rises([*of, *of], [*of, *worse]).value == rises(of, worse).value > 0

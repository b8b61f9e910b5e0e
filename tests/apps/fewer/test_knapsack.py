from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.apps.fewer.knapsack import Option, choose, smallest
from sparrow.core import UserError
from tests.pace import Deadline


def best(classes: list[list[Option]], budget: int) -> float:
    """The least damage of all plans that fit, one by one."""
    plans = itertools.product(*classes)
    return min(sum(d for _, d in plan) for plan in plans if sum(b for b, _ in plan) <= budget)


def check(classes: list[list[Option]], budget: int) -> None:
    chosen = [options[j] for options, j in zip(classes, choose(classes, budget), strict=True)]
    assert sum(size for size, _ in chosen) <= budget
    assert sum(damage for _, damage in chosen) == pytest.approx(best(classes, budget), abs=1e-9)


whole = st.tuples(st.integers(0, 12), st.integers(-6, 6).map(float))  # with many ties
fine = st.tuples(st.integers(0, 10**9), st.floats(-1, 1, allow_subnormal=False))


@settings(max_examples=200)
@given(st.data())
def test_no_plan_is_better(data: st.DataObject) -> None:
    option = data.draw(st.sampled_from([whole, fine]))
    classes = data.draw(st.lists(st.lists(option, min_size=1, max_size=5), min_size=1, max_size=5))
    least, most = smallest(classes), sum(max(size for size, _ in options) for options in classes)
    check(classes, data.draw(st.integers(least, most + 1)))


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_better_of_tables_like_real_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = like_tables(rng, 6, 6)
    least, most = smallest(classes), sum(max(size for size, _ in options) for options in classes)
    for share in rng.random(5):
        check(classes, int(least + share * (most - least)))


def like_tables(rng: np.random.Generator, tables: int, options: int) -> list[list[Option]]:
    """Tables of very different sizes. With fewer bytes comes more damage, but for what the
    measurement adds.
    """
    classes = []
    for _ in range(tables):
        size, worth = 10 ** rng.uniform(3, 8), 10 ** rng.uniform(-5, -2)
        shares = [1.0, *rng.uniform(0.01, 1, options - 1)]
        noise = rng.normal(0, 1e-5, options)
        noise[0] = 0
        classes.append(
            [
                (int(size * s), worth * (1 / s - 1) / 99 + e)
                for s, e in zip(shares, noise, strict=True)
            ]
        )
    return classes


def test_a_budget_that_no_plan_meets() -> None:
    classes: list[list[Option]] = [[(5, 0.0), (3, 1.0)], [(4, 0.0)]]
    assert choose(classes, 7) == [1, 0] and choose(classes, 9) == [0, 0]
    with pytest.raises(
        UserError, match="6 bytes are less than the 7 of the smallest plan; give more"
    ):
        choose(classes, 6)


@pytest.mark.parametrize("kind", ["real", "alike", "near a line"])
def test_a_thousand_tables_are_chosen_in_ten_seconds(kind: str) -> None:
    rng = np.random.default_rng(1)
    classes = like_tables(rng, 1000, 10)
    if kind == "alike":
        classes = classes[:10] * 100
    if kind == "near a line":  # the hardest kind: a byte is worth almost the same everywhere
        rates = 1 + 1e-3 * rng.normal(size=1000)
        classes = [
            [(b, -1e-9 * b * rate) for b, _ in of] for of, rate in zip(classes, rates, strict=True)
        ]
    least, most = smallest(classes), sum(options[0][0] for options in classes)
    for share in (0.02, 0.1, 0.4):
        budget, deadline = (
            int(least + share * (most - least)),
            Deadline(10, clock=time.process_time),
        )
        chosen = choose(classes, budget)
        assert not deadline.over, deadline
        assert sum(options[j][0] for options, j in zip(classes, chosen, strict=True)) <= budget

"""Parts of any kind are measured alone, each in each of its steps, beside the model as it is."""

from __future__ import annotations

import torch

from sparrow.apps.fewer.parts import Choice, Part, Rise, alone, damages
from sparrow.metrics.intervals import Estimate

# a step may be anything: these are not even hashable, as settings of a table are not
TABLE = Part(kind="table", name="item", steps=({"rows": 10}, {"rows": 100}, {}))
PRODUCT = Part(kind="product", name="top", steps=("int8", "fp32"))
ONLY = Part(kind="product", name="last", steps=("fp32",))


def size(step: object) -> float:
    return float(len(str(step)))


def measure(choice: Choice) -> list[Estimate]:
    """NE of two labels: 0.5 and 2 as the model is, and more by what was chosen."""
    harm = sum(size(step) for step in choice.values())
    influence_G = torch.tensor([1.0, -1.0], dtype=torch.float64) * (1 + harm)
    return [Estimate(0.5 + harm, influence_G), Estimate(2.0 + harm, influence_G)]


def test_each_step_but_the_last_is_measured_alone() -> None:
    progress: list[tuple[str, int, int]] = []
    found = list(alone([TABLE, ONLY, PRODUCT], measure, lambda *report: progress.append(report)))
    assert [(part, step) for part, step, _ in found] == [
        (TABLE, {"rows": 10}),
        (TABLE, {"rows": 100}),
        (PRODUCT, "int8"),
    ]
    assert [after[0].value for _, _, after in found] == [0.5 + size(step) for _, step, _ in found]
    assert progress == [("parts alone", done, 3) for done in range(4)]


def test_damage_is_a_share_of_what_was_before_of_the_label_that_suffers_most() -> None:
    before, damage = damages([PRODUCT, ONLY], measure, lambda *report: None)
    assert [estimate.value for estimate in before] == [0.5, 2.0]
    assert list(damage) == [PRODUCT]
    rise = damage[PRODUCT]["int8"]
    assert rise.value == size("int8") / 0.5  # of the first label: 4 of 0.5 are more than 4 of 2
    assert rise.units == 2
    assert rise.plain() == {"value": rise.value, "error": rise.error, "upper": rise.upper}


def test_a_rise_is_said_with_the_end_of_its_interval() -> None:
    assert str(Rise(value=0.0012, error=0.0, units=9)) == "+0.1200 % (95 %: at most +0.1200 %)"

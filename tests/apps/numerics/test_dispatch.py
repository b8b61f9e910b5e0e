"""What is chosen: never what violates a threshold, and the fastest of the rest."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow import data
from sparrow.apps.fewer.parts import rises
from sparrow.apps.numerics.dispatch import (
    HIGH,
    LEAST_SPEEDUP,
    MOST_MERE,
    Verdict,
    as_file,
    as_in_recipe,
    choose_candidate,
    milliseconds,
    recipe_of,
    verdicts,
    within_budget,
)
from sparrow.apps.numerics.measure import PASSES, Site, judges_of, put_precision
from sparrow.core.config import from_dict
from sparrow.extensions.low_precision.candidates import candidates
from sparrow.extensions.low_precision.precision import recipe_file
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.extensions.low_precision.watch import Operands
from sparrow.layers.precision import Precision
from sparrow.layers.site import named_sites
from sparrow.models import dcnv2
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.apps.fewer.test_search import quiet
from tests.runs import small_run

NAMES = ("bf16", "fp8_rowwise", "other")
times = st.floats(1e-3, 1e3)
meres = st.one_of(st.floats(0, 10), st.just(math.nan), st.just(math.inf))


@given(times, st.dictionaries(st.sampled_from(NAMES), st.tuples(times, meres)))
def test_no_candidate_is_chosen_that_violates_a_threshold(
    fp32: float, others: dict[str, tuple[float, float]]
) -> None:
    ms = {HIGH: fp32, **{name: one[0] for name, one in others.items()}}
    mere = {HIGH: 0.0, **{name: one[1] for name, one in others.items()}}
    found = choose_candidate(ms, mere, {})
    sound = [n for n in others if mere[n] < MOST_MERE and fp32 / ms[n] >= LEAST_SPEEDUP]
    assert set(found.allowed) == set(sound)
    assert found.chosen == (min(sound, key=lambda name: ms[name]) if sound else HIGH)
    assert list(found.allowed) == sorted(found.allowed, key=lambda name: ms[name])
    if len(sound) < len(others):
        assert "too much" in found.why or "the least" in found.why


def test_a_verdict_says_why() -> None:
    found = choose_candidate(
        {"fp32": 2.0, "bf16": 1.0}, {"fp32": 0.0, "bf16": 0.01}, {"fp8": "FP8 units are a GPU's"}
    )
    assert found.why == "2.00 times as fast as fp32, MERE 0.01; fp8: FP8 units are a GPU's"
    assert choose_candidate(
        {"fp32": 1.0, "bf16": 0.99}, {"fp32": 0.0, "bf16": 0.01}, {}
    ).why.startswith("bf16: 1.01 times")


def test_times_are_of_each_pass() -> None:
    torch.manual_seed(0)
    of = Operands(torch.randn(40, 30), torch.randn(20, 30), torch.randn(40, 20), 40)
    shapes = set()
    for which in PASSES:
        asked = []

        class Told:
            FORMATS, NEVER = ("fp32", "fp32"), ""

            @staticmethod
            def missing(device: torch.device) -> str:
                return ""

            @staticmethod
            def multiply(
                a: torch.Tensor, b: torch.Tensor, asked: list[object] = asked
            ) -> torch.Tensor:
                asked.append((*a.shape, b.shape[1]))
                return a @ b

        found = milliseconds(of, which, {"fp32": Told})
        assert found["fp32"] > 0
        assert len(set(asked)) == 1
        shapes |= set(asked)
    assert shapes == {(40, 30, 20), (40, 20, 30), (20, 40, 30)}


def verdict(*allowed: str) -> Verdict:
    return Verdict(
        chosen=allowed[0] if allowed else HIGH, why="", allowed=allowed, milliseconds={}, mere={}
    )


def test_a_recipe_has_what_was_chosen_of_each_pass(tmp_path: Path) -> None:
    alone = {
        "a.weight": [verdict("bf16"), verdict(), verdict("bf16")],
        "b.0": [verdict(), verdict("bf16"), verdict()],
    }
    found = recipe_of(alone, {"a.weight": "bf16"}, Precision(weights="split"))
    assert found.name == "bf16"
    assert found.weights == "split"
    plain, narrow = ("fp32", "fp32"), ("bf16", "bf16")
    assert found.sites["a.weight"] == Recipe(
        forward=narrow, input_gradient=plain, weight_gradient=narrow
    )
    assert found.sites["b.0"] == Recipe(forward=plain, input_gradient=narrow, weight_gradient=plain)
    (tmp_path / "r.toml").write_text(as_file(found, "told"))
    assert from_dict(Precision, recipe_file(tmp_path / "r.toml")) == found  # weights too
    # nothing narrow flows then
    assert recipe_of(alone, {"a.weight": HIGH}, Precision()) == Precision()
    (tmp_path / "r.toml").write_text(as_file(Precision(), ""))
    assert from_dict(Precision, recipe_file(tmp_path / "r.toml")) == Precision()


def test_verdicts_in_a_recipe_say_what_it_has_and_why() -> None:
    alone = {
        "a.weight": [verdict("fp8_rowwise", "bf16"), verdict(), verdict("bf16")],
        "b": [verdict("bf16")] * 3,
    }
    every = {"a.weight": "fp8_rowwise", "b": "bf16"}
    assert as_in_recipe(alone, recipe_of(alone, every, Precision())) == alone
    found = as_in_recipe(alone, recipe_of(alone, {"a.weight": "bf16"}, Precision()))
    assert [one.chosen for one in found["a.weight"]] == ["bf16", HIGH, "bf16"]
    assert [one.chosen for one in found["b"]] == [HIGH, "bf16", "bf16"]
    assert found["a.weight"][0].why.startswith("the budget of NE leaves fp8_rowwise out")
    none = as_in_recipe(alone, recipe_of(alone, {}, Precision()))
    assert {one.chosen for of in none.values() for one in of} == {HIGH}
    assert [one.why.split(";")[0] for one in none["a.weight"]] == [
        "the budget of NE leaves fp8_rowwise out", "", "all forwards are fp32",
    ]  # fmt: skip


def test_the_budget_is_kept_by_all_together(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coarse candidate harms: with no budget it goes, with a large one it stays.

    How much it harms is told of other rows than those that have chosen.
    """
    train(
        small_run(prepared, tmp_path / "run", model=dcnv2.Config(dim=4, deep=(8,), cross_layers=1))
    )
    found, (judges, _) = restore(tmp_path / "run"), judges_of(data.open(prepared), 250)
    low = [name for name, site in named_sites(found.model.model).items() if not site.high]
    monkeypatch.setattr(candidates()["bf16"], "FORMATS", ("mx4", "mx4"))
    monkeypatch.setattr(candidates()["bf16"], "missing", lambda device: "emulated")
    alone = {name: [verdict("bf16")] * 3 for name in low}
    loose, rise = within_budget(found, alone, judges, 1.0, quiet)
    assert set(loose.sites) == set(low)
    assert loose.sites[low[0]].forward == ("mx4", "mx4")
    before, after = (judges[1].ne_of(put_precision(found, of)) for of in (Precision(), loose))
    assert rise is not None and rise.value == rises(before, after).value != 0
    assert within_budget(found, alone, judges, 0.0, quiet) == (Precision(), None)
    put_precision(found, found.run.precision)
    assert all(site.recipe is None for site in named_sites(found.model.model).values())
    assert within_budget(found, {name: [verdict()] * 3 for name in low}, judges, 1.0, quiet) == (
        Precision(),
        None,
    )


def test_sizes_that_a_candidate_does_not_take_are_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    of = Operands(torch.randn(40, 30), torch.randn(20, 30), torch.randn(40, 20), 40)
    site = Site(name="a", high=False, operands=of, learned=None, rows_per_example=1.0, flops=1200.0)
    monkeypatch.setattr(candidates()["bf16"], "missing", lambda device: "")
    monkeypatch.setattr(candidates()["bf16"], "takes", lambda a, b: a.shape != (40, 30))
    run = Run.of("log", {"threads": 1, "data.batch_size": 40})
    found = verdicts([site, dataclasses.replace(site, name="b", high=True)], run, quiet)
    assert found.keys() == {"a"}
    forward, *others = found["a"]
    assert forward.chosen == HIGH
    assert forward.milliseconds.keys() == {HIGH}
    assert "bf16: its units do not take these sizes" in forward.why
    assert all(verdict.milliseconds.keys() == {HIGH, "bf16"} for verdict in others)

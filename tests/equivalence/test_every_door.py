"""Every model as it is without a setting, through every door: its scores are the same behind each.

Models are found by themselves, so that a new one passes here before it is one. Each is fitted once
to a small log and once to that of the next day. A cell that a door refuses is named in REFUSED,
with the line that a person reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.bits.quantize import quantize
from sparrow.apps.compare import compare
from sparrow.apps.convert import convert
from sparrow.apps.report import report
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.extensions.blend.model import available
from sparrow.extensions.calibration.calibrate import calibrate
from sparrow.features.schema import Split
from sparrow.features.transforms import Transforms
from sparrow.metrics import evaluate
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained.predict import predict
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.defaults import defaults
from tests.apps.convert.test_write import assert_in_onnxruntime, expected_of

NAMES = Family("sparrow.models").names()
ROWS = 800
CLOSE = 1e-6  # products of other shapes sum in another order
STILL = {"tables.rule.lr": 0.0, "dense.lr": 0.0}
USER = ("user", "age")
FEATURES = ("user", "age", "item", "price", "history")


def rows(seed: int, items: int) -> pa.Table:
    """What there is to learn: an effect of each item and of the price, which is no line."""
    random = np.random.default_rng(seed)
    item, price = random.integers(0, items, ROWS), random.normal(size=ROWS)
    effect = np.random.default_rng(0).normal(size=100)[item] + np.where(
        np.abs(price) > 0.7, 1.0, -1.0
    )
    return pa.table(
        {
            "user": [f"u{i}" for i in random.integers(0, 20, ROWS)],
            "age": random.integers(20, 60, ROWS).astype(float),
            "item": [f"i{i}" for i in item],
            "price": price,
            "history": [
                [f"i{i}" for i in random.integers(0, items, random.integers(0, 4))]
                for _ in range(ROWS)
            ],
            "click": (random.random(ROWS) < 1 / (1 + np.exp(-2 * effect))).astype(int),
            "ts": 1_772_323_200 + 86_400 * seed + np.arange(ROWS),
        }
    )


@dataclass(frozen=True)
class Made:
    """A model that was fitted to the first day's log. What a door needs is made when it is asked
    for.
    """

    name: str
    days: Path
    place: Path

    @cached_property
    def run(self) -> Path:
        return self.fitted("run", self.days / "prepared")

    @cached_property
    def scores(self) -> Any:
        """What the run gives for the rows of its log."""
        return restore(self.run).score_rows(self.table)

    @cached_property
    def table(self) -> pa.Table:
        return pq.read_table(self.days / "first.parquet")

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table.select(FEATURES).to_pylist()
        return found

    @cached_property
    def folder(self) -> Path:
        export(self.run, self.place / "model", [self.days / "first.parquet"])
        return self.place / "model"

    @cached_property
    def scorer(self) -> Scorer:
        return load(self.folder)

    @cached_property
    def next_log(self) -> Path:
        """The next day's log, with new items."""
        return self.grown("next", Split(by="time"))

    def grown(self, name: str, split: Split) -> Path:
        schema = Transforms.load(self.run)
        return data.prepare(
            [self.days / "second.parquet"], self.place / name, schema=schema, grow=True, split=split
        ).out

    def fitted(self, name: str, prepared: Path, **changes: Any) -> Path:
        given = {
            "run_dir": str(self.place / name),
            "model.name": self.name,
            "threads": 1,
            "log.tensorboard": False,
        }
        train(Run.of(prepared, defaults(prepared, {**given, **changes})))
        return self.place / name


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("days")
    for name, seed, items in (("first", 0, 20), ("second", 1, 30)):
        pq.write_table(rows(seed, items), place / f"{name}.parquet")
    data.prepare([place / "first.parquet"], place / "prepared", split=Split(by="time"))
    return place


@pytest.fixture(scope="module")
def made(days: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    cache: dict[str, Made] = {}

    def of(name: str) -> Made:
        return cache.setdefault(name, Made(name, days, tmp_path_factory.mktemp(name)))

    return of


def assert_close(ours: Any, theirs: Any, close: float = CLOSE) -> None:
    assert np.isfinite(ours).all() and np.shape(ours) == np.shape(theirs)
    assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= close


# -- the doors -------------------------------------------------------------------------------------


def is_predicted(of: Made) -> None:
    out = of.place / "scores.parquet"
    predict(of.run, [of.days / "first.parquet"], out)
    assert_close(pq.read_table(out)["score"].to_numpy(), of.scores[:, 0])


def is_scored(of: Made) -> None:
    assert_close(of.scorer.score(of.requests), of.scores)
    assert_close(
        np.concatenate([of.scorer.score([row]) for row in of.requests[:20]]), of.scores[:20]
    )


def is_ranked(of: Made) -> None:
    """With the columns of the first user for all candidates."""
    user = {name: of.requests[0][name] for name in USER}
    candidates = [
        {name: value for name, value in row.items() if name not in USER}
        for row in of.requests[:100]
    ]
    assert_close(
        of.scorer.rank(user, candidates),
        of.scorer.score([{**row, **user} for row in of.requests[:100]]),
    )


def is_served(of: Made) -> None:
    pytest.importorskip("starlette", reason="needs the extra [serve]")
    from sparrow.apps.service.app import Service
    from sparrow.apps.service.limits import Limits
    from sparrow.apps.service.settings import Settings
    from sparrow.apps.service.versions import Versions
    from tests.apps.service.asking import ask

    service = Service(Versions(of.scorer), Limits(deadline_ms=60_000), Settings())
    try:
        got = ask(
            service,
            "/rank",
            {"user": {}, "candidates": of.table.select(FEATURES).slice(0, 100).to_pydict()},
        )
        assert got.status == 200, got
        assert_close(got.json["scores"]["click"], of.scores[:100, 0])
        assert ask(service, "/example/0").status == 200
    finally:
        service.batcher.close()


def is_quantized(of: Made) -> None:
    few = quantize(
        of.folder, of.place / "few", of.days / "prepared", budget=math.inf, rows=200
    ).scorer
    assert_close(few.score(of.requests), of.scores, 0.1)
    assert_close(load(of.place / "few").score(of.requests), few.score(of.requests))


def is_quantized_to_fp32(of: Made) -> None:
    same = quantize(
        of.folder,
        of.place / "same",
        of.days / "prepared",
        budget=math.inf,
        tables="fp32",
        products="fp32",
        rows=200,
    )
    assert_close(same.scorer.score(of.requests), of.scores)


def is_converted(of: Made, to: Any) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (the extra onnx)")
    out = of.place / to
    convert(of.folder, out, to)
    expected = expected_of(out, slice(None))
    assert_close(expected, restore(of.run).score_rows(pq.read_table(out / "check.parquet")))
    if to.startswith("onnx"):
        assert_in_onnxruntime(out)


def follows_a_base(of: Made) -> None:
    """The next day's run is a delta, and what it and its base score is what the run scores."""
    run = of.fitted("of_next", of.next_log, init_from=str(of.run))
    export(run, of.place / "delta", [of.days / "second.parquet"], base=[of.folder])
    table = pq.read_table(of.days / "second.parquet")
    want = restore(run).score_rows(table)
    requests = table.select(FEATURES).to_pylist()
    assert_close(load(of.folder, [of.place / "delta"]).score(requests), want)
    assert_close(of.scorer.updated(of.place / "delta").score(requests), want)


def goes_on(of: Made) -> None:
    """A day of which nothing is held out, and from which nothing is learnt: the rows before have
    their scores still.
    """
    log = of.grown("whole", Split(valid=0.0, test=0.0))
    run = of.fitted("of_whole", log, init_from=str(of.run), **STILL)
    assert_close(restore(run).score_rows(of.table), of.scores)
    assert np.isfinite(restore(run).score_rows(pq.read_table(of.days / "second.parquet"))).all()


def is_calibrated(of: Made) -> None:
    before = restore(of.run).score_rows(of.table)
    calibrate(of.run, "logistic")
    try:
        after = restore(of.run)
        with torch.no_grad():
            assert_close(
                after.score_rows(of.table)[:, 0],
                after.calibrators[0](torch.tensor(before[:, 0])).numpy(),
            )
        export(of.run, of.place / "calibrated", [of.days / "first.parquet"])
        assert_close(load(of.place / "calibrated").score(of.requests), after.score_rows(of.table))
    finally:
        calibrate(of.run, "none")
    assert_close(restore(of.run).score_rows(of.table), before, 0.0)


def is_reported(of: Made) -> None:
    page = report(of.run, rows=100, out=of.place / "report.html").read_text()
    found = restore(of.run)
    test = data.open(of.days / "prepared").loader(256, "test")
    assert (
        f"{evaluate(found.scores, test)['auc']:.4f}" in page
        and f"{of.name}, step {found.step}" in page
    )


def is_compared(of: Made) -> None:
    """With its own scores, which are a file."""
    test = data.open(of.days / "prepared").rows("test")
    pq.write_table(pa.table({"score": of.scores[-test:, 0]}), of.place / "own.parquet")
    found = compare([of.run], [of.place / "own.parquet"])
    assert all(abs(one.value) <= 1e-6 for one in found.differences)


def has_tables(of: Made) -> None:
    assert main(["tables", str(of.run)]) == 0
    assert (
        main(["tables", str(of.run), "--budget", "1MB", "--trainings", "0", "--sample", "100"]) == 0
    )


Door = Callable[[Made], None]
DOORS: dict[str, Door] = {
    "predict": is_predicted,
    "scorer": is_scored,
    "rank": is_ranked,
    "service": is_served,
    "quantize": is_quantized,
    "quantize to fp32": is_quantized_to_fp32,
    "delta": follows_a_base,
    "next day": goes_on,
    "calibrate": is_calibrated,
    "report": is_reported,
    "compare": is_compared,
    "tables": has_tables,
}
TARGETS = ("onnx", "onnx-dense", "torch", "aot")
DOORS |= {f"convert {to}": partial(is_converted, to=to) for to in TARGETS}
REFUSED: dict[tuple[str, str], str] = {}
# quick for a blend alone
HEAVY = ("report", "tables", "quantize to fp32", "convert torch")
# ten seconds for a blend; tests/apps/convert has them for smaller models
HEAVIER = ("convert onnx", "convert onnx-dense", "convert aot")


def is_slow(name: str, door: str) -> bool:
    return door in HEAVIER or (door in HEAVY and name != "blend")


@pytest.mark.parametrize(
    ("name", "door"),
    [
        pytest.param(*cell, marks=pytest.mark.slow if is_slow(*cell) else ())
        for cell in itertools.product(NAMES, DOORS)
    ],
)
def test_every_model_passes_every_door(made: Callable[[str], Made], name: str, door: str) -> None:
    if (name, door) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name, door]):
            DOORS[door](made(name))
        return
    DOORS[door](made(name))


def test_the_blend_here_has_all_its_parts(made: Callable[[str], Made]) -> None:
    """Else its doors would show little."""
    parts = restore(made("blend").run).model.part_names
    assert parts == (("members", "logistic", "trees") if available() else ("members", "logistic"))

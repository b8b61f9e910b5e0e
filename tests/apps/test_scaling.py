from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.apps.scaling import Point, law, scale, sizes
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.core.config import to_dict, write_toml
from sparrow.features.schema import Column, Schema, Split
from sparrow.models import dcnv2, deepfm, dlrm, wukong
from sparrow.trained.run import Run
from tests.models import closed_forms
from tests.runs import run_of


def sized(prepared: Path, place: Path) -> Run:
    small = wukong.Config(
        dim=4, layers=1, n_f=2, n_l=2, k=2, mlp=(8,), top=(8,), bottom=(8,), compressed=1
    )
    return run_of(
        prepared, place, **{"data.batch_size": 200, "model": to_dict(small) | {"name": "wukong"}}
    )


def point(flops: float, ne: float) -> Point:
    return Point(family="wukong", flops=flops, weights=1, ne=ne, auc=0.5, measured="valid")


def test_the_law_of_points_that_obey_one() -> None:
    found = law([point(x, 0.9956 * x**-0.00071) for x in np.geomspace(1e8, 1e11, 7)])
    assert (found.a, found.b) == (
        pytest.approx(0.9956),
        pytest.approx(-0.00071),
    ) and found.margin < 1e-11
    assert found.doubled(1e9)[0] == pytest.approx(found.at(2e9) - found.at(1e9))
    with pytest.raises(UserError, match="two sizes or more"):
        law([point(1e9, 0.9)])


@pytest.mark.parametrize("sizes", [3, 4, 6, 18])
def test_the_margin_of_a_law_holds_in_19_of_20_cases(sizes: int) -> None:
    rng, x = np.random.default_rng(0), np.geomspace(1e6, 1e9, sizes)
    laws = [
        law([point(f, 0.9 * f**-0.01 * math.exp(0.02 * rng.normal())) for f in x])
        for _ in range(2000)
    ]
    within = np.mean([abs(found.b + 0.01) < found.margin for found in laws])
    assert within == pytest.approx(0.95, abs=0.015)  # three standard errors of 2000 cases
    assert math.isnan(law([point(1e6, 0.9), point(1e7, 0.8)]).margin)


def test_families_grow(prepared: Path, tmp_path: Path) -> None:
    models: list[Any] = [run.model for run in sizes(sized(prepared, tmp_path / "w"), 6)]
    assert [m.layers for m in models] == [1, 2, 3, 4, 4, 4]
    assert (
        [m.n_f for m in models]
        == [2, 2, 2, 2, 4, 8]
        == [m.n_l for m in models]
        == [m.k for m in models]
    )
    log = data.open(prepared)
    flops = [closed_forms.flops(m, log.schema, log.first(64)) for m in models]
    assert flops == sorted(flops) and len(set(flops)) == 6
    assert dlrm.Config(top=(8, 4)).larger().top == (16, 16, 8)
    assert dcnv2.Config(deep=(8,), cross_layers=2).larger() == dcnv2.Config(
        deep=(16,), cross_layers=3
    )
    run = Run.of(str(prepared), {"model.name": "deepfm"})
    assert isinstance(run.model, deepfm.Config)
    with pytest.raises(
        UserError, match="'deepfm' does not say how it grows; use one of dcnv2, dlrm, wukong"
    ):
        sizes(run, 2)


def test_sizes_are_trained_once_and_counted_right(prepared: Path, tmp_path: Path) -> None:
    told: list[str] = []
    runs = sizes(sized(prepared, tmp_path / "w"), 2)
    points = scale(runs, told.append)
    log = data.open(prepared)
    for run, found in zip(runs, points, strict=True):
        assert 64 * found.flops == closed_forms.flops(run.model, log.schema, log.first(64))
        judged = json.loads((Path(run.run_dir) / "results.json").read_text())["valid"]
        assert (found.measured, found.ne, found.auc) == (
            "valid",
            judged["ne"],
            judged["auc"],
        ) and found.weights > 0
    assert told == [run.run_dir for run in runs]
    assert scale(runs, told.append) == points and len(told) == 2
    others = [dataclasses.replace(run, seed=7) for run in runs]
    with pytest.raises(UserError, match="size-0: was trained with seed 0, it is 7 now; delete it"):
        scale(others)


def test_the_command(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.toml").write_text(write_toml(to_dict(sized(prepared, Path("w")))))
    assert main(["scale", "w.toml", "--sizes", "2"]) == 0
    said, progress = capsys.readouterr()
    assert "training w/size-0\ntraining w/size-1\n" in progress
    assert (
        "GFLOP an example" in said
        and "through two points, which say nothing of its error" in said
        and "±" not in said
    )
    assert Path("scale.png").stat().st_size > 5000
    assert main(["scale", "w.toml", "--sizes", "2", "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    for size in range(2):
        ne, more = (
            json.loads(Path(f"w/size-{size}{seed}/results.json").read_text())["valid"]["ne"]
            for seed in ("", "-seed-1")
        )
        assert f"{(ne + more) / 2:.4f} ± {abs(ne - more) / 2**0.5:.4f}" in said
    assert {place.name for place in Path("w").iterdir()} == {
        "size-0",
        "size-0-seed-1",
        "size-1",
        "size-1-seed-1",
    }
    assert main(["scale", "w.toml", "w.toml"]) == 2
    assert "writes to w, as another file does" in capsys.readouterr().err


def test_a_valid_part_of_one_class_says_so(tmp_path: Path) -> None:
    for name, labels in (("train", [0, 1] * 50), ("valid", [0] * 20)):
        pq.write_table(
            pa.table({"label": labels, "x": list(range(len(labels)))}), tmp_path / f"{name}.parquet"
        )
    columns = {"label": Column(kind="label"), "x": Column(kind="numeric")}
    split = Split(valid_files=(str(tmp_path / "valid.parquet"),))
    schema = Schema(columns=columns, split=split)
    log = data.prepare([tmp_path / "train.parquet"], tmp_path / "log", schema=schema).out
    with pytest.raises(UserError, match="the valid part's labels are all alike"):
        scale(sizes(sized(log, tmp_path / "w"), 2))

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch

from sparrow import data
from sparrow.extensions.tiers.serving import Ssd
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.serving.hot_rows import FILE
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import small_run


@pytest.fixture(scope="module")
def model(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hot")
    train(small_run(prepared, place / "run", loop=Loop(max_steps=2)))
    export(place / "run", place / "model", [log], hot=40)
    return place / "model"


def test_rows_are_listed_by_how_often_the_log_has_them(model: Path, prepared: Path) -> None:
    """Of a table with two features, both count."""
    listed, dataset = safetensors.torch.load_file(model / FILE), data.open(prepared)
    counts: dict[str, Counter[int]] = {}
    for split in ("train", "valid", "test"):
        for batch in dataset.loader(1000, split=split, dedup="off"):
            for name in dataset.schema.sparse:
                table = str(dataset.schema.columns[name].table)
                counts.setdefault(table, Counter()).update(batch.ids[name].values_N.tolist())
    assert listed.keys() == counts.keys()
    for table, rows_H in listed.items():
        assert (
            rows_H.tolist()
            == sorted(counts[table], key=lambda row: (-counts[table][row], row))[:40]
        )


def test_a_new_cache_begins_with_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "check", lambda self: None)  # it asks for rows too
    listed = safetensors.torch.load_file(model / FILE)
    scorer = load(model, ssd=Ssd(folder=tmp_path, least_mb=0.0, cache_mb=1.0))
    for cached in scorer.on_ssd[0].cached.values():
        assert set(cached.cache.rows_F.tolist()) - {-1} == set(listed[cached.table].tolist())


def test_without_the_setting_nothing_is_listed(model: Path, log: Path, tmp_path: Path) -> None:
    export(model.parent / "run", tmp_path / "model", [log])
    assert not (tmp_path / "model" / FILE).exists()

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.embeddings import TableChoices
from sparrow.embeddings.choices import Override
from sparrow.extensions.tiers import reuse
from sparrow.extensions.tiers.curves import Trace
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.trained.run import Checkpoints, Loop, Run
from sparrow.training import preflight
from sparrow.training.loop import Trainer
from tests.extensions.tiers.test_curves import lru_miss_ratio
from tests.runs import on_disk, small_run


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with tables that are worth a cache."""
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    generate(path, rows=12_000, users=3000, items=3000, categorical=1, numeric=1, seed=5)
    data.prepare([path], path.parent / "prepared")
    return path.parent / "prepared"


def counters(run: Run, folder: Path, share: float) -> dict[str, tuple[float, float, int, int]]:
    """Table -> hit ratio of a run and of its curve, rows of batches in the run and in the curve."""
    of = Override(where="rows > 1000", tier={"name": "ssd", "fraction": share})
    tables = dataclasses.replace(run.tables, overrides=(of,))
    run = on_disk(dataclasses.replace(run, tables=tables), folder / "disk")
    dataset = data.open(run.data.path)
    found = reuse.uses(preflight.resolved(run, dataset), dataset)
    trainer = Trainer(run)
    trainer.fit()
    made = {}
    for record in (record for tables in trainer.job.tables for record in tables.all_records()):
        if record.component.tier.is_on:
            store, curve = record.store, found[record.name][0].curve
            expected = 1 - curve.miss_ratio(tier_frames(record.component, record.rows)[0])
            made[record.name] = (store.hits / store.used, expected, store.used, curve.references)
    return made


@pytest.mark.parametrize(
    ("share", "accumulate"),
    [
        (0.1, 1),
        (0.3, 2),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in ((0.3, 1), (0.1, 2))),
    ],
)
def test_curves_say_what_frames_of_a_run_have(
    wide: Path, tmp_path: Path, share: float, accumulate: int
) -> None:
    loop = Loop(max_steps=300 // accumulate, accumulate=accumulate)
    run = small_run(wide, tmp_path / "run", batch_size=16, loop=loop, checkpoint=Checkpoints())
    found = counters(run, tmp_path, share)
    assert len(found) >= 2
    for hits, expected, used, references in found.values():
        assert used == references  # the same batches
        assert hits == pytest.approx(expected, abs=0.02)


def test_two_epochs_are_two_passes(wide: Path, tmp_path: Path) -> None:
    for epochs, batches in ((1, 19), (2, 38)):
        run = small_run(wide, tmp_path / "run", batch_size=512, loop=Loop(epochs=epochs))
        dataset = data.open(wide)
        used = reuse.uses(preflight.resolved(run, dataset), dataset)
        assert {of[0].curve.batches for of in used.values()} == {batches}
        assert all(of[0].is_whole for of in used.values())


def test_only_so_many_examples_are_read(wide: Path, tmp_path: Path) -> None:
    run = preflight.resolved(small_run(wide, tmp_path / "run", batch_size=100), data.open(wide))
    used = reuse.uses(run, data.open(wide), 1000)
    # of ten, half fill caches
    assert {(of[0].curve.batches, of[0].is_whole) for of in used.values()} == {(5, False)}


def test_components_have_curves_each_and_ids_that_come_and_go_too(
    wide: Path, tmp_path: Path
) -> None:
    overrides = (
        Override(names=("user",), addressing={"name": "quotient_remainder", "operation": "mult"}),
        Override(names=("item",), addressing={"name": "dynamic", "rows": 500}),
    )
    run = small_run(wide, tmp_path / "run", tables=TableChoices(overrides=overrides))
    used = reuse.uses(preflight.resolved(run, data.open(wide)), data.open(wide))
    dataset = data.open(wide)
    columns = [name for name, column in dataset.schema.columns.items() if column.table == "item"]
    batches = [
        [b.ids[name].values_N for name in columns]
        for b in dataset.loader(256, split="train", dedup="off")
    ]
    ids = [torch.cat(of) for of in batches]
    assert used["item"][0].lookups == pytest.approx(sum(map(len, ids)) / len(ids))
    assert used["item"][0].curve.references == sum(len(of.unique()) for of in ids)
    assert len(used["user"]) == 2
    assert all(use.curve.references > 0 for use in used["user"])


def test_a_sample_of_a_real_log_is_near(real_data: Path) -> None:
    import pyarrow.parquet as pq

    part = next(pq.ParquetFile(real_data / "globo_clicks.parquet").iter_batches(200_000))
    names = [name for name in part.schema.names if "user" in name or "article" in name]
    assert names
    for name in names:
        values = torch.from_numpy(part.column(name).to_numpy(zero_copy_only=False).astype("int64"))
        batches = list(values.split(1000))
        sampled, whole = (Trace(keep=keep) for keep in (1 << 15, 1 << 30))
        for rows in batches:
            sampled.add(rows)
            whole.add(rows)
        distinct = len(values.unique())
        for frames in (distinct // 50 + 1000, distinct // 10 + 1000, distinct // 3):
            expected = lru_miss_ratio(batches, frames)
            assert whole.curve().miss_ratio(frames) == pytest.approx(expected, abs=1e-9)
            assert sampled.curve().miss_ratio(frames) == pytest.approx(expected, abs=0.02)

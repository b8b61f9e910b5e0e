from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow import data
from sparrow.apps.smaller.learned_hash import By, clusters, fit, map_ids
from sparrow.core import UserError
from sparrow.embeddings import Numbering, TableChoices
from sparrow.embeddings.addressing import learned
from sparrow.embeddings.addressing.learned import Map
from sparrow.embeddings.choices import Override
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.features.transforms import Transforms
from sparrow.trained.build import tables_of
from sparrow.trained.run import Data, Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, train
from sparrow.training.runlog import read
from tests.runs import small_run

GROUPS, IDS, ROWS = 4, 120, 6000


def quiet(what: str, done: int, total: int) -> None:
    """Nobody looks."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in the order of time, whose items click as their group does: item mod 4."""
    root = tmp_path_factory.mktemp("groups")
    random = np.random.default_rng(0)
    item = np.minimum(random.zipf(1.3, ROWS), IDS) - 1
    click = random.random(ROWS) < np.array([0.05, 0.3, 0.7, 0.95])[item % GROUPS]
    columns = {
        "ts": np.arange(ROWS),
        "item": item,
        "page": random.integers(0, 9, ROWS),
        "click": click.astype(int),
    }
    pq.write_table(pa.table(columns), root / "log.parquet")
    schema = Schema(
        columns={
            "ts": Column(kind="time"),
            "item": Column(kind="categorical", table="item"),
            "page": Column(kind="categorical", table="page"),
            "click": Column(kind="label"),
        },
        encodings={
            "item": Encoding(kind="vocabulary", min_count=1),
            "page": Encoding(kind="hash", rows=32),
        },
        split=Split(by="time", valid=0.1, test=0.1),
    )
    data.prepare([root / "log.parquet"], root / "prepared", schema=schema)
    return root / "prepared"


def groups(log: Path) -> np.ndarray:
    """The group of each row of the vocabulary; -1 for missing and unknown."""
    transforms = data.open(log).transforms
    table = pa.table(
        {
            "ts": np.arange(IDS),
            "item": np.arange(IDS),
            "page": np.zeros(IDS, int),
            "click": np.zeros(IDS, int),
        }
    )
    rows = np.asarray(transforms.transform(table, training=False)["item"].combine_chunks())
    found = np.full(transforms.schema.encodings["item"].rows or 0, -1)
    found[rows[rows >= 2]] = (np.arange(IDS) % GROUPS)[rows >= 2]
    return found


# -- clusters --------------------------------------------------------------------------------------


def inertia(x_ND: np.ndarray, weight_N: np.ndarray, of_N: np.ndarray) -> float:
    total = 0.0
    for k in np.unique(of_N):
        w, x = weight_N[of_N == k], x_ND[of_N == k]
        total += float(w @ ((x - w @ x / w.sum()) ** 2).sum(1))
    return total


@pytest.mark.parametrize("dim", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_clusters_are_near_and_weigh_the_same(dim: int, seed: int) -> None:
    random = np.random.default_rng(10 * seed + dim)
    x_ND, weight_N = (
        random.normal(size=(2000, dim)),
        random.zipf(2.0, 2000).clip(1, 20).astype(float),
    )
    of_N = clusters(x_ND, weight_N, 64)
    mass_K, mean = np.bincount(of_N, weight_N, 64), weight_N.sum() / 64
    assert mean / 2 < mass_K.min() <= mass_K.max() < 2 * mean
    by_chance = inertia(x_ND, weight_N, random.permutation(of_N))
    assert inertia(x_ND, weight_N, of_N) < {1: 0.02, 2: 0.1, 4: 0.4}[dim] * by_chance
    assert np.array_equal(of_N, clusters(x_ND, weight_N, 64))


def test_a_heavy_point_is_alone() -> None:
    of_N = clusters(np.arange(9.0)[:, None], np.array([1.0, 1, 1, 1, 99, 1, 1, 1, 1]), 3)
    assert (of_N == of_N[4]).sum() == 1 and len(set(of_N)) == 3


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 40))
def test_there_are_as_many_clusters_as_asked_for(points: list[int], count: int) -> None:
    """Also of points that are all alike: these are ids of which nothing was learnt, and they too
    share rows evenly.
    """
    of_N = clusters(np.array(points, float)[:, None], np.ones(len(points)), count)
    used = np.bincount(of_N, minlength=count)
    assert (used > 0).sum() == min(count, len(points)) and used.max() <= 2 * -(
        -len(points) // count
    )


# -- the map ---------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=60), st.integers(3, 20), st.floats(0, 1),
    st.sampled_from(["both", "counts", "vectors"]),
)  # fmt: skip
def test_a_map_is_total_and_in_range(counts: list[int], rows: int, private: float, by: By) -> None:
    count_S, rows = np.array(counts), min(rows, len(counts))
    if rows < 3:
        return
    vectors_SD = np.random.default_rng(0).normal(size=(len(counts), 2))
    row_S, alone = map_ids(count_S, vectors_SD, rows, private, by)
    assert (
        len(row_S) == len(counts) and 0 <= row_S.min() <= row_S.max() < rows and 2 <= alone < rows
    )
    assert row_S[:2].tolist() == [0, 1]
    used = np.bincount(row_S, minlength=rows)
    assert (used[:2] == 1).all() and (used[:alone] <= 1).all()
    hottest = np.argsort(-count_S[2:], kind="stable")[: alone - 2] + 2
    assert row_S[hottest].tolist() == list(range(2, 2 + len(hottest)))


def test_alike_ids_share_rows(log: Path) -> None:
    dataset = data.open(log)
    found = fit(dataset, "item", 20, quiet, share=0.5, private=0.2)
    again = fit(dataset, "item", 20, quiet, share=0.5, private=0.2)
    assert torch.equal(found.row_S, again.row_S) and found.digest == again.digest
    assert found.fitted == ROWS * 8 // 10 // 2 and found.private == 4
    of, group = found.row_S.numpy(), groups(log)
    by_chance = fit(dataset, "item", 20, quiet, private=0.2, by="counts").row_S.numpy()
    count_S = np.zeros(len(of))
    for batch in dataset.loader(1000, dedup="off"):
        np.add.at(count_S, batch.ids["item"].values_N.numpy(), 1)

    def same_group(row_S: np.ndarray) -> float:
        """The share of pairs in one row that are of one group, weighted by how often both occur."""
        pair = (row_S[:, None] == row_S[None]) & (
            np.arange(len(row_S))[:, None] < np.arange(len(row_S))[None]
        )
        pair &= (group[:, None] >= 0) & (group[None] >= 0)
        weight = np.sqrt(count_S[:, None] * count_S[None]) * pair
        return float((weight * (group[:, None] == group[None])).sum() / weight.sum())

    # clicks depend on the group alone, of which a number says all
    one = fit(dataset, "item", 20, quiet, share=1.0, private=0.2, numbers=1).row_S.numpy()
    assert same_group(one) > 0.45 > 0.33 > same_group(by_chance)
    assert same_group(of) > 0.33


def test_later_rows_have_no_part_in_it(log: Path, tmp_path: Path) -> None:
    """The labels of all rows after the share are turned around."""
    raw = pq.read_table(log.parent / "log.parquet")
    click, last = raw["click"].to_numpy().copy(), ROWS * 8 // 10 // 4
    click[last:] = 1 - click[last:]
    pq.write_table(raw.set_column(3, "click", pa.array(click)), tmp_path / "log.parquet")
    data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "prepared", schema=data.open(log).transforms
    )
    maps = [
        fit(data.open(place), "item", 20, quiet, share=0.25)
        for place in (log, tmp_path / "prepared")
    ]
    assert torch.equal(maps[0].row_S, maps[1].row_S)
    more = [
        fit(data.open(place), "item", 20, quiet, share=0.75)
        for place in (log, tmp_path / "prepared")
    ]
    assert not torch.equal(more[0].row_S, more[1].row_S)


def test_a_file_keeps_it_and_damage_is_told(log: Path, tmp_path: Path) -> None:
    found = fit(data.open(log), "item", 20, quiet)
    path = tmp_path / "item.map"
    found.save(path)
    assert Map.load(path).digest == found.digest
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"file: .*item\.map (is no map of ids|is damaged)"):
            Map.load(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is no map of ids"):
        Map.load(path)
    with pytest.raises(UserError, match="file: .*none: No such file"):
        Map.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"table": "itm"}, "--fit: no table 'itm'; did you mean 'item'"),
        ({"table": "page"}, "--fit: the ids of table 'page' are hashes"),
        ({"rows": 2}, "rows: 2 is out of range"),
        ({"rows": 10_000}, "rows: 10000 is out of range"),
        ({"numbers": 5}, "numbers: 5 is out of range"),
        ({"share": 0.0}, "share: 0.0 is out of range"),
        ({"private": 1.5}, "private: 1.5 is out of range"),
    ],
)
def test_what_cannot_be_fitted(log: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        fit(data.open(log), **{"table": "item", "rows": 20, "progress": quiet, **settings})


# -- a run with it ---------------------------------------------------------------------------------


def run_with(log: Path, path: Path, run_dir: Path, **changes: Any) -> Run:
    tables = TableChoices(
        overrides=(Override(names=("item",), addressing={"name": "learned", "file": str(path)}),)
    )
    return small_run(log, run_dir, batch_size=128, tables=tables, **changes)


def test_a_run_keeps_its_map_and_judges_no_row_of_the_fit(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "item.map"
    found = fit(data.open(log), "item", 20, quiet, share=0.3)
    found.save(path)
    run = run_with(log, path, tmp_path / "run", loop=Loop(epochs=1))
    results = train(run)
    judged = sum(one["examples"] for one in results["progressive"])
    assert judged == ROWS * 8 // 10 - -(-found.fitted // 128) * 128  # whole batches
    lines = [line for line in read(tmp_path / "run") if line["event"] == "train"]
    begun = [(line["step"] - 1) * 128 >= found.fitted for line in lines]  # its last batch tells
    assert [("ne" in line) for line in lines] == begun and len(set(begun)) == 2
    assert all(line["loss"] > 0 for line in lines)
    settled = Run.load(tmp_path / "run" / "run.toml")
    assert settled.tables.sizes["item"]["digest"] == found.digest
    path.unlink()  # nothing outside the run is needed
    shutil.move(tmp_path / "run", tmp_path / "moved")
    restored = restore(tmp_path / "moved")
    (tables,) = tables_of(restored.model)
    assert tables.record("item").rows == 20
    ids = torch.arange(len(found.row_S))
    assert torch.equal(tables.specs[0].addressing.rows_of(ids)[0], found.row_S.long())
    more = dataclasses.replace(run, run_dir=str(tmp_path / "moved"), loop=Loop(epochs=2))
    assert Trainer(more, resume=True).job.run.tables.sizes["item"]["file"] == str(
        tmp_path / "moved" / "maps" / "item"
    )
    train(more, resume=True)
    warm = dataclasses.replace(
        run, run_dir=str(tmp_path / "warm"), init_from=str(tmp_path / "moved")
    )
    assert train(warm)["step"] > 0 and (tmp_path / "warm" / "maps" / "item").is_file()
    (tmp_path / "moved" / "maps" / "item").unlink()
    with pytest.raises(UserError, match="maps/item: No such file"):
        restore(tmp_path / "moved")
    with pytest.raises(
        UserError,
        match="^tables.overrides.0..addressing, table 'item': file: .*maps/item: No such file",
    ):
        train(
            dataclasses.replace(
                warm, run_dir=str(tmp_path / "plain"), tables=run.tables.unaddressed
            )
        )


def test_all_rows_of_another_day_are_judged(log: Path, tmp_path: Path) -> None:
    """A run that goes on with a map, once on the log of the fit and once on the next day's."""
    fit(data.open(log), "item", 20, quiet, share=0.3).save(tmp_path / "item.map")
    train(run_with(log, tmp_path / "item.map", tmp_path / "run"))
    random, rows = np.random.default_rng(1), 2000
    columns = {
        "ts": ROWS + np.arange(rows),
        "item": random.integers(0, 40, rows),
        "page": np.zeros(rows, int),
    }
    pq.write_table(
        pa.table(columns | {"click": random.integers(0, 2, rows)}), tmp_path / "next.parquet"
    )
    data.prepare(
        [tmp_path / "next.parquet"], tmp_path / "next", schema=Transforms.load(tmp_path / "run")
    )
    judged = {}
    for name, place in (("same", log), ("next", tmp_path / "next")):
        run = run_with(
            place, tmp_path / "item.map", tmp_path / f"on-{name}", init_from=str(tmp_path / "run")
        )
        judged[name] = sum(one["examples"] for one in train(run)["progressive"])
    assert (
        judged["next"] == data.open(tmp_path / "next").rows()
        and judged["same"] < data.open(log).rows()
    )
    # and one that does not go on with another
    for place, is_told in ((log, False), (tmp_path / "next", True)):
        said: list[str] = []
        run = run_with(place, tmp_path / "item.map", tmp_path / f"alone-{is_told}")
        train(run, listener=lambda event, values, said=said: said.append(values.get("text", "")))  # type: ignore[misc]
        assert any("a map of ids was fitted to another log; if" in text for text in said) == is_told


def test_shuffled_rows_are_not_judged(log: Path, tmp_path: Path) -> None:
    path, said = tmp_path / "item.map", []
    fit(data.open(log), "item", 20, quiet, share=0.3).save(path)
    run = run_with(
        log, path, tmp_path / "run", data=Data(path=str(log), batch_size=128, shuffle=True)
    )
    results = train(run, listener=lambda event, values: said.append(values.get("text", "")))
    assert not results["progressive"] and not any(
        "ne" in line for line in read(tmp_path / "run") if line["event"] == "train"
    )
    assert any("metrics of the first epoch: left out" in text for text in said)


def test_a_map_of_another_vocabulary_is_refused(log: Path, tmp_path: Path) -> None:
    found = fit(data.open(log), "item", 20, quiet)
    for change, told in (
        ({"vocabulary": "0" * 64}, "was fitted to another vocabulary"),
        ({"row_S": torch.cat([found.row_S, found.row_S])}, "maps .* ids, and the log has"),
    ):
        dataclasses.replace(found, **change).save(tmp_path / "item.map")  # type: ignore[arg-type]
        with pytest.raises(
            UserError, match=f"overrides.0..addressing, table 'item': file: .*item.map {told}"
        ):
            train(run_with(log, tmp_path / "item.map", tmp_path / "run"))
    with pytest.raises(UserError, match="learned: the log's ids are hashes"):
        learned.Config(file=str(tmp_path / "item.map")).build(Numbering(9, "hash"))


def test_ids_that_came_later_share_rows_by_their_hash(tmp_path: Path) -> None:
    row_S = torch.tensor([0, 1, 2, 3, 3, 4], dtype=torch.int32)
    Map(row_S, 5, 3, 10, "").save(tmp_path / "m")
    rows_N = (
        learned.Config(file=str(tmp_path / "m")).build(Numbering(50)).rows_of(torch.arange(50))[0]
    )
    assert torch.equal(rows_N[:6], row_S.long())
    assert set(rows_N[6:].tolist()) == {3, 4}

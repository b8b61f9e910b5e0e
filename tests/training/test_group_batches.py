from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.features.schema import Cluster, Column, Encoding, Schema, Split
from sparrow.losses import bce, listwise, pairwise
from sparrow.models import dlrm
from sparrow.trained.run import Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, train
from tests.runs import small_run

SCHEMA = Schema(
    columns={
        "label": Column(kind="label"),
        "request": Column(kind="group"),
        "session": Column(kind="session"),
        "user": Column(kind="categorical", table="user"),
        "item": Column(kind="categorical", table="item"),
    },
    encodings={"user": Encoding(), "item": Encoding()},
    split=Split(by="ratio"),
)


def prepared(
    place: Path,
    schema: Schema = SCHEMA,
    *,
    mixed: bool = False,
    requests: int = 1500,
    signal: float = 2.0,
) -> Path:
    """Requests of four items, one of which is clicked: which, its appeal says. Users click for
    reasons of their own.
    """
    random = np.random.default_rng(0)
    request = np.arange(4 * requests) // 4
    user, item = random.integers(0, 30, requests)[request], random.integers(0, 25, 4 * requests)
    appeal = np.linspace(-signal, signal, 25)[item] + random.gumbel(size=len(item))
    best = appeal.reshape(-1, 4).argmax(1)
    clicks = (np.arange(4) == best[:, None]) & (
        random.random(requests) < 0.1 + 0.8 * (user[::4] % 2)
    )[:, None]
    columns = {
        "label": clicks.ravel().astype(int),
        "request": request,
        "session": user,
        "user": user,
        "item": item,
    }
    order = random.permutation(len(request)) if mixed else slice(None)
    pq.write_table(
        pa.table({name: column[order] for name, column in columns.items()}), place / "log.parquet"
    )
    return data.prepare(
        [place / "log.parquet"], place / "prepared", schema=schema, overwrite=True
    ).out


def fitted(log: Path, run_dir: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """Results and notes of a run with another loss."""
    notes: list[str] = []
    run = small_run(log, run_dir, batch_size=128, loop=Loop(epochs=3), **changes)
    found = train(
        run, overwrite=True, listener=lambda event, values: notes.append(values.get("text", ""))
    )
    return found, [note for note in notes if note.startswith("loss: ")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """The log, and what a run with the plain loss finds and says."""
    log = prepared(tmp_path_factory.mktemp("plain"))
    return log, *fitted(log, log.parent / "run")


@pytest.mark.parametrize(
    "loss",
    [pairwise.Config(), listwise.Config(), pairwise.Config(bce=0.0), listwise.Config(bce=0.0)],
)
def test_a_loss_that_compares_orders_the_rows_of_a_group(
    plain: tuple[Path, dict[str, Any], list[str]], tmp_path: Path, loss: Any
) -> None:
    log, of_plain, none = plain
    found, notes = fitted(log, tmp_path / "run", loss=loss)
    assert (
        found["valid"]["gauc"] > 0.7
        and abs(found["valid"]["gauc"] - of_plain["valid"]["gauc"]) < 0.03
    )
    if loss.bce:
        assert 0.9 < found["valid"]["calibration"] < 1.1
    else:  # it learns nothing of what all rows of a request have in common
        assert found["valid"]["ne"] > of_plain["valid"]["ne"] + 0.05
    assert none == notes == []  # requests stand side by side, and 4 divides the rows of a row group
    again = Run.load(tmp_path / "run" / "run.toml")
    assert again.loss == loss and restore(tmp_path / "run").run.loss == loss
    assert train(again, resume=True) == found


@pytest.mark.parametrize("loss", [pairwise.Config(), listwise.Config()])
def test_a_coin_is_not_ordered(tmp_path: Path, loss: Any) -> None:
    found, _ = fitted(prepared(tmp_path, signal=0.0), tmp_path / "run", loss=loss)
    assert 0.4 < found["valid"]["gauc"] < 0.6


def test_groups_in_pieces_are_said(tmp_path: Path) -> None:
    _, (note,) = fitted(prepared(tmp_path, mixed=True), tmp_path / "run", loss=pairwise.Config())
    told = (
        r"loss: [\d,]+ of 1,\d+ groups among 4,\d+ training rows are in pieces, each compared by"
        r" itself; prepare "
    )
    assert re.match(told + "with --cluster-by request puts rows side by side, a larger", note)
    side = dataclasses.replace(SCHEMA, cluster=Cluster(by="request", hours=0.0))
    assert (
        fitted(prepared(tmp_path, side, mixed=True), tmp_path / "run", loss=pairwise.Config())[1]
        == []
    )


def test_a_clustered_logs_batches_stay_as_they_are(tmp_path: Path) -> None:
    log = prepared(tmp_path, dataclasses.replace(SCHEMA, cluster=Cluster(by="session", hours=0.0)))
    one, other = (
        Trainer(small_run(log, tmp_path / name, loss=loss)).job.feed.loader
        for name, loss in (("a", bce.Config()), ("b", listwise.Config()))
    )
    for mine, its in zip(one, other, strict=True):
        assert mine.session_B.tolist() == its.session_B.tolist()  # type: ignore[union-attr]
        assert len(mine.session_B.unique()) * 4 == mine.batch_size  # type: ignore[union-attr,arg-type]


def test_what_does_not_fit_is_refused(prepared: Path, tmp_path: Path) -> None:
    log = data.open(prepared)
    columns = {
        name: column for name, column in log.schema.columns.items() if column.kind != "group"
    }
    bare = tmp_path / "bare"
    data.prepare(
        [prepared.parent / "log.parquet"],
        bare,
        schema=dataclasses.replace(log.schema, columns=columns),
    )
    with pytest.raises(
        UserError,
        match=r"loss\.name: 'listwise' compares the rows of a group, and the log has no col",
    ):
        Trainer(small_run(bare, tmp_path / "run", loss=listwise.Config()))
    with pytest.raises(
        UserError,
        match=r"compile: not with dropout yet; leave compile out, or set model\.dropout to 0",
    ):
        Trainer(small_run(prepared, tmp_path / "run", model=dlrm.Config(dropout=0.1), compile=True))
    with pytest.raises(
        UserError, match=r"loss\.weights\.clck: no label of the log; .*leave it out"
    ):
        Trainer(small_run(prepared, tmp_path / "run", loss=bce.Config(weights={"clck": 2.0})))

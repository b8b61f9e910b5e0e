"""Ranks that see a shared folder differently: rank 0 decides what there is to go on from."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.trained.run import Run
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
SETTINGS: dict[str, Any] = {
    "data.batch_size": 500,
    "model.dim": 4,
    "model.deep": [4],
    "sharding.plan": "row_wise",
}
# a step is saved twice
SETTINGS |= {"checkpoint.every": 2, "loop.evaluate_every": 2, "loop.max_steps": 6}


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rank_that_sees_late_goes_on_like_the_others(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, background: bool
) -> None:
    settings = {**SETTINGS, "checkpoint.background": background}
    ranks(2).run(cases.fit, str(prepared), str(tmp_path / "plain"), settings, True)
    found = ranks(2).run(
        cases.fit_with_a_stale_view, str(prepared), str(tmp_path / "stale"), settings, 0.1
    )
    assert found == ["", ""]
    plain, stale = (
        sorted((tmp_path / name / "checkpoints").glob("step-*/*")) for name in ("plain", "stale")
    )
    assert [f.parts[-2:] for f in plain] == [f.parts[-2:] for f in stale] and len(plain) > 4
    for one, other in zip(plain, stale, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_rank_that_never_sees_a_checkpoint_says_so(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    found = ranks(2).run(
        cases.fit_with_a_stale_view, str(prepared), str(tmp_path / "run"), SETTINGS, 1e9
    )
    told = (
        r"/step-\d+/manifest.json: rank 0 sees it, and rank 1 has not for 2 s; use a folder that"
        r" all ranks share"
    )
    assert all(re.search(told, one) for one in found), found


def test_a_rank_with_a_folder_of_its_own_says_so(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """Before it trains, even where an earlier run left its files."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".lock").write_text("of an earlier run")
    elsewhere = {**SETTINGS, "run_dir": str(tmp_path / "other"), "patience_s": 0.5}
    found = ranks(2).run(cases.refused, str(prepared), str(tmp_path / "run"), [SETTINGS, elsewhere])
    told = (
        f"{tmp_path}/other/.lock: rank 0 sees it, and rank 1 has not for 0.5 s; use a folder that"
        " all ranks share"
    )
    assert set(found) == {told}


def test_init_from_is_the_same_run_on_all_ranks(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    for seed in (0, 1):
        ranks(2).run(
            cases.fit, str(prepared), str(tmp_path / f"{seed}"), {**SETTINGS, "seed": seed}, False
        )
    settings = [{**SETTINGS, "init_from": str(tmp_path / f"{seed}")} for seed in (0, 1)]
    found = ranks(2).run(cases.refused, str(prepared), str(tmp_path / "run"), settings)
    assert all(
        re.search('init_from: "[0-9a-f]+" on rank 0, "[0-9a-f]+" on rank 1', one) for one in found
    ), found
    assert ranks(2).run(cases.refused, str(prepared), str(tmp_path / "run"), [settings[0]] * 2) == [
        "",
        "",
    ]


def test_a_rank_waits_for_what_it_sees_late_of_init_from(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    ranks(2).run(cases.fit, str(prepared), str(tmp_path / "first"), SETTINGS, False)
    assert list(tmp_path.glob("first/vocabulary/*"))
    settings = [{**SETTINGS, "init_from": str(tmp_path / name)} for name in ("first", "late")]
    settings[1]["late"] = str(tmp_path / "first")
    assert ranks(2).run(cases.refused, str(prepared), str(tmp_path / "run"), settings) == ["", ""]


def test_a_rank_that_does_not_see_the_settings_is_told(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """`--resume` without them: the run's own count."""
    ranks(2).run(cases.fit, str(prepared), str(tmp_path / "run"), SETTINGS, False)
    (tmp_path / "late").mkdir()
    for name in ("checkpoints", ".lock"):  # all but run.toml
        (tmp_path / "late" / name).symlink_to(tmp_path / "run" / name)
    commands = [
        ["--run_dir", str(tmp_path / name), "--resume", "--loop.max_steps", "8"]
        for name in ("run", "late")
    ]
    assert ranks(2).run(cases.commanded, [[str(prepared), *command] for command in commands]) == [
        "",
        "",
    ]
    run = Run.load(tmp_path / "run" / "run.toml")
    assert (run.model.dim, run.loop.max_steps) == (4, 8)  # type: ignore[attr-defined]
    assert (
        sorted(path.name for path in tmp_path.glob("run/checkpoints/step-*"))[-1]
        == "step-000000008"
    )


@pytest.mark.parametrize("folder", ["", "checkpoints"])
def test_a_rank_that_cannot_write_is_named_before_any_work(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, folder: str
) -> None:
    """Where something is in the way of its file: tests run as a user to whom no folder is
    closed.
    """
    settings: dict[str, Any] = {"model.name": "blend", "model.members": 2, "model.trees": 20}
    settings |= {"data.batch_size": 500, "loop.max_steps": 2}
    if folder:  # a run that goes on
        ranks(3).run(cases.fit, str(prepared), str(tmp_path / "run"), settings, False)
        settings["loop.max_steps"] = 3
    place = tmp_path / "run" / folder
    (place / ".written-by-rank-1").mkdir(parents=True)
    if not folder:
        (tmp_path / "run" / ".lock").touch()
    before = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    found = ranks(3).run(
        cases.refused_fit, str(prepared), str(tmp_path / "run"), settings, bool(folder)
    )
    lines = {line for line, _ in found}
    remedy = "give its user the right to, make room, or choose another --run_dir"
    told = (
        f"rank 1 on {socket.gethostname()}: {place}: cannot be written (Is a directory); {remedy}"
    )
    assert lines == {told} and not any(fits for _, fits in found)
    assert sorted((tmp_path / "run" / "checkpoints").glob("step-*")) == before
    (place / ".written-by-rank-1").rmdir()
    assert {
        line
        for line, _ in ranks(3).run(
            cases.refused_fit, str(prepared), str(tmp_path / "run"), settings, True
        )
    } == {""}
    assert not list((tmp_path / "run").rglob(".written-by-rank-*"))


def test_a_rank_without_room_for_blocks_is_named(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "ssd").mkdir()
    settings = [
        {**SETTINGS, "tables.tier.name": "ssd", "tiers.folder": str(tmp_path / name)}
        for name in ("ssd", "file")
    ]
    found = ranks(2).run(cases.refused, str(prepared), str(tmp_path / "run"), settings)
    (line,) = set(found)
    assert line.startswith(
        f"rank 1 on {socket.gethostname()}: {tmp_path}/file: no folder can be made"
    ), line
    assert line.endswith("name another folder with --tiers.folder")


def test_ranks_begin_tables_with_the_same_vectors(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, log: Path
) -> None:
    """Each reads the file by itself, and a folder may be another one on another host."""
    ids = pq.read_table(log, columns=["user"])["user"].unique()
    vectors = [np.full((len(ids), 4), x, np.float32) for x in (0, 1)]
    places = []
    for i, x_ND in enumerate(vectors):
        places.append(tmp_path / f"vectors-{i}.parquet")
        pq.write_table(
            pa.table({"user": ids, "v": pa.array(list(x_ND), pa.list_(pa.float32()))}), places[-1]
        )
    settings = [{**SETTINGS, "tables.init": {"user": str(places[0])}}] * 2
    assert set(ranks(2).run(cases.refused, str(prepared), str(tmp_path / "same"), settings)) == {""}
    swapped = {**settings[1], "swap": {str(places[0]): str(places[1])}}
    (line,) = set(
        ranks(2).run(cases.refused, str(prepared), str(tmp_path / "run"), [settings[0], swapped])
    )
    assert line.startswith("the ranks do not run the same job: what tables.init.user holds: "), line

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparrow import data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.embeddings import Component
from sparrow.embeddings.spec import TIERS, in_memory
from sparrow.extensions.tiers import host, ssd
from sparrow.extensions.tiers.claims import Note
from sparrow.extensions.tiers.disk import check_disks
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.reuse import tables_for
from sparrow.kernels.block_io import Layout
from sparrow.trained.run import Checkpoints
from sparrow.training import train
from sparrow.training.preflight import estimate
from tests.runs import on_disk, small_run


def test_disks_must_have_room(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For rows that may learn, and for as many checkpoints as are kept; of tables in memory nothing
    is asked.
    """
    run = on_disk(small_run(prepared, tmp_path / "run"), tmp_path / "disk")
    dataset = data.open(prepared)
    free = {"/": 10**12}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free["/"]))
    large = Component(name="t", rows=10**9, dim=16, tier=ssd.Config())
    check_disks(replace(run, checkpoint=Checkpoints(keep=1)), [large], dataset)
    free["/"] = 2 * 10**10
    told = (
        r"run: checkpoints need up to \d\d\.\d\d GB, and 20.00 GB are free or have the run; lower"
        r" checkpoint.keep, or"
    )
    with pytest.raises(UserError, match=told):
        check_disks(run, [large], dataset)
    check_disks(run, [replace(large, tier=in_memory())], dataset)
    free["/"] = 10**6
    with pytest.raises(
        UserError,
        match=(
            "disk: rows of tables on an SSD, and their checkpoints, need up to .* name another"
            " folder with --tiers.folder"
        ),
    ):
        check_disks(run, [replace(large, rows=10**5)], dataset)


def test_by_default_a_small_table_has_a_frame_for_each_row() -> None:
    """Its rows of batches under way would find none; of a large one a tenth have frames."""
    for rows, frames in ((311, 320), (65_536, 65_536), (100_000, 65_536), (10**7, 10**6)):
        found = tier_frames(Component(name="t", rows=rows, dim=16, tier=ssd.Config()), rows)[0]
        assert frames == found


def test_kept_checkpoints_need_what_changed_between_them(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the rows and the best one. Hosts divide it."""
    run = on_disk(small_run(prepared, tmp_path / "run"), tmp_path / "disk")
    dataset, needs = data.open(prepared), list[float]()
    component = Component(name="t", rows=10**9, dim=16, tier=ssd.Config())
    (tmp_path / "disk").mkdir()
    for every, hosts in ((None, 1), (2, 1), (2, 4)):
        low, high = 0, 2**40
        while high - low > 1:
            size = (low + high) // 2
            monkeypatch.setattr(shutil, "disk_usage", lambda place, size=size: free_of(place, size))
            try:
                check_disks(
                    replace(run, checkpoint=Checkpoints(every=every, keep=3)),
                    [component],
                    dataset,
                    hosts,
                )
                high = size
            except UserError:
                low = size
        needs.append(high)
    used = dataset.first(256).ids.values_N.numel() / dataset.first(256).batch_size
    epoch, step = (
        1.1 * 4096 * used * rows for rows in (dataset.rows("train"), run.data.batch_size)
    )
    assert run.loop.max_steps is None and run.loop.epochs == 1
    assert needs[0] == pytest.approx(6 * epoch, rel=1e-6)
    assert needs[1] == pytest.approx(2 * epoch + 4 * 2 * step, rel=1e-6)
    assert needs[2] == pytest.approx(needs[1] / 4, rel=1e-6)


def free_of(place: Path, size: int) -> SimpleNamespace:
    """As much as it says for blocks, and enough for what is in the run directory."""
    return SimpleNamespace(
        free=10**15 if place.name != "disk" and "disk" not in str(place) else size
    )


def test_what_a_run_has_counts_as_free(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the disk of `tiers.folder`: a run that goes on needs no room twice."""
    disk, place = tmp_path / "disk", tmp_path / "run"
    run = on_disk(small_run(prepared, place), disk)
    table, dataset = Component(name="t", rows=10**4, dim=16, tier=ssd.Config()), data.open(prepared)
    of = {"here": disk / "run-1", "elsewhere": tmp_path / "run-1"}
    for folder in (*of.values(), place / "checkpoints" / "step-1"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * (20 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    for which in of:
        Note(name="run-1", folders=[str(of[which])], inode=place.stat().st_ino).write(place)
        if which == "here":
            check_disks(run, [table], dataset)
        else:
            with pytest.raises(
                UserError,
                match=r"disk: rows .* need up to \d+\.\d\d [MG]B, and 0.00 MB are free or have",
            ):
                check_disks(run, [table], dataset)


def test_checkpoints_with_all_rows_share_no_blocks(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all rows of each are in the run directory."""
    run = on_disk(small_run(prepared, tmp_path / "run"), tmp_path / "disk")
    component = Component(name="t", rows=10**9, dim=16, tier=ssd.Config())
    run, free = (
        on_disk(
            replace(run, checkpoint=Checkpoints(keep=1)), tmp_path / "disk", full_checkpoints=True
        ),
        3 * component.rows * component.bytes_row,
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    check_disks(run, [component], data.open(prepared))
    free -= 1
    with pytest.raises(UserError, match="run: checkpoints need up to"):
        check_disks(run, [component], data.open(prepared))


def test_checkpoints_with_all_rows_in_the_background_are_refused(
    prepared: Path, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(background=True)
    over = on_disk(small_run(prepared, tmp_path / "run", checkpoint=checkpoints), tmp_path / "disk")
    run = on_disk(over, tmp_path / "disk", full_checkpoints=True)
    for one, tier in ((run, ssd.Config()), (over, host.Config(beneath=ssd.Config()))):
        told = "checkpoint.background: checkpoints with all rows of tables on an SSD are not"
        with pytest.raises(UserError, match=told):
            train(replace(one, tables=replace(run.tables, tier=tier)))


PEAK = """
import sys, torch
from pathlib import Path
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.stores import saved as blocks
from sparrow.embeddings import Component
from sparrow.embeddings.spec import Placement
from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.extensions.tiers import disk

def now(name):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

def peak(do, bound):
    open("/proc/self/clear_refs", "w").write("5")  # it begins here
    before = now("VmRSS")
    done = do()
    print((now("VmHWM") - before) / bound)
    return done

component = Component(name="t", rows=30_000_000, dim=4, tier=ssd.Config(fraction=0.1))
store = SsdStore(component, component.rows, 4, Placement(folder=Path(sys.argv[1])))
store.name_file(Path(sys.argv[1]))
tag_F, frames = store.get_buffer("tag"), len(store.get_buffer("tag"))
tag_F[: store.ways] = torch.arange(store.ways)
tag_F[: store.ways][torch.rand(store.ways) < 0.25] = -1  # rows of the last sets fill these
store._stand_by(torch.arange(store.ways, frames), 0)
for of in store._held.values():
    of.zero_()
layout = store._blocks.layout
bound = disk.SAVED_ROW * frames + disk.SAVED_BLOCK * layout.blocks
saved = peak(lambda: store.save(seed=0, rows=(0, component.rows), columns=(0, 4)), bound)
peak(lambda: blocks.write_rows(Path(sys.argv[1]) / "newer", saved), disk.SAVED_PIECES)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems do not tell the peak"
)
def test_what_a_checkpoint_takes_of_memory(tmp_path: Path) -> None:
    """With what takes most: a quarter of the frames empty, and all others full. Bounds are neither
    broken nor idle.
    """
    # what is freed goes back to the system at once
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, env=exact
    )
    assert done.returncode == 0, done.stderr
    saving, writing = map(float, done.stdout.split())
    assert 0.6 < saving < 1 and 0.4 < writing < 1


def test_preflight_counts_rows_beneath_frames_of_a_device(prepared: Path, tmp_path: Path) -> None:
    """A byte more each, which says whether one was ever there; of the device there are frames."""
    run, dataset = small_run(prepared, tmp_path / "run"), data.open(prepared)
    memory, host = (
        estimate(replace(run, tables=replace(run.tables, tier=TIERS.config(name)())), dataset).host
        for name in ("memory", "host")
    )
    rows = sum(of.rows or 0 for of in dataset.schema.encodings.values())
    assert "rows beneath frames" not in memory
    assert host["rows beneath frames"] == memory["tables"] + rows
    # a frame for each row of so small tables, and what it knows
    assert host["tables"] >= memory["tables"] + 8 * rows


def test_counts_of_rows_are_in_each_checkpoint(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lfu a byte for each row of the table, in as many as are kept, with the best and the one
    that is written.
    """
    run, needs = (
        on_disk(small_run(prepared, tmp_path / "run"), tmp_path / "disk"),
        list[int](),
    )
    for policy in ("lru", "lfu"):
        component, low, high = (
            Component(name="t", rows=10**8, dim=16, tier=ssd.Config(policy=policy)),
            0,
            2**50,
        )
        while high - low > 1:
            size = (low + high) // 2
            monkeypatch.setattr(
                shutil, "disk_usage", lambda place, size=size: SimpleNamespace(free=size)
            )
            try:
                check_disks(
                    replace(run, checkpoint=Checkpoints(keep=3)), [component], data.open(prepared)
                )
                high = size
            except UserError:
                low = size
        needs.append(high)
    assert needs[1] - needs[0] == 5 * component.rows


def test_preflight_counts_checkpoints_and_counts_of_rows(prepared: Path, tmp_path: Path) -> None:
    """With lfu a byte for each row. A checkpoint takes what docs/memory.md says, of the two tables
    that need most.
    """
    run, dataset = (
        on_disk(small_run(prepared, tmp_path / "run"), tmp_path / "disk"),
        data.open(prepared),
    )
    found = {}
    for policy in ("lru", "lfu"):
        tier = ssd.Config(policy=policy)
        found[policy] = estimate(replace(run, tables=replace(run.tables, tier=tier)), dataset).host
    memory = estimate(run, dataset).host
    rows = sum(of.rows or 0 for of in dataset.schema.encodings.values())
    assert found["lfu"]["tables"] - found["lru"]["tables"] == rows
    run = replace(run, tables=replace(run.tables, tier=ssd.Config()))
    parts = [
        part for of in tables_for(run, dataset) for spec in of.specs for part in spec.components
    ]
    blocks = [Layout(fields=part.fields, rows=part.rows).blocks for part in parts]
    frames = [sum(tier_frames(part, part.rows)) for part in parts]
    each = sorted(14 * frame + 24 * block for frame, block in zip(frames, blocks, strict=True))
    kept = 4 * (run.checkpoint.keep + 1) * sum(blocks)
    assert found["lru"]["rows on an SSD"] == sum(each[-2:]) + (36 << 20)
    assert found["lru"]["blocks of checkpoints"] == kept
    assert not {"rows on an SSD", "blocks of checkpoints"} & memory.keys()
    assert len(set(frames)) > 2


@pytest.mark.parametrize("wrong", ["a file in its path", "no folders there", "not allowed"])
@pytest.mark.parametrize("which", ["ssd", "run_dir"])
def test_a_folder_that_cannot_be_made_is_named(
    prepared: Path, tmp_path: Path, wrong: str, which: str
) -> None:
    """And not the room on its disk: where nothing can be made, none is free."""
    at, why = {
        "a file in its path": (tmp_path / "file", "Not a directory"),
        "no folders there": (Path("/proc"), "No such file or directory"),
        "not allowed": (tmp_path / "closed", "Permission denied"),
    }[wrong]
    if wrong == "a file in its path":
        at.write_text("")
    if wrong == "not allowed":
        at.mkdir(mode=0o500)
    if wrong == "no folders there" and not at.exists():
        pytest.skip("there is no such place")
    if wrong == "not allowed" and os.geteuid() == 0:
        pytest.skip("root may do all")
    place = {"run_dir": tmp_path / "run", "ssd": tmp_path / "disk"} | {which: at / "sparrow" / "x"}
    run = on_disk(small_run(prepared, place["run_dir"]), place["ssd"])
    remedy = {
        "ssd": "name another folder with --tiers.folder",
        "run_dir": "name another --run_dir",
    }[which]
    said = re.escape(f"{at}/sparrow/x: no folder can be made in {at} ({why}); {remedy}")
    with pytest.raises(UserError, match=f"^{said}$"):
        train(replace(run, tables=replace(run.tables, tier=ssd.Config())))
    # nothing was made to find out
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "closed"}


def test_a_tier_without_a_folder_asks_for_one(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of the command line, and for tables that a plan puts there too."""
    plan = tmp_path / "some.plan.toml"
    plan.write_text('tiers = { user = { name = "ssd" } }\n')
    start = ["train", str(prepared), "--run_dir", str(tmp_path / "run")]
    for flags, tables in (
        (["--tables.tier.name", "ssd"], "item"),
        (["--sharding.plan", str(plan)], "for user, and"),
    ):
        assert main([*start, *flags]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and tables in said
        assert said.endswith("and no folder on an SSD is named; give --tiers.folder DIR\n")
    assert not (tmp_path / "run").exists()

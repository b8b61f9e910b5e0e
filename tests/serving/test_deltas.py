from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.embeddings import TableChoices
from sparrow.embeddings.addressing import hashed, quotient_remainder
from sparrow.embeddings.choices import Override
from sparrow.features.schema import Encoding
from sparrow.features.transforms import Transforms
from sparrow.kernels.formats import fp16
from sparrow.models import dlrm
from sparrow.serving import Scorer, load
from sparrow.serving.deltas import compact, open_stack
from sparrow.serving.export import export
from sparrow.serving.folder import FORMAT, open_folder
from sparrow.serving.rows import ROW, tensors_of
from sparrow.trained.build import tables_of
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.embeddings.test_members import APART, CHOICES, TABLES, TOGETHER, chosen
from tests.runs import small_run
from tests.serving.test_export import contents

ALONE_CHOICES = [name for name in CHOICES if name not in APART]


@dataclass
class Days:
    """Three days: a full folder of each, and the deltas of the second and the third, whose log has
    new ids.
    """

    place: Path
    logs: tuple[Path, ...]

    def run(self, day: int) -> Path:
        return self.place / f"run{day}"

    def full(self, day: int) -> Path:
        return self.place / f"full{day}"

    def delta(self, day: int) -> Path:
        return self.place / f"delta{day}"

    def rows(self, scorer: Scorer) -> list[dict[str, Any]]:
        """Rows of the last day's log."""
        found: list[dict[str, Any]] = pq.read_table(self.logs[2]).slice(2000).select(
            list(scorer.encoder.sources)
        ).to_pylist()  # fmt: skip
        return found


def trained(place: Path, logs: tuple[Path, ...], **changes: Any) -> Days:
    """A model that learns each day from where the day before ended, but for the exports."""
    days = Days(place, logs)
    for day, log in enumerate(logs):
        prepared = place / f"prepared{logs.index(log)}"
        if not day:
            data.prepare([log], prepared)
        elif log not in logs[:day]:
            data.prepare([log], prepared, schema=Transforms.load(days.run(day - 1)), grow=True)
        before = {} if not day else {"init_from": str(days.run(day - 1))}
        few = {"loop": Loop(max_steps=2), "batch_size": 16} if day else {"loop": Loop(max_steps=4)}
        train(small_run(prepared, days.run(day), **{**few, **before, **changes}))
    return days


def exported(days: Days) -> Days:
    for day, log in enumerate(days.logs):
        export(days.run(day), days.full(day), [log])
        if day:
            base = [days.full(0), *map(days.delta, range(1, day))]
            export(days.run(day), days.delta(day), [log], base=base)
    return days


@pytest.fixture(scope="module")
def days(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Days:
    place = tmp_path_factory.mktemp("days")
    later = place / "later.parquet"
    generate(later, rows=4000, users=90, items=60, categorical=3, numeric=3, seed=6)
    shutil.copy(log, place / "log.parquet")
    return exported(trained(place, (place / "log.parquet", place / "log.parquet", later)))


def assert_same(folder: Path, expected: Path) -> None:
    found, wanted = contents(folder), contents(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in found if found[name] != wanted[name]] == []
    assert open_folder(folder).digest == open_folder(expected).digest


# -- what a delta is -------------------------------------------------------------------------------


def test_a_delta_has_the_rows_that_differ_and_all_else(days: Days) -> None:
    """By their bytes, with new rows at the end; every other file is that of a full export."""
    grew = few = 0
    for day in (1, 2):
        files = open_folder(days.delta(day)).manifest["files"]
        assert files.keys() == open_folder(days.full(day)).manifest["files"].keys()
        for name in files:
            if not name.startswith("tables/"):
                assert (days.delta(day) / name).read_bytes() == (
                    days.full(day) / name
                ).read_bytes(), name
                continue
            old, new, delta = (
                tensors_of(of / name)
                for of in (days.full(day - 1), days.full(day), days.delta(day))
            )
            rows_U = delta.pop(ROW)
            known = len(old["weight"])
            differ = (
                (old["weight"].view(torch.int32) != new["weight"][:known].view(torch.int32))
                .any(1)
                .nonzero()[:, 0]
            )
            assert rows_U.tolist() == [*differ.tolist(), *range(known, len(new["weight"]))]
            assert torch.equal(delta["weight"], new["weight"][rows_U])
            grew += len(new["weight"]) - known
            few += 0 < len(differ) < known
    assert grew > 20 and few > 3


def test_manifests_are_a_chain(days: Days) -> None:
    full, first, second = (open_folder(of) for of in (days.full(0), days.delta(1), days.delta(2)))
    assert [of.manifest["number"] for of in (full, first, second)] == [0, 1, 2]
    assert (
        full.manifest["parent"] is None
        and first.manifest["parent"] == full.digest == full.full_digest
    )
    assert second.manifest["parent"] == first.full_digest == open_folder(days.full(1)).digest
    assert second.full_digest == open_folder(days.full(2)).digest != second.digest


def test_base_and_deltas_are_the_full_export_of_the_same_step(days: Days) -> None:
    """Scores and rows to the bit; the scorer of the base stays as it was."""
    base = load(days.full(0))
    rows = days.rows(load(days.full(2)))
    before, seen = base.score(rows), [days.full(0)]
    scorer = base
    for day in (1, 2):
        scorer = scorer.updated(days.delta(day))
        seen.append(days.delta(day))
        whole = load(days.full(day))
        for of in (scorer, load(seen[0], seen[1:])):
            assert np.array_equal(of.score(rows), whole.score(rows))
            assert of.labels == whole.labels and of.folder.path == days.delta(day)
            for mine, its in zip(tables_of(of.model), tables_of(whole.model), strict=True):
                for one, other in zip(mine.all_records(), its.all_records(), strict=True):
                    assert all(
                        torch.equal(one.fields[name], other.fields[name]) for name in other.fields
                    )
        user = {name: rows[0][name] for name in ("user", "history")}
        candidates = [{name: v for name, v in row.items() if name not in user} for row in rows[:7]]
        assert np.array_equal(scorer.rank(user, candidates), whole.rank(user, candidates))
    assert not np.array_equal(before, scorer.score(rows))
    assert np.array_equal(before, base.score(rows))


def test_readers_never_see_a_change(days: Days) -> None:
    """Threads that score with the old scorer while others are made of it, and with the new ones."""
    base = load(days.full(0))
    rows, failed, ended = days.rows(base)[:200], [], threading.Event()
    expected = base.score(rows)

    def read(scorer: Scorer) -> None:
        try:
            while not ended.is_set():
                assert np.array_equal(scorer.score(rows), expected)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(base,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert not np.array_equal(
            base.updated(days.delta(1)).updated(days.delta(2)).score(rows), expected
        )
    ended.set()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_base_is_mapped_once_and_a_first_delta_too(days: Days) -> None:
    base = load(days.full(0))
    scorer = base.updated(days.delta(1))
    for name, rows in base.stack.rows.items():
        for field, of in rows.fields.items():
            assert scorer.stack.rows[name].fields[field].data_ptr() == of.data_ptr()
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("only Linux tells what a process has mapped")
    assert str(days.delta(1) / "tables" / "item.safetensors") in mapped.read_text()


def test_the_same_delta_twice_is_once(days: Days) -> None:
    scorer = load(days.full(0), [days.delta(1), days.delta(1)])
    assert scorer.updated(days.delta(1)) is scorer
    scorer = scorer.updated(days.delta(2))
    assert scorer.updated(days.delta(1)) is scorer is scorer.updated(days.delta(2))


def test_deltas_of_another_parent_are_refused(days: Days, tmp_path: Path) -> None:
    """Out of order, of another model, a full folder: both are named, and the scorer goes on as it
    was.
    """
    base = load(days.full(0))
    rows = days.rows(base)
    before = base.score(rows)
    with pytest.raises(
        UserError, match=r"delta2: delta number 2, which .* and \S*full0 is .*apply deltas in"
    ):
        base.updated(days.delta(2))
    first, second = open_folder(days.full(1)).digest[:12], open_folder(days.full(0)).digest[:12]
    with pytest.raises(UserError, match=rf"follows the model {first}, .* is {second} \(number 0\)"):
        load(days.full(0), [days.delta(2)])
    with pytest.raises(UserError, match=r"delta1: delta number 1, .* and \S*full2 is"):
        load(days.full(2), [days.delta(1)])
    with pytest.raises(UserError, match="full1: a full folder and no delta; load it by itself"):
        base.updated(days.full(1))
    with pytest.raises(
        UserError, match="delta1: a delta, number 1; give it after the full folder it is of"
    ):
        load(days.delta(1))
    assert np.array_equal(before, base.score(rows))


def test_a_delta_that_does_not_reproduce_its_rows_changes_nothing(
    days: Days, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = load(days.full(0))
    shutil.copytree(days.delta(1), tmp_path / "delta")
    dense = safetensors.torch.load_file(tmp_path / "delta" / "dense.safetensors")
    safetensors.torch.save_file(
        {n: of * 1.1 if of.is_floating_point() else of for n, of in dense.items()},
        tmp_path / "delta" / "dense.safetensors",
    )
    monkeypatch.setattr("sparrow.serving.folder._unlike", lambda path, size, digest, is_known: "")
    rows = days.rows(base)
    before = base.score(rows)
    with pytest.raises(UserError, match=r"check.parquet: row \d+: the score"):
        base.updated(tmp_path / "delta")
    assert np.array_equal(before, base.score(rows))


# -- compaction ------------------------------------------------------------------------------------


def test_a_compaction_is_the_full_export_to_the_byte(days: Days, tmp_path: Path) -> None:
    """Of one delta and of two, and a delta follows the compaction of those before it."""
    compact(days.full(0), [days.delta(1)], tmp_path / "one")
    assert_same(tmp_path / "one", days.full(1))
    compact(days.full(0), [days.delta(1), days.delta(2)], tmp_path / "two")
    assert_same(tmp_path / "two", days.full(2))
    compact(tmp_path / "one", [days.delta(2)], tmp_path / "three")
    assert_same(tmp_path / "three", days.full(2))
    export(days.run(2), tmp_path / "again", [days.logs[2]], base=[tmp_path / "one"])
    assert (
        json.loads((tmp_path / "again" / "manifest.json").read_text())["whole"]
        == open_folder(days.full(2)).digest
    )
    with pytest.raises(UserError, match="full1: exists"):
        compact(days.full(0), [days.delta(1)], days.full(1))


def test_a_compaction_that_is_not_what_was_exported_gets_no_name(
    days: Days, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if memory failed between reading and writing."""
    whole = open_stack(days.full(0), [days.delta(1)])
    next(iter(whole.rows.values())).above["weight"].add_(1.0)
    monkeypatch.setattr("sparrow.serving.deltas.open_stack", lambda path, deltas: whole)
    with pytest.raises(UserError, match="out: not what it was to be, to the byte; try again"):
        compact(days.full(0), [days.delta(1)], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "names",
    [*TOGETHER, *(pytest.param((name,), marks=pytest.mark.slow) for name in ALONE_CHOICES)],
    ids=", ".join,
)
def test_every_table_has_deltas(names: tuple[str, ...], log: Path, tmp_path: Path) -> None:
    """Every addressing and format, a cache's exact rows, ids that come and go."""
    shutil.copy(log, tmp_path / "log.parquet")
    logs = (tmp_path / "log.parquet",) * 3
    days = exported(
        trained(
            tmp_path, logs, tables=chosen(names), model=dlrm.Config(dim=8, bottom=(8,), top=(8,))
        )
    )
    scorer, whole = load(days.full(0), [days.delta(1), days.delta(2)]), load(days.full(2))
    rows = pq.read_table(log).slice(5000).select(list(scorer.encoder.sources)).to_pylist()
    # products of two tables are looked up at once
    assert np.abs(scorer.score(rows) - whole.score(rows)).max() <= 1e-6
    compact(days.full(0), [days.delta(1), days.delta(2)], tmp_path / "compact")
    assert_same(tmp_path / "compact", days.full(2))
    each = dict(zip(TABLES, names * (len(TABLES) // len(names)), strict=True))
    some = {table for table, name in each.items() if "dynamic" not in name}
    sizes = [
        sum(p.stat().st_size for p in (of / "tables").iterdir() if p.name.partition(".")[0] in some)
        for of in (days.delta(1), days.full(1))
    ]
    assert sizes[0] < sizes[1] or not some


def test_quotients_grow_with_the_ids(days: Days, tmp_path: Path) -> None:
    """The rows of ids that were known stay theirs."""
    choices = TableChoices(
        overrides=(Override(names=("item", "user"), addressing={"name": "quotient_remainder"}),)
    )
    mine = exported(trained(tmp_path, (days.logs[0], days.logs[2]), tables=choices))
    compact(mine.full(0), [mine.delta(1)], tmp_path / "compact")
    assert_same(tmp_path / "compact", mine.full(1))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        (r"model.dim is 8 and was 4 ", {"model": dlrm.Config(dim=8, bottom=(8,), top=(8,))}),
        (r"tables.format.name is 'fp16' and was 'fp32' ", {"tables": TableChoices(format=fp16.Config())}),
        (r"tables.addressing.\w+ is ", {"tables": TableChoices(addressing=hashed.Config(rows=30))}),
        (r"tables.addressing.\w+ is ", {"tables": TableChoices(addressing=quotient_remainder.Config())}),
    ],
)  # fmt: skip
def test_a_model_of_another_shape_is_refused(
    says: str, changes: dict[str, Any], days: Days, prepared: Path, tmp_path: Path
) -> None:
    train(small_run(prepared, tmp_path / "run", loop=Loop(max_steps=1), **changes))
    with pytest.raises(UserError, match=f"run: {says}.*full0.*; export all of it, without --base"):
        export(tmp_path / "run", tmp_path / "out", [days.logs[0]], base=[days.full(0)])
    assert not (tmp_path / "out").exists()


def test_another_modulus_is_refused(days: Days, log: Path, tmp_path: Path) -> None:
    """Here the log's encoding says it, and no setting."""
    schema = data.open(days.place / "prepared0").schema
    for rows in (30, 31):
        encodings = {**schema.encodings, "user": Encoding(kind="hash", rows=rows)}
        made = data.prepare(
            [log], tmp_path / f"log{rows}", schema=dataclasses.replace(schema, encodings=encodings)
        )
        train(small_run(made.out, tmp_path / f"run{rows}", loop=Loop(max_steps=1)))
    export(tmp_path / "run30", tmp_path / "full", [log])
    with pytest.raises(
        UserError, match="number of rows of table 'user' is 31 and was 30 in .*without --base"
    ):
        export(tmp_path / "run31", tmp_path / "out", [log], base=[tmp_path / "full"])


def test_fewer_rows_are_refused(days: Days, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="number of rows of table '.*' is .* and was .* in .*full2"):
        export(days.run(0), tmp_path / "out", [days.logs[0]], base=[days.full(2)])


@pytest.mark.parametrize("base", [False, True])
def test_rows_that_are_not_finite_are_refused(
    base: bool, days: Days, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each request that meets them would fail, and none of the rows that are kept may meet them."""
    restore = export.__globals__["restore"]

    def diverged(*arguments: Any, **options: Any) -> Any:
        found = restore(*arguments, **options)
        tables_of(found.model)[0].record("user").store.read(slice(None))["weight"][3, 1] = torch.nan
        return found

    monkeypatch.setitem(export.__globals__, "restore", diverged)
    with pytest.raises(
        UserError, match="run1: row 3 of table 'user' is not finite; .* --checkpoint than step 2"
    ):
        export(days.run(1), tmp_path / "out", [days.logs[1]], base=[days.full(0)] if base else [])
    assert not (tmp_path / "out").exists()


def test_a_newer_delta_is_refused(days: Days, tmp_path: Path) -> None:
    shutil.copytree(days.delta(1), tmp_path / "delta")
    manifest = json.loads((tmp_path / "delta" / "manifest.json").read_text())
    (tmp_path / "delta" / "manifest.json").write_text(
        json.dumps({**manifest, "format": FORMAT + 1})
    )
    with pytest.raises(
        UserError, match=f"delta: format {FORMAT + 1}, this Sparrow reads {FORMAT}; install"
    ):
        load(days.full(0)).updated(tmp_path / "delta")


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_of_a_delta_is_refused(seed: int, days: Days, tmp_path: Path) -> None:
    """Thirty of each, in all files: by a scorer that goes on, by compaction, and as a base of the
    next delta.
    """
    shutil.copytree(days.delta(1), tmp_path / "delta")
    stack, random = open_stack(days.full(0)), np.random.default_rng(seed)
    files = sorted(path for path in (tmp_path / "delta").rglob("*") if path.is_file())
    for number in range(30):
        path = files[(seed * 30 + number) % len(files)]
        was = path.read_bytes()
        at = int(random.integers(len(was)))
        path.write_bytes(was[:at] + bytes([was[at] ^ 1 << int(random.integers(8))]) + was[at + 1 :])
        with pytest.raises(UserError, match="damaged|format") as told:
            stack.updated(tmp_path / "delta")
        assert str(path) in str(told.value) or path.name == "manifest.json"
        assert any(word in str(told.value) for word in ("export it again", "install a newer one"))
        if number < 2:
            for way in (
                lambda: compact(days.full(0), [tmp_path / "delta"], tmp_path / "out"),
                lambda: export(
                    days.run(2),
                    tmp_path / "out",
                    [days.logs[2]],
                    base=[days.full(0), tmp_path / "delta"],
                ),
            ):
                with pytest.raises(UserError, match="damaged|format"):
                    way()
        path.write_bytes(was)
    assert len(stack.updated(tmp_path / "delta").folders) == 2 and not (tmp_path / "out").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_nothing_of_a_folder_is_executed(days: Days) -> None:
    """Nothing is unpickled, and no program is started."""
    executing = {"pickle.find_class", "subprocess.Popen", "os.system", "os.exec"}
    executing |= {"os.posix_spawn", "os.fork"}
    pid = os.fork()  # a process keeps for ever what listens to it
    if pid == 0:
        heard = set[str]()
        sys.addaudithook(lambda event, _: heard.add(event))
        try:
            load(days.full(0), [days.delta(1), days.delta(2)])
            os._exit(0 if "open" in heard and not heard & executing else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


# -- commands --------------------------------------------------------------------------------------


def test_the_commands(days: Days, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, base, delta = str(days.logs[1]), str(days.full(0)), str(tmp_path / "delta")
    assert main(["export", str(days.run(1)), delta, "--log", log, "--base", base]) == 0
    said = capsys.readouterr().out
    assert (
        "delta number 1 of dlrm, step 2" in " ".join(said.split())
        and f'load("{base}", ["{delta}"])' in said
    )
    assert contents(tmp_path / "delta") == contents(days.delta(1))
    assert main(["compact", base, delta, str(tmp_path / "out")]) == 0
    assert "out: dlrm, step 2" in " ".join(capsys.readouterr().out.split())
    assert_same(tmp_path / "out", days.full(1))
    assert main(["compact", base, delta, str(tmp_path / "out")]) == 2
    assert "out: exists" in capsys.readouterr().err
    assert main(["compact", base, str(tmp_path / "out")]) == 2
    assert "compact: 2 folders; give the full one, at least one delta" in capsys.readouterr().err
    assert main(["compact", base, str(days.delta(2)), str(tmp_path / "no")]) == 2
    assert "apply deltas in their order" in capsys.readouterr().err

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.bits.quantize import quantize
from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.embeddings import TableChoices
from sparrow.embeddings.addressing import learned
from sparrow.embeddings.choices import Override
from sparrow.features.rows import batches
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.models import dlrm
from sparrow.serving.export import export
from sparrow.serving.scorer import CHECK, IDS, NUMBER, Scorer, load
from sparrow.trained.build import tables_of
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.embeddings.test_members import EACH_CHOICE, chosen
from tests.models.test_models import EACH, named
from tests.runs import small_run
from tests.serving.damage import raw_errors

CLOSE = 1e-6  # products of other shapes sum in another order


def served(prepared: Path, log: Path, place: Path, **changes: Any) -> Scorer:
    """A model of two steps, exported."""
    train(small_run(prepared, place / "run", **{"loop": Loop(max_steps=2), **changes}))
    export(place / "run", place / "model", [log])
    return load(place / "model")


@pytest.fixture(scope="module")
def scorer(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    return served(prepared, log, tmp_path_factory.mktemp("scorer"))


@pytest.fixture(scope="module")
def rows(log: Path, scorer: Scorer) -> list[dict[str, Any]]:
    """Rows of the end, which are not kept with the model."""
    found: list[dict[str, Any]] = (
        pq.read_table(log).slice(5900).select(list(scorer.encoder.sources)).to_pylist()
    )
    return found


def assert_as_evaluated(scorer: Scorer, run_dir: Path, log: Path) -> None:
    """Ids and numbers to the bit, scores but for the order of sums: in batches, alone, and of a
    user's candidates.
    """
    trained, table = restore(run_dir), pq.read_table(log).slice(5900)
    names = list(scorer.encoder.sources)
    rows = table.select(names).to_pylist()
    expected = trained.score_rows(table)
    assert np.abs(scorer.score(rows) - expected).max() <= CLOSE
    (batch,) = batches(
        trained.schema, trained.transforms.transform(table, training=False), len(rows)
    )
    mine = scorer.encoder.batch(rows)
    assert torch.equal(mine.dense_BC, batch.dense_BC) and torch.equal(
        mine.ids.values_N, batch.ids.values_N
    )
    for i in (0, 7):
        assert np.abs(scorer.score(rows[i : i + 1]) - expected[i]).max() <= CLOSE
    of_user = [name for name in names if name in ("user", "history", "tags", "num_1", "cat_0")]
    asked = []
    for first in (0, 3):
        user = {name: rows[first][name] for name in of_user}
        asked.append(
            (
                user,
                [
                    {n: v for n, v in row.items() if n not in user}
                    for row in rows[first : first + 4]
                ],
            )
        )
    crossed = [scorer.score([user | row for row in candidates]) for user, candidates in asked]
    for found, one, (user, candidates) in zip(scorer.rank_all(asked), crossed, asked, strict=True):
        assert (
            np.abs(found - one).max() <= CLOSE
            and np.abs(scorer.rank(user, candidates) - one).max() <= CLOSE
        )


@pytest.mark.parametrize("config", EACH, ids=named)
def test_served_is_evaluated(config: Any, prepared: Path, log: Path, tmp_path: Path) -> None:
    assert_as_evaluated(served(prepared, log, tmp_path, model=config), tmp_path / "run", log)


FAMILY = Family("sparrow.models")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "blend" else pytest.mark.slow)
        for name in FAMILY.names()
    ],
)
def test_served_is_evaluated_by_default(
    name: str, prepared: Path, log: Path, tmp_path: Path
) -> None:
    """Every model as it is without a setting."""
    assert_as_evaluated(
        served(prepared, log, tmp_path, model=FAMILY.config(name)()), tmp_path / "run", log
    )


@pytest.mark.parametrize("names", EACH_CHOICE, ids=", ".join)
def test_tables_are_served_as_they_are_evaluated(
    names: tuple[str, ...], prepared: Path, log: Path, tmp_path: Path
) -> None:
    """Every addressing and format; a cache's exact rows too. Nothing is kept that only training
    needs.
    """
    scorer = served(
        prepared,
        log,
        tmp_path,
        tables=chosen(names),
        model=dlrm.Config(dim=8, bottom=(8,), top=(8,)),
    )
    assert_as_evaluated(scorer, tmp_path / "run", log)
    for tables in tables_of(scorer.model):
        for record in tables.all_records():
            path = scorer.folder.path / "tables" / f"{record.component.name}.safetensors"
            ids = 8 + 8 + 4 + 4 if record.component.policy else 0
            whole = record.rows * (
                sum(f.bytes_row for f in record.component.format.fields(record.dim).values()) + ids
            )
            assert 0 < path.stat().st_size - whole < 600  # a header


def log_with_all_columns(tmp_path: Path, labels: int = 1) -> Path:
    """A prepared log with what the generated one lacks; the raw one is tmp_path/log.parquet."""
    random, count = np.random.default_rng(0), 3000
    x, ids = random.normal(size=count), random.integers(0, 30, count)
    lists = [[int(i) for i in random.integers(0, 30, random.integers(0, 5))] for _ in range(count)]
    columns = {
        "clicked": (random.random(count) < 0.3).astype(int), "id": ids, "x": x, "price": np.exp(x),
        "seen": [" ".join(f"i{i}" for i in of) for of in lists], "weighted": lists,
        "w": [[float(i % 3) for i in of] for of in lists], "age": random.normal(size=count),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    kinds = {
        "clicked": Column(kind="label"),
        "id": Column(kind="categorical", table="id"),
        "x": Column(kind="numeric"),
        "price": Column(kind="numeric", transform="log"),
        "seen": Column(kind="list", table="seen", pooling="sum"),
        "weighted": Column(kind="list", table="id", weights="w", max_length=3),
        "age": Column(kind="categorical", table="age", quantiles=5),
    }
    encodings = {
        "id": Encoding(kind="vocabulary"),
        "seen": Encoding(kind="hash"),
        "age": Encoding(),
    }
    if labels == 2:
        kinds["bought"] = Column(kind="label", source="id", threshold=15.0)
    split = Split(by="ratio", negatives=0.5 if labels == 1 else 1.0)
    schema = Schema(columns=kinds, encodings=encodings, split=split)
    return data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema).out


def test_labels_weights_lists_as_text_and_dropped_negatives(tmp_path: Path) -> None:
    prepared = log_with_all_columns(tmp_path)
    scorer = served(prepared, tmp_path / "log.parquet", tmp_path)
    table = pq.read_table(tmp_path / "log.parquet").slice(0, 50)
    expected = restore(tmp_path / "run").score_rows(table)
    rows = table.select(list(scorer.encoder.sources)).to_pylist()
    assert np.abs(scorer.score(rows) - expected).max() <= CLOSE
    user = {name: rows[0][name] for name in ("weighted", "w", "x")}
    crossed = [row | user for row in rows]
    assert (
        np.abs(
            scorer.rank(user, [{n: r[n] for n in r if n not in user} for r in rows])
            - scorer.score(crossed)
        ).max()
        <= CLOSE
    )


def test_threads_share_a_scorer(scorer: Scorer, rows: list[dict[str, Any]]) -> None:
    expected, failed = scorer.score(rows), []

    def work(first: int) -> None:
        try:
            for _ in range(20):
                assert np.abs(scorer.score(rows[first:]) - expected[first:]).max() <= CLOSE
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_products_look_for_what_users_share_where_it_pays(
    scorer: Scorer, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request with such columns tells what they save. Requests of unknown kinds are not
    kept for ever.
    """
    looked, was = [], scorer.encoder.crossed

    def crossed(*given: Any, shared: bool, **more: Any) -> Any:
        looked.append(shared)
        return was(*given, shared=shared, **more)

    monkeypatch.setattr(scorer.encoder, "crossed", crossed)
    user = {name: rows[0][name] for name in ("user", "num_1", "num_2", "cat_1")}
    candidates = [{n: v for n, v in row.items() if n not in user} for row in rows[:20]]
    first = scorer.rank(user, candidates)
    assert np.array_equal(scorer.rank(user, candidates), first)
    monkeypatch.setattr("sparrow.serving.scorer.WORTH", 0)
    scorer.rank(user, candidates)
    assert scorer.rank(user, []).shape == (0, 1)
    assert looked == [True, False, True, True]
    for i in range(100):
        scorer.rank({**user, f"not known {i}": 1}, candidates[:2])
    assert len(scorer._saved) <= 64


def test_nothing_that_a_server_does_not_need_is_imported(scorer: Scorer) -> None:
    program = (
        "import sys, torch; from sparrow.serving import load;"
        " load(sys.argv[1]);print(sorted({m.split('.')[0] for m in sys.modules} & {'pandas', 'ray',"
        " 'daft', 'tyro', 'rich','starlette', 'uvicorn', 'msgspec', 'prometheus_client'}),[m for m"
        " in sys.modules if m.startswith(('sparrow.training', 'sparrow.data',"
        " 'sparrow.analysis'))])"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(scorer.folder.path)], capture_output=True, text=True
    )
    assert told.stdout.strip() == "[] []", told.stderr


def test_mistakes_of_a_request(scorer: Scorer, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="column 'num_1', row 1: 'much' is no number"):
        scorer.score([rows[0], rows[1] | {"num_1": "much"}])
    with pytest.raises(
        UserError, match="request 1: 'item' is of one user and not of another; give it to all"
    ):
        scorer.rank_all([({"user": 1}, []), ({"user": 1, "item": 2}, [])])
    with pytest.raises(UserError, match="row 0: no 'user'; give None"):
        scorer.rank({"item": 1}, [{}])
    assert scorer.score([]).shape == (0, 1) and scorer.rank({"user": 1}, []).shape == (0, 1)
    with pytest.raises(UserError, match="a model that was exported does not learn"):
        next(tables_of(scorer.model)[0].all_records()).store.write(slice(None), {})


def test_a_score_that_is_not_finite_is_told(
    scorer: Scorer, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    broken = load(scorer.folder.path)
    with torch.no_grad():
        next(broken.model.model.top.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="row 0: its score is not finite"):
        broken.score(rows)


# -- folders that are not what they were -----------------------------------------------------------


def copy(scorer: Scorer, place: Path) -> Path:
    shutil.copytree(scorer.folder.path, place)
    return place


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_anywhere_is_refused(seed: int, scorer: Scorer, tmp_path: Path) -> None:
    """Thirty of each, in all files."""
    place, random = copy(scorer, tmp_path / "model"), np.random.default_rng(seed)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    for number in range(30):
        path = files[(seed * 30 + number) % len(files)]
        was = path.read_bytes()
        at = int(random.integers(len(was)))
        path.write_bytes(was[:at] + bytes([was[at] ^ 1 << int(random.integers(8))]) + was[at + 1 :])
        with pytest.raises(UserError, match="damaged|format") as told:
            load(place)
        assert str(path) in str(told.value) or path.name == "manifest.json"
        path.write_bytes(was)
    load(place)


def test_other_folders_are_refused(scorer: Scorer, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"not a model folder \(no manifest.json\); make one with `sparrow export`"
    ):
        load(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        UserError,
        match=r"run: not a model folder .* `sparrow export .*run OUT --log LOG`, of this run$",
    ):
        load(tmp_path / "run")
    (tmp_path / "log" / "train").mkdir(parents=True)
    (tmp_path / "log" / "manifest.json").write_text('{"rows": {}}')
    with pytest.raises(
        UserError,
        match=(
            "^[^:]*log: a prepared log and no model folder; train on it, and then `sparrow export`"
        ),
    ):
        load(tmp_path / "log")
    place = copy(scorer, tmp_path / "model")
    (place / "tables" / "item.safetensors").unlink()
    with pytest.raises(
        UserError, match="item.safetensors: missing; copy the folder again, or export it again"
    ):
        load(place)
    manifest = json.loads((scorer.folder.path / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(UserError, match="format 99, this Sparrow reads 1; install a newer one"):
        load(place)


@pytest.mark.parametrize(
    ("column", "change", "says"),
    [
        (IDS + "item", lambda v: [i + 1 for i in v], "the ids of 'item' is"),
        (NUMBER + "num_1", lambda v: v + 1e-3, "the number of 'num_1' is"),
        (":score:label", lambda v: v + 1e-4, "the score of 'label' is"),
    ],
)
def test_a_folder_that_does_not_reproduce_its_rows_is_refused(
    column: str,
    change: Any,
    says: str,
    scorer: Scorer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As if this machine computed otherwise: the file is as it was written."""
    kept = pq.read_table(scorer.folder.path / CHECK)
    values = kept[column].to_pylist()
    values[17] = change(values[17])
    kept = kept.set_column(
        kept.column_names.index(column), column, pa.array(values, kept[column].type)
    )
    place = copy(scorer, tmp_path / "model")
    pq.write_table(kept, place / CHECK)
    monkeypatch.setattr("sparrow.serving.folder._unlike", lambda path, size, digest, is_known: "")
    with pytest.raises(
        UserError,
        match=f"{CHECK}: row 17: {says} .* where it was exported; .* export the model here",
    ):
        load(place)


def use(folder: Path) -> None:
    scorer = load(folder)
    _, rows = scorer.golden_rows()
    scorer.score(rows[:5])
    assert scorer.name and scorer.log_types and isinstance(scorer.step, int)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_damage_under_right_checksums_is_refused_in_a_line(
    step: int, scorer: Scorer, tmp_path: Path
) -> None:
    """Of every file, whoever wrote it so: it is refused with place and remedy, or changes no score
    that is checked. step: 7 divides neither kinds of tensors' damages nor those of columns.
    """
    place = copy(scorer, tmp_path / "model")
    assert raw_errors(place, use, seed=0, each=2, step=step) == []
    use(place)


@pytest.fixture(scope="module")
def with_every_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders with trees, products in int8, a delta, calibrators, listed rows, counts and a
    map of ids.
    """
    place = tmp_path_factory.mktemp("files")
    random, count = np.random.default_rng(0), 2000
    columns = {
        "clicked": (random.random(count) < 0.3).astype(int), "id": random.integers(0, 30, count),
        "other": random.integers(0, 20, count), "x": random.normal(size=count),
        "seen": [" ".join(f"i{i}" for i in random.integers(0, 30, i % 4)) for i in range(count)],
        "live": random.integers(0, 50, count),
    }  # fmt: skip
    pq.write_table(pa.table(columns), place / "log.parquet")
    kinds = {
        "clicked": Column(kind="label"),
        "id": Column(kind="categorical", table="id"),
        "x": Column(kind="numeric"),
        "other": Column(kind="categorical", table="other"),
        "seen": Column(kind="list", table="seen", pooling="sum"),
        "often": Column(kind="numeric", source="id", counts="seen", transform="log"),
        "live": Column(kind="categorical", table="live"),
    }
    encodings = {"id": Encoding(kind="vocabulary"), "other": Encoding(kind="range")}
    encodings |= {name: Encoding(kind="hash") for name in ("seen", "live")}
    schema = Schema(columns=kinds, encodings=encodings, split=Split(by="ratio"))
    prepared = data.prepare([place / "log.parquet"], place / "prepared", schema=schema).out
    known = Schema.load(prepared / "schema.toml").encodings["id"]
    learned.Map(
        torch.arange(known.rows, dtype=torch.int32) * 5 % 7, 7, 2, 0, known.digest or ""
    ).save(place / "map")
    overrides = (
        Override(names=("id",), addressing={"name": "learned", "file": str(place / "map")}),
        Override(names=("live",), addressing={"name": "dynamic", "rows": 60, "bucket": 30}),
    )
    changes: dict[str, Any] = {"tables": TableChoices(overrides=overrides)}
    for steps, out, more in ((3, "model", {"hot": 3}), (6, "delta", {"base": [place / "model"]})):
        train(small_run(prepared, place / f"run {out}", loop=Loop(max_steps=steps), **changes))
        calibrate: Any = "logistic" if out == "model" else "isotonic"
        export(
            place / f"run {out}", place / out, [place / "log.parquet"], calibrate=calibrate, **more
        )
    train(
        small_run(
            prepared, place / "run blend", loop=Loop(max_steps=6), model=FAMILY.config("blend")()
        )
    )
    export(place / "run blend", place / "blend", [place / "log.parquet"])
    quantize(place / "blend", place / "narrow", prepared, budget=float("inf"), rows=300)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["model", "delta", "blend", "narrow"])
def test_damage_of_every_file_under_right_checksums(
    name: str, seed: int, with_every_file: Path
) -> None:
    base = with_every_file / "model"
    uses = {"delta": lambda folder: load(base, [folder])}
    assert raw_errors(with_every_file / name, uses.get(name, use), seed=seed, each=10) == []


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_who_loads_may_have_turned_gradients_off(
    mode: Any, scorer: Scorer, rows: list[dict[str, Any]]
) -> None:
    with mode():
        loaded = load(scorer.folder.path)
    assert np.array_equal(loaded.score(rows), scorer.score(rows))


def test_rows_are_mapped_and_never_written(scorer: Scorer) -> None:
    """The bytes of the tables are those of their files, which this process has mapped."""
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("only Linux tells what a process has mapped")
    assert str(scorer.folder.path / "tables" / "user.safetensors") in mapped.read_text()


def test_an_override_of_a_rule_is_left_out(prepared: Path, log: Path, tmp_path: Path) -> None:
    overrides = (
        Override(names=("user",), rule={"name": "adam", "lr": 0.01}),
        Override(names=("item",), format={"name": "fp16"}, rule={"lr": 0.3}, state="bf16"),
    )
    scorer = served(prepared, log, tmp_path, tables=TableChoices(overrides=overrides))
    assert len(scorer.run.tables.overrides) == 1
    assert_as_evaluated(scorer, tmp_path / "run", log)

"""A run that was trained on lists and vectors of Parquet, and the same log as text."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from sparrow.data.meaning.separators import require_separators
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import Transforms
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import small_run

COLUMNS = {"seen": "lists of integers", "tags": "lists of words", "vector": "four numbers"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    rows = 600
    sizes = random.integers(0, 5, rows)
    columns: dict[str, Any] = {"item": random.integers(0, 30, rows)}
    columns["seen"] = [random.integers(0, 30, size).tolist() for size in sizes]
    columns["tags"] = [[f"tag_{tag}" for tag in random.integers(0, 9, size)] for size in sizes]
    columns["vector"] = random.normal(size=(rows, 4)).round(3).tolist()
    columns["clicked"] = random.integers(0, 2, rows)
    path = tmp_path_factory.mktemp("lists") / "log.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def run(log: Path) -> Path:
    data.prepare([log], log.parent / "prepared")
    train(
        small_run(
            log.parent / "prepared", log.parent / "run", batch_size=64, loop=Loop(max_steps=3)
        )
    )
    return log.parent / "run"


def as_text(
    log: Path, out: Path, spell: Callable[[list[Any]], str], names: tuple[str, ...]
) -> Path:
    """The log as CSV, with some columns spelt as text. The others of `COLUMNS` are cut at white
    space.
    """
    table = pq.read_table(log)
    for name in COLUMNS:
        way = spell if name in names else lambda values: " ".join(map(str, values))
        texts = [way(values) for values in table[name].to_pylist()]
        table = table.set_column(table.column_names.index(name), name, pa.array(texts))
    pacsv.write_csv(table, out)
    return out


SPELLINGS = {
    "|": lambda values: "|".join(map(str, values)),
    "json": lambda values: str(list(values)),
}


@pytest.mark.parametrize(
    ("separator", "name"),
    [(s, name) for s in SPELLINGS for name in COLUMNS if (s, name) != ("json", "vector")],
)
def test_the_separator_that_is_told_is_the_remedy(
    separator: str,
    name: str,
    log: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At every door that reads a log. numpy's brackets around a vector need none."""
    text = str(as_text(log, tmp_path / "log.csv", SPELLINGS[separator], (name,)))
    own = tmp_path / "run"
    own.symlink_to(run)
    doors = [
        ["predict", str(own), text, "--out", str(tmp_path / "scores.parquet")],
        ["export", str(own), str(tmp_path / "model"), "--log", text],
        ["prepare", text, "--out", str(tmp_path / "prepared"), "--like", str(own)],
    ]
    for door in doors:
        assert main(door) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"{text}: {name} is text such as " in told
        assert f'add separator = "{separator}" to columns.{name} in the schema.toml' in told
    own.unlink()
    shutil.copytree(run, own)
    schema = own / "schema.toml"
    line = re.compile(rf"^({name} .*) }}$", re.MULTILINE)
    schema.write_text(line.sub(rf'\1, separator = "{separator}" }}', schema.read_text(), count=1))
    for door in doors:
        assert main(door) == 0, capsys.readouterr().err
    assert main(["evaluate", str(own)]) == 0
    assert main(["evaluate", str(run), "--data", str(tmp_path / "prepared")]) == 0
    assert main(["predict", str(run), str(log), "--out", str(tmp_path / "lists.parquet")]) == 0
    assert pq.read_table(tmp_path / "scores.parquet").equals(
        pq.read_table(tmp_path / "lists.parquet")
    )


def test_a_schema_of_parquet_is_refused_for_text_too(log: Path, run: Path, tmp_path: Path) -> None:
    text = as_text(log, tmp_path / "log.csv", SPELLINGS["|"], ("tags",))
    schema = Transforms.load(run).schema
    with pytest.raises(UserError, match=r'add separator = "\|" to columns.tags'):
        data.prepare([text], tmp_path / "prepared", schema=schema)


def schema_of(separator: str | None) -> Schema:
    columns = {"seen": Column(kind="list", table="seen", separator=separator)}
    return Schema(columns=columns, encodings={"seen": Encoding()})


@pytest.mark.parametrize(
    "texts",
    [
        ["a|b c|d", "c|d", "a|b e|f c|d"],  # cut at white space
        ["1 2 3", "3", "2 1"],
        ["", "", ""],
        [None, None, "7"],
    ],
)
def test_text_that_is_cut_at_white_space_is_taken(texts: list[str | None], tmp_path: Path) -> None:
    pq.write_table(pa.table({"seen": pa.array(texts * 20, pa.string())}), tmp_path / "log.parquet")
    require_separators(open_log([tmp_path / "log.parquet"]), schema_of(None))


def test_a_separator_that_the_schema_has_is_not_doubted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"seen": ["1|2|3", "3|1", "2"] * 20}), tmp_path / "log.parquet")
    log = open_log([tmp_path / "log.parquet"])
    for separator in ("|", ",", " "):
        require_separators(log, schema_of(separator))
    with pytest.raises(UserError, match="seen is text such as '1|2|3'"):
        require_separators(log, schema_of(None))


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        # three numbers, which `prepare` takes for no vector by itself
        (["0.5|1.5|2", "1|2|3"], "|"),
        (["[1, 2, 3]", "[4, 5, 6]", "[]"], ","),
        (["1;2;3", "", "4;5;6"], ";"),
        (["0.5 1.5 2", "1 2 3"], None),
        (["[1 2 3]", "[4 5 6]"], None),
    ],
)
def test_short_vectors_and_vectors_of_integers_are_told_the_separator(
    texts: list[str], separator: str | None, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"v": texts * 20}), tmp_path / "log.parquet")
    log, schema = (
        open_log([tmp_path / "log.parquet"]),
        Schema(columns={"v": Column(kind="vector", size=3)}),
    )
    if separator is None:
        require_separators(log, schema)
    else:
        with pytest.raises(
            UserError, match=re.escape(f'add separator = "{separator}" to columns.v')
        ):
            require_separators(log, schema)

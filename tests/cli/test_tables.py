"""`sparrow tables`: what tables cost, smaller ones for a budget, a map that is fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparrow.apps.smaller.alternatives import Bytes
from sparrow.apps.smaller.budget import in_units
from sparrow.cli import main
from sparrow.cli.tables import parsed
from sparrow.core import UserError
from sparrow.embeddings import TableChoices
from sparrow.embeddings.addressing.learned import Map
from sparrow.embeddings.choices import Override
from sparrow.trained.build import tables_of
from sparrow.trained.run import Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.preflight import dense_state
from tests.runs import small_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("tables") / "run"
    train(small_run(prepared, run_dir))
    return run_dir


def test_what_tables_cost(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", str(trained)]) == 0
    said = capsys.readouterr().out
    for text in ("component", "never learnt", "user", "item", "fp32", "to train", "to serve"):
        assert text in said
    assert "combine" not in said  # no table has such bytes


def test_columns_sum_to_all_bytes(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "tables",
                str(prepared),
                "--fit",
                "tags",
                "--rows",
                "9",
                "--out",
                str(tmp_path / "tags.map"),
            ]
        )
        == 0
    )
    addressings: dict[str, dict[str, Any]] = {
        "user": {"name": "dynamic", "rows": 30},
        "item": {"name": "quotient_remainder", "operation": "mult"},
        "cat_0": {"name": "path", "collisions": 4},
        "cat_1": {"name": "mixed_dimension", "dims": [2]},
        "tags": {"name": "learned", "file": str(tmp_path / "tags.map")},
    }
    overrides = tuple(Override(names=(name,), addressing=of) for name, of in addressings.items())
    train(
        small_run(
            prepared,
            tmp_path / "run",
            tables=TableChoices(overrides=overrides),
            loop=Loop(max_steps=2),
        )
    )
    found = restore(tmp_path / "run")
    specs = [spec for tables in tables_of(found.model) for spec in tables.specs]
    counted = [Bytes.from_spec(spec, dense_state(found.run)) for spec in specs]
    capsys.readouterr()
    assert main(["tables", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "bytes in B" in said  # so they are printed to the byte
    header = next(line for line in said.splitlines() if "weights" in line)
    lines = [
        line
        for part in spec_names(specs)
        for line in said.splitlines()
        if line.split()[:1] == [part]
    ]
    sums = {}
    for name in ("weights", "state", "map", "combine"):
        end = header.index(name) + len(name)  # numbers end where the name of their column does
        cells = [line[:end].split()[-1] if line[end - 1] != " " else "0" for line in lines]
        sums[name] = sum(float(cell.replace(",", "")) for cell in cells)
    assert sums == {
        "weights": sum(one.weights for one in counted),
        "state": sum(one.state for one in counted),
        "map": sum(one.map for one in counted),
        "combine": sum(one.combine + one.combine_state for one in counted),
    }
    whole = sum(one.to("train") for one in counted)
    assert sum(sums.values()) == whole and f"all tables: {in_units(whole)} to train" in said
    assert min(sums.values()) > 0


def spec_names(specs: list[Any]) -> list[str]:
    """The names of all components."""
    return [part.name for spec in specs for part in spec.components]


def test_a_proposal_is_trained(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tables", str(trained), "--budget", "6kB", "--for", "serve", "--sample", "100"]
    assert main([*arguments, "--trainings", "0"]) == 0
    said = capsys.readouterr().out
    assert "6 kB to serve" in said and "±" in said and "smaller.toml: `sparrow train" in said
    assert "nothing was trained, and merged rows often train worse; --trainings 16" in said
    assert main([*arguments, "--trainings", "4", "--examples", "300", "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "rise of NE by short trainings" in said and "% of the run's steps" in said
    names = (
        "mixed",
        "cut",
        "hashed",
        "learned",
        "mixed_dimension",
        "quotient_remainder",
        "coprime",
        "path",
        "format",
    )
    rows = [line.split("│") for line in said.splitlines() if line.count("│") == 6]
    plans = [[cell.strip() for cell in row[1:-1]] for row in rows if row[1].strip() in names]
    # the finalists, and one that fell out
    assert [plan[-1] for plan in plans] == ["2", "2", "2", "1"]
    assert all("±" in plan[3] for plan in plans)
    assert (trained / "tables.png").stat().st_size > 5000
    small = Run.load(trained / "smaller.toml")
    assert small.run_dir == f"{trained}-smaller" and small.tables.overrides
    assert main(["train", str(trained / "smaller.toml"), "--loop.max_steps", "3"]) == 0
    assert main(["tables", small.run_dir]) == 0


def test_a_budget_that_is_kept_to_already(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["tables", str(trained), "--budget", "1GB", "--out", str(tmp_path / "small.toml")])
        == 0
    )
    assert "no more than 1 GB; nothing was tried, and no file is written" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_map_is_fitted(
    prepared: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, by in ((prepared, "both"), (trained, "counts")):
        out = tmp_path / f"{by}.map"
        assert (
            main(
                [
                    "tables",
                    str(place),
                    "--fit",
                    "user",
                    "--rows",
                    "20",
                    "--by",
                    by,
                    "--out",
                    str(out),
                ]
            )
            == 0
        )
        assert 'addressing = { name = "learned", file = ' in capsys.readouterr().out
        assert Map.load(out).rows == 20


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *[
            ("200MB", 200_000_000),
            ("1.5 GB", 1_500_000_000),
            ("7kB", 7000),
            ("1_000", 1000),
            ("12 b", 12),
        ],
        *[("1,000", 1000), ("12,345,678", 12_345_678), ("1,000.5 kB", 1_000_500)],
    ],
)
def test_budgets(text: str, count: int) -> None:
    assert parsed(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "MB", "5 apples", "-3MB", "1e6", "0", "0MB", "0.4B", "1,5GB", "1,50 GB", "1000,000", "1,"],
)
def test_no_budgets(text: str) -> None:
    with pytest.raises(UserError, match="is no number of bytes; write such as 200MB"):
        parsed(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fit", "usr", "--rows", "9", "--out", "m.map"], "no table 'usr'; did you mean 'user'"),
        (["--fit", "user", "--out", "m"], "--fit: --rows is missing"),
        (
            ["--fit", "user", "--rows", "9"],
            "--fit: --out is missing; give --rows N and --out FILE.map",
        ),
        (["--budget", "1B"], "the smallest plan takes"),
        (["--budget", "1MB", "--keep", "nobody"], "--keep: no table 'nobody'"),
        (["--budget", "much"], "is no number of bytes"),
        (["--budget", "1MB", "--picture", "it.xyz"], "end it in .png"),
        (["--budget", "1MB", "--out", "it.xyz"], "end it in .toml"),
        (["--out", "it.toml"], "give --budget too"),
        (["--budget", "1MB", "--trainings", "-1"], "trainings: -1 is out of range"),
        (["--budget", "1MB", "--examples", "0"], "examples: 0 is out of range"),
        (["--budget", "1MB", "--seeds", "1"], "seeds: 1 is out of range"),
    ],
)
def test_mistakes(
    trained: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tables", str(trained), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparrow: error: ") and says in said and said.count("\n") == 1


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err

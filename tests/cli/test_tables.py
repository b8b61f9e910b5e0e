"""`sparrow tables`: what tables cost, smaller ones for a budget, a map that is fitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparrow.cli import main
from sparrow.cli.tables import parsed
from sparrow.core import UserError
from sparrow.embeddings.addressing.learned import Map
from sparrow.trained.run import Run
from sparrow.training import train
from tests.runs import small_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("tables") / "run"
    train(small_run(prepared, run_dir))
    return run_dir


def test_what_tables_cost(trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["tables", str(trained)]) == 0
    said = capsys.readouterr().out
    for text in ("component", "never learnt", "user", "item", "fp32", "to train", "to serve"):
        assert text in said


def test_a_proposal_is_trained(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tables", str(trained), "--budget", "6kB", "--for", "serve", "--trainings", "0", "--sample", "100"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "6 kB to serve" in said and "±" in said and "smaller.toml: `sparrow train" in said
    assert "only training can judge were left out" in said
    assert (trained / "tables.png").stat().st_size > 5000
    small = Run.load(trained / "smaller.toml")
    assert small.run_dir == f"{trained}-smaller" and small.tables.overrides
    assert main(["train", str(trained / "smaller.toml"), "--loop.max_steps", "3"]) == 0
    assert main(["tables", small.run_dir]) == 0


def test_a_map_is_fitted(prepared: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, by in ((prepared, "both"), (trained, "counts")):
        out = tmp_path / f"{by}.safetensors"
        assert main(["tables", str(place), "--fit", "user", "--rows", "20", "--by", by, "--out", str(out)]) == 0
        assert 'addressing = { name = "learned", file = ' in capsys.readouterr().out
        assert Map.load(out).rows == 20


@pytest.mark.parametrize(
    ("text", "count"), [("200MB", 200_000_000), ("1.5 GB", 1_500_000_000), ("7kB", 7000), ("1_000", 1000), ("12 b", 12)]
)
def test_budgets(text: str, count: int) -> None:
    assert parsed(text) == count


@pytest.mark.parametrize("text", ["", "MB", "5 apples", "-3MB", "1e6", "0", "0MB", "0.4B"])
def test_no_budgets(text: str) -> None:
    with pytest.raises(UserError, match="is no number of bytes; write such as 200MB"):
        parsed(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fit", "usr", "--rows", "9", "--out", "m"], "no table 'usr'; did you mean 'user'"),
        (["--fit", "user", "--out", "m"], "--fit: --rows is missing"),
        (["--fit", "user", "--rows", "9"], "--fit: --out is missing"),
        (["--budget", "1B"], "the smallest plan takes"),
        (["--budget", "1MB", "--keep", "nobody"], "--keep: no table 'nobody'"),
        (["--budget", "much"], "is no number of bytes"),
        (["--budget", "1MB", "--picture", "it.xyz"], "end it in .png"),
        (["--budget", "1MB", "--out", "it.xyz"], "end it in .toml"),
        (["--out", "it.toml"], "give --budget too"),
        (["--budget", "1MB", "--trainings", "-1"], "trainings: -1 is out of range"),
    ],
)
def test_mistakes(trained: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", str(trained), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparrow: error: ") and says in said and said.count("\n") == 1


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from sparrow.core.config import Family
from sparrow.features.schema import Schema
from sparrow.trained.run import Run

ROOT = Path(__file__).parents[2]


def test_the_quickstart_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "recipes" / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    result = quickstart.main(tmp_path, rows=20_000)
    assert result["auc"] > 0.65
    assert re.search(r"test AUC 0\.\d+, NE .* best possible", capsys.readouterr().out)
    assert (tmp_path / "model" / "step-000000001" / "manifest.json").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_reads(path: Path) -> None:
    Schema.load(path) if path.name.endswith(".schema.toml") else Run.load(path)


def test_every_model_has_a_recipe_and_a_row_in_the_docs() -> None:
    family, page = Family("sparrow.models"), (ROOT / "docs" / "adding-a-model.md").read_text()
    runs = [p for p in (ROOT / "recipes").glob("*.toml") if not p.name.endswith(".schema.toml")]
    assert {family.name_of(Run.load(path).model) for path in runs} == set(family.names())
    for name in family.names():
        assert f"| `{name}` |" in page

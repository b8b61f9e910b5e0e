"""A folder that says what it imports, and who imports it, says what the linter holds it to."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
ROWS = [
    [name for name in row.split(" | ") if not name.startswith("(")]
    for row in LINTER["contracts"][0]["layers"]
]
ROWS = [row for row in ROWS if row]
SAYS = re.compile(r"^Imports: (.*)\. Imported by: (.*)\.$")


def said_of(folder: str) -> tuple[str, str] | None:
    """What the last paragraph of a folder's docstring says of imports."""
    text = (ROOT / "sparrow" / folder / "__init__.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    says = SAYS.match(docstring.split("\n\n")[-1].replace("\n", " "))
    return (says[1], says[2]) if says else None


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_folder_says_what_the_linter_holds(number: int) -> None:
    lower = ROWS[number + 1 :]
    higher = ROWS[:number]
    below = ", ".join(lower[0]) + (" and below" if len(lower) > 1 else "") if lower else "nothing"
    above = (
        ", ".join(higher[-1]) + (" and above" if len(higher) > 1 else "") if higher else "nothing"
    )
    for folder in ROWS[number]:
        assert said_of(folder) in (None, (below, above)), folder


def test_almost_all_say_it() -> None:
    folders = [folder for row in ROWS for folder in row]
    assert sum(said_of(folder) is not None for folder in folders) >= len(folders) - 1


def test_a_library_module_says_why_a_function_imports_another() -> None:
    """The comment on the import's own line is the exception. Apps and the command line load
    what a call needs.
    """
    silent = []
    for path in sorted((ROOT / "sparrow").rglob("*.py")):
        if path.relative_to(ROOT / "sparrow").parts[0] in ("apps", "cli"):
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for function in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    is_own = (
                        isinstance(node, ast.ImportFrom)
                        and (node.module or "").startswith("sparrow")
                    ) or (isinstance(node, ast.Import) and node.names[0].name.startswith("sparrow"))
                    if is_own and "  # " not in lines[node.lineno - 1]:
                        silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not silent, "lift it, or say why on its line"

"""Documents: every link leads somewhere, every file they name is there, lines end at 100 characters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(p for folder in ("docs", "benchmarks", "sparrow") for p in (ROOT / folder).rglob("*.md")),
]
LONG_LINES = ("CHANGELOG.md", "docs/LOG.md", "sparrow/")
WIDTH = 100
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|^    [^\n]*$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`((?:benchmarks|tests|recipes|docs|sparrow)/[\w./-]+)(?: [^`]*)?`")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page: Path) -> str:
    """The page with blank lines where its code is."""
    return CODE.sub(lambda code: "\n" * code.group().count("\n"), page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may say after #, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        name, _, anchor = link.partition("#")
        if name.startswith(("http://", "https://")):
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@each_page
def test_named_files_are_there(page: Path) -> None:
    if page.name in ("LOG.md", "CHANGELOG.md"):
        return  # they tell of what was
    absent = [name for name in NAMED.findall(prose(page)) if "NAME" not in name and not (ROOT / name).exists()]
    assert not absent


@each_page
def test_lines_are_not_too_long(page: Path) -> None:
    if page.relative_to(ROOT).as_posix().startswith(LONG_LINES):
        return
    lines = enumerate(prose(page).splitlines(), 1)
    assert not [number for number, line in lines if len(line) > WIDTH and not line.startswith("|")]


def test_the_readme_lists_every_page() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(prose(ROOT / "README.md"))}
    assert not [p.name for p in (ROOT / "docs").rglob("*.md") if p.resolve() not in linked]

"""Documents: every link leads somewhere, every file they name is there, lines end at 100
characters.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(
        p
        for folder in ("docs", "notes", "benchmarks", "sparrow")
        for p in (ROOT / folder).rglob("*.md")
    ),
]
LONG_LINES = ("sparrow/",)
WIDTH = 100
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|^    [^\n]*$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`((?:benchmarks|tests|recipes|docs|notes|sparrow)/[\w./-]+)(?: [^`]*)?`")

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def prose(page: Path) -> str:
    """The page with blank lines where its code is."""
    return CODE.sub(lambda code: "\n" * code.group().count("\n"), page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may say after #, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).replace(" ", "-")
        for heading in headings
    }


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
    if page.name == "CHANGELOG.md" or page.is_relative_to(ROOT / "notes"):
        return  # they tell of what was
    absent = [
        name
        for name in NAMED.findall(prose(page))
        if "NAME" not in name and not (ROOT / name).exists()
    ]
    assert not absent


@each_page
def test_lines_are_not_too_long(page: Path) -> None:
    if page.relative_to(ROOT).as_posix().startswith(LONG_LINES):
        return
    lines = enumerate(prose(page).splitlines(), 1)
    assert not [number for number, line in lines if len(line) > WIDTH and not line.startswith("|")]


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    return {(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(page))}


@pytest.mark.parametrize(
    ("index", "folder"), [("docs/README.md", "docs"), ("notes/README.md", "notes")]
)
def test_an_index_lists_every_page(index: str, folder: str) -> None:
    pages = set((ROOT / folder).rglob("*.md")) - {ROOT / index}
    assert not pages - linked(ROOT / index)


@pytest.mark.parametrize("page", sorted((ROOT / "notes").glob("*.md")), ids=lambda page: page.name)
def test_notes_begin_with_what_stands_and_have_the_newest_first(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", prose(page), re.MULTILINE)
    days = [day[0] for heading in headings if (day := re.match(r"\d{4}-\d\d-\d\d", heading))]
    assert days == sorted(days, reverse=True)
    assert not days or headings[0] == "What stands today"


def packages(extras: set[str]) -> set[str]:
    """The names of what extras install, with what they name among each other."""
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names: set[str] = set()
    waiting = set(extras)
    while waiting:
        for requirement in offered[waiting.pop()]:
            if own := re.match(r"sparrow-rec\[(.*)\]", requirement):
                waiting |= set(own[1].split(","))
            else:
                names.add(re.split(r"[^\w.-]", requirement)[0])
    return names


def test_what_the_readme_installs_is_what_was_measured() -> None:
    """The figures beside LightGBM are of blends with trees. A server needs none, as a model keeps
    them as tensors.
    """
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/first-log.md")]
    lines = [
        extras for page in pages for extras in re.findall(r"pip install .*'\.\[([\w,]+)\]'", page)
    ]
    assert len(lines) >= 4 and all(
        "lightgbm" in packages(set(extras.split(","))) for extras in lines
    )
    assert "lightgbm" not in packages({"serve"}) and "starlette" in packages({"serve"})

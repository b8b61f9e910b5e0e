"""Pages of HTML, read and checked."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """Headings and cells of a page; fails on tags that are not closed in order, and on whatever
    loads from outside.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.pictures = 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object")
        for name, value in attrs:
            if name in ("src", "href"):
                assert value is not None and value.startswith(
                    ("data:image/svg+xml;base64,", "#")
                ), value
        self.pictures += tag == "img"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(text)
        if self.open and self.open[-1] == "td":
            self.cells.append(text.replace("\xa0", " "))


def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))

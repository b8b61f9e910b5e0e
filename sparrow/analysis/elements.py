"""One HTML file that needs nothing else: its look, tables and pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  color: #1c2126; background: #fff; max-width: 66rem; margin: 2rem auto 4rem; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin: 0; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; padding-top: .7rem; border-top: 1px solid #d8dce1; }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; overflow-wrap: anywhere; }
p { margin: .4rem 0 .8rem; max-width: 50rem; } .soft { color: #5a626c; }
nav { margin-top: .8rem; font-size: .9rem; display: flex; flex-wrap: wrap; gap: 0 1.1rem; }
nav a { color: #2f6fa8; text-decoration: none; }
.cards { display: flex; flex-wrap: wrap; gap: .4rem 2.4rem; margin: 1.2rem 0 .4rem; }
.cards div { line-height: 1.3; } .cards b { display: block; font-size: 1.5rem; font-weight: 600; }
.cards span { color: #5a626c; font-size: .85rem; }
.wide { overflow-x: auto; max-width: 100%; min-width: 0; }
table { border-collapse: collapse; font-size: .9rem; margin: .6rem 0 1rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .6rem; text-align: right; vertical-align: top;
  border-bottom: 1px solid #e8ebee; }
th { font-weight: 600; border-bottom-color: #9aa2ab; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; overflow-wrap: anywhere;
  min-width: 9rem; max-width: 20rem; } .words td:last-child { min-width: 20rem; }
.passes :is(th, td):nth-child(-n+2), .words :is(th, td) { text-align: left; }
.passes :is(th, td):nth-child(-n+3), .words :is(th, td):not(:last-child) {
  white-space: nowrap; max-width: none; }
.beside { display: flex; flex-wrap: wrap; gap: 0 3rem; }
img { width: 100%; min-width: 44rem; display: block; margin: .6rem 0; }
pre { background: #f6f7f8; padding: .8rem 1rem; font-size: .8rem; line-height: 1.4;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { margin: 0; max-width: none; font-size: 11px; }
  nav { display: none; } img { min-width: 0; }
  h2, h3 { break-after: avoid; } img, tr, .cards { break-inside: avoid; }
  .wide { overflow: visible; } }
"""


def page(
    title: str, under: str, cards: Sequence[tuple[str, str]], sections: Sequence[tuple[str, str]]
) -> str:
    """Returns the whole file.

    Args:
        title: of the page.
        under: a line below the title.
        cards: (figure, what it is).
        sections: (heading, HTML).
    """
    links = "".join(
        f'<a href="#s{i}">{escape(heading)}</a>' for i, (heading, _) in enumerate(sections)
    )
    figures = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(meaning)}</span></div>"
        for value, meaning in cards
    )
    parts = "".join(
        f'<section id="s{i}"><h2>{escape(heading)}</h2>\n{html}</section>\n'
        for i, (heading, html) in enumerate(sections)
    )
    head = (
        '<head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n"
    )
    header = (
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="soft">{escape(under)}</p>'
        f'<div class="cards">{figures}</div>'
        f"<nav>{links}</nav></header>\n"
    )
    return f'<!doctype html>\n<html lang="en">{head}<body>{header}{parts}</body></html>\n'


def suspects(notes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields a section, (heading, HTML), about features that may know the outcome, if there are
    any.
    """
    if notes:
        rows = table(["feature", "what was measured"], [*notes.items()])
        words = (
            "If one of these is known only after the label, no figure below says how good the model"
            " is in service."
        )
        yield "Features that may know the outcome", text(words) + f'<div class="words">{rows}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table. Floats get four digits, and what is undefined a dash.

    Where the page is too narrow for it, cells break before ± and between words; what is still wider
    scrolls in its box.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{_together(cell(x))}</td>" for x in row)
        body += f"<tr>{cells}</tr>\n"
    html = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
    return f'<div class="wide">{html}</div>\n'


def _together(words: str) -> str:
    """Returns a cell as HTML, with a number and its unit or sign on one line."""
    return re.sub(r"(?<=±) |(?<=&lt;) |(?<=\d) (?=%|[KMG]iB\b|B\b)", "&nbsp;", escape(words))


def cell(x: Any) -> str:
    """Returns a value as it is written: floats with four digits, counts with thousands marked."""
    if isinstance(x, float):
        return f"{x:.4f}" if math.isfinite(x) else "-"
    return f"{x:,}" if isinstance(x, int) else str(x)


def share(x: float) -> str:
    """Returns a share as a percentage."""
    if not math.isfinite(x):
        return "-"
    if x == 0:
        return "0"
    return "< 0.1 %" if 0 < x < 0.001 else f"{100 * x:.1f} %"


def size(count: float) -> str:
    """Returns bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def with_error(value: float, error: float) -> str:
    """Returns a value and half the width of its 95 % interval. error: the standard error."""
    return f"{value:.4f} ± {1.96 * error:.4f}" if error > 1e-9 else cell(value)  # NaN too


def text(words: str, *, soft: bool = False) -> str:
    """Returns a paragraph."""
    return f'<p class="soft">{escape(words)}</p>\n' if soft else f"<p>{escape(words)}</p>\n"


def heading(words: str) -> str:
    """Returns a heading within a section."""
    return f"<h3>{escape(words)}</h3>\n"


def side_by_side(*parts: str) -> str:
    """Returns tables next to each other, as far as they fit."""
    return f'<div class="beside">{"".join(parts)}</div>\n'


def image(uri: str, words: str) -> str:
    """Returns a picture. words: what it shows, for those who cannot see it."""
    return f'<div class="wide"><img src="{uri}" alt="{escape(words)}"></div>\n'


def without_empty_columns(
    header: Sequence[str], lines: Sequence[Sequence[Any]]
) -> tuple[list[str], list[list[Any]]]:
    """Returns a table without the columns that are empty in every line; the first one stays."""

    def is_filled(column: int) -> bool:
        return column == 0 or not lines or any(line[column] != "" for line in lines)

    filled = [column for column in range(len(header)) if is_filled(column)]

    def cut(line: Sequence[Any]) -> list[Any]:
        return [line[column] for column in filled]

    return cut(header), [cut(line) for line in lines]

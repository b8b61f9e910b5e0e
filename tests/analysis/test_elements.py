from __future__ import annotations

from sparrow.analysis import elements
from tests.analysis.pages import Page


def test_cells_of_wide_tables_break_where_they_can_be_read() -> None:
    """Between words and before an error, but never within a number and what belongs to it."""
    cells = ["one, two", "0.75 ± 0.01", "< 0.1 %", "2.5 KiB", "2023-11-16 12:14", "<b> ± 1"]
    html = elements.table(["", *cells[1:]], [cells])
    for part in (
        "one, two",
        "0.75 ±&nbsp;0.01",
        "&lt;&nbsp;0.1&nbsp;%",
        "2.5&nbsp;KiB",
        "2023-11-16 12:14",
    ):
        assert f"<td>{part}</td>" in html
    assert html.startswith('<div class="wide">') and ".wide { overflow-x: auto;" in elements.STYLE
    assert Page(html).cells == cells

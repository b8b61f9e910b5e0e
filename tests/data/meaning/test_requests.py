from __future__ import annotations

import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.data.logs.tables import table_log
from sparrow.data.meaning.inference import infer_log
from sparrow.features.schema import Source

TABLE = pa.Table.from_pylist(
    [
        {
            "row": 7 + i,
            "user": i % 4,
            "session_id": i // 5,
            "article_ids_inview": [i, i + 1, i + 2][: 2 + i % 2],
            "article_ids_clicked": [i],
            "position": [1, 2, 3][: 2 + i % 2],
            "history": [i, 3, 5],
        }
        for i in range(50)
    ]
)


def test_what_a_log_of_requests_has() -> None:
    schema = infer_log(table_log(TABLE))
    assert {name: column.kind for name, column in schema.columns.items()} == {
        "row": "ignore",
        "user": "categorical",
        "session_id": "ignore",
        "article_ids_inview": "categorical",
        "position": "categorical",
        "history": "list",
        "clicked": "label",
        "request": "group",
    }
    assert schema.columns["row"].note == "numbers the requests"
    told = (
        "each of article_ids_inview is a row, clicked if among article_ids_clicked; position too;"
        " see [source]"
    )
    assert str(schema.columns["clicked"].note).startswith(told)
    assert (schema.source.candidates, schema.source.parallel) == (
        "article_ids_inview",
        ("position",),
    )


def test_a_log_may_number_its_requests_itself() -> None:
    schema = infer_log(table_log(TABLE.rename_columns(["impression_id", *TABLE.column_names[1:]])))
    assert schema.role("group") == "impression_id"
    assert (schema.columns["request"].kind, schema.columns["request"].note) == (
        "ignore",
        "ignored, as the group is impression_id",
    )


def test_lists_that_may_go_along_are_told() -> None:
    """Where all rows have as many candidates, lengths do not tell."""
    even = TABLE.filter(pa.array([i % 2 == 1 for i in range(50)]))
    schema = infer_log(table_log(even))
    flags = "--candidates article_ids_inview --clicked=article_ids_clicked --parallel position"
    assert schema.source.parallel == () and str(schema.columns["position"].note).endswith(
        f"add {flags}"
    )
    named = Source(
        candidates="article_ids_inview", clicked="article_ids_clicked", parallel=("position",)
    )
    assert infer_log(table_log(even, named)).columns["position"].kind == "categorical"


def test_a_log_without_clicks_has_no_label() -> None:
    told = Source(candidates="article_ids_inview", clicked="article_ids_click")
    with pytest.raises(
        UserError,
        match=r"source\.clicked: no column 'article_ids_click' in the table; did you mean 'art",
    ):
        infer_log(table_log(TABLE, told))

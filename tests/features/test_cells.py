from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.core.errors import UserError
from sparrow.features.cells import are_odd, as_id_texts, as_number_texts, trimmed, without_words
from sparrow.features.schema import WORDS, Column

IDS = {
    **dict.fromkeys(WORDS),
    **dict.fromkeys(("true", "True", "TRUE"), "true"),
    **dict.fromkeys(("false", "False", "FALSE"), "false"),
    **{
        "5.0": "5",
        "-7.000": "-7",
        "0.0": "0",
        "-0.0": "0",
        "12345678901234567890.0": "12345678901234567890",
    },
    **{
        text: text
        for text in (
            "5",
            "007",
            "007.0",
            "1e5",
            "+5",
            "5.50",
            "5.",
            ".0",
            "-0",
            "1,000",
            "na",
            "tRUE",
            "yes",
        )
    },
}


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str
)
def test_an_id_is_what_its_text_says(kind: pa.DataType) -> None:
    made = as_id_texts(pa.array(list(IDS)).cast(kind))
    assert made.type == kind
    assert made.cast(pa.string()).to_pylist() == list(IDS.values())
    assert as_id_texts(pa.array(["NA", "None", "x"]), ("NA",)).to_pylist() == ["NA", None, "x"]


def test_numbers_are_read_without_words_and_with_yes_and_no() -> None:
    texts = pa.array([" NA ", "True", " FALSE\t", "5.0", "1e5", None, "x"])
    assert as_number_texts(texts).to_pylist() == [None, "1", "0", "5.0", "1e5", None, "x"]


def test_white_space_around_a_word_does_not_count_but_around_bytes() -> None:
    assert without_words(pa.array([" NA ", "NA x"])).to_pylist() == [None, "NA x"]
    assert without_words(pa.array([b" NA ", b"NA", b"\xff"])).to_pylist() == [
        b" NA ",
        None,
        b"\xff",
    ]


@given(st.lists(st.sampled_from(list(IDS)) | st.text(max_size=6)))
def test_a_text_that_changes_is_odd(texts: list[str]) -> None:
    made = as_id_texts(pa.array(texts, pa.string())).to_pylist()
    assert are_odd(texts) or made == texts
    assert as_id_texts(pa.array(made, pa.string())).to_pylist() == made  # once is enough


def test_words_are_kept_in_columns_of_ids_alone() -> None:
    Column(kind="list", table="t", present=("NA",))
    Column(kind="numeric", counts="seen", present=("NA",))
    for settings in ({"kind": "numeric"}, {"kind": "categorical", "table": "t", "quantiles": 4}):
        with pytest.raises(UserError, match="present: for columns of ids"):
            Column(**settings, present=("NA",))
    with pytest.raises(
        UserError, match="present: 'n/a' is no word for missing, which are NA, .*; leave it out"
    ):
        Column(kind="categorical", table="t", present=("n/a",))


WHITE = " \t\n\v\f\r\x1c\x1d\x1e\x1f"
CELLS = st.lists(
    st.none() | st.text(st.sampled_from("ab\u00e9\u00a0" + WHITE), max_size=4), max_size=6
)


@given(CELLS, st.integers(0, 3), st.sampled_from([pa.string(), pa.large_string()]))
def test_trimmed_text_is_what_python_strips(
    cells: list[str | None], start: int, kind: pa.DataType
) -> None:
    want = [cell if cell is None else cell.strip(WHITE) for cell in cells[start:]]
    assert trimmed(pa.array(cells, kind).slice(start)).to_pylist() == want

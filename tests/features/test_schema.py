"""What a schema cannot say of sessions and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.features.schema import Cluster, Column, Schema, Split
from tests.data.grouped import SCHEMA


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"cluster": Cluster(by="sesion")},
            "cluster.by: 'sesion' is no column of kind session or group; did you mean",
        ),
        ({"groups": {"g": ()}}, "groups.g: empty; name its features"),
        ({"groups": {"g": ("usr",)}}, "groups.g: no feature 'usr'; did you mean 'user'"),
        ({"groups": {"g": ("label",)}}, "groups.g: no feature 'label'"),
        ({"groups": {"g": ("user",), "h": ("user",)}}, "groups.g: 'user' is named twice"),
    ],
)
def test_what_a_schema_cannot_say(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(SCHEMA, **changes)


SHOWN = {"n": Column(kind="impressions"), "y": Column(kind="label"), "x": Column(kind="numeric")}
TEACHER = {"y": Column(kind="label", probability=True), "x": Column(kind="numeric")}
COUNTED = Column(kind="numeric", source="x", counts="rate")


@pytest.mark.parametrize(
    ("columns", "changes", "says"),
    [
        (
            SHOWN,
            {"split": Split(negatives=0.5)},
            "split.negatives: .* 'y' is a share of each row; leave negatives out",
        ),
        (
            TEACHER,
            {"split": Split(negatives=0.5)},
            "split.negatives: .* 'y' is a share of each row",
        ),
        (SHOWN | {"m": Column(kind="impressions")}, {}, "n and m are both of kind impressions"),
        (
            SHOWN | {"y": Column(kind="label", positive="3")},
            {},
            "y: 'y' counts showings of column 'n'; leave positive",
        ),
        (
            SHOWN | {"y": Column(kind="label", threshold=3)},
            {},
            "y: 'y' counts showings of column 'n'; leave positive",
        ),
        (TEACHER | {"c": COUNTED}, {}, "c.counts: 'y' is a probability; use counts = 'seen'"),
    ],
)
def test_what_shares_of_a_row_cannot_be(
    columns: dict[str, Column], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        Schema(columns=columns, **changes)


def test_counts_of_ids_go_with_shares_where_they_mean_something() -> None:
    Schema(columns=SHOWN | {"c": COUNTED})
    Schema(columns=TEACHER | {"c": replace(COUNTED, counts="seen")})
    with pytest.raises(
        UserError, match="positive, threshold and probability: each says what counts as 1"
    ):
        Column(kind="label", positive="1", probability=True)
    with pytest.raises(
        UserError, match="probability: for columns of kind label, and this one is numeric"
    ):
        Column(kind="numeric", probability=True)

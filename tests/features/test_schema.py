"""What a schema cannot say of sessions and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.features.schema import Cluster
from tests.data.grouped import SCHEMA


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cluster": Cluster(by="sesion")}, "cluster.by: 'sesion' is no column of kind session or group; did you mean"),
        ({"groups": {"g": ()}}, "groups.g: empty; name its features"),
        ({"groups": {"g": ("usr",)}}, "groups.g: no feature 'usr'; did you mean 'user'"),
        ({"groups": {"g": ("label",)}}, "groups.g: no feature 'label'"),
        ({"groups": {"g": ("user",), "h": ("user",)}}, "groups.g: 'user' is named twice"),
    ],
)
def test_what_a_schema_cannot_say(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(SCHEMA, **changes)
